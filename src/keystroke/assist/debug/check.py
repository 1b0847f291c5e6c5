"""Errors in text that is not saved, and never run: syntax, and in Python names, imports, attributes.

Law: plain functions on text; ranges are offsets. Every fix that comes out was applied and checked again: its
diagnostic is gone and no new one has come. What cannot be known from the text is not reported.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from pyflakes import checker, messages

from keystroke.assist.debug.candidates import candidates
from keystroke.assist.debug.diagnostic import Diagnostic, Fix, Level
from keystroke.assist.debug.foreign import foreign_fixes, foreign_language, syntax_errors
from keystroke.assist.debug.knowledge import MOVED_MODULES
from keystroke.assist.debug.modules import Project, parsed
from keystroke.assist.debug.scope import BUILTINS, Classes, Source, nearest, receiver, visible
from keystroke.assist.debug.syntax_fixes import broken, syntax_fixes
from keystroke.errors import InputError
from keystroke.text import Document, apply_edits

MAX_TEXT = 2_000_000  # characters; beyond this a file is data
MAX_FIXED = 24  # diagnostics per check that get fixes at once; `fixes_for` makes more when asked
_TRIES = 6
_LIMIT = 3
_QUIET = re.compile(r"#\s*(?:noqa(?!:)|noqa:[^#]*\bF\d|type:\s*ignore|pyright:\s*ignore)", re.IGNORECASE)
_GUARDS = {"ImportError", "ModuleNotFoundError", "AttributeError", "Exception", "NameError"}
_WARNED: dict[type, tuple[str, Level]] = {
    messages.UnusedVariable: ("unused-variable", Level.HINT),
    messages.RedefinedWhileUnused: ("redefined-unused", Level.WARNING),
    messages.FStringMissingPlaceholders: ("useless-f-prefix", Level.HINT),
    messages.IsLiteral: ("is-literal", Level.WARNING),
    messages.UnusedImport: ("unused-import", Level.WARNING),
    messages.UndefinedName: ("undefined-name", Level.ERROR),
    messages.UndefinedLocal: ("undefined-local", Level.ERROR),
    messages.UndefinedExport: ("undefined-export", Level.ERROR),
    messages.DuplicateArgument: ("duplicate-argument", Level.ERROR),
    messages.ReturnOutsideFunction: ("return-outside-function", Level.ERROR),
    messages.YieldOutsideFunction: ("yield-outside-function", Level.ERROR),
    messages.BreakOutsideLoop: ("break-outside-loop", Level.ERROR),
    messages.ContinueOutsideLoop: ("continue-outside-loop", Level.ERROR),
    messages.DefaultExceptNotLast: ("default-except-not-last", Level.ERROR),
    messages.AssertTuple: ("assert-tuple", Level.WARNING),
    messages.IfTuple: ("if-tuple", Level.WARNING),
    messages.MultiValueRepeatedKeyLiteral: ("repeated-key", Level.WARNING),
    messages.RaiseNotImplemented: ("raise-notimplemented", Level.ERROR),
    messages.StringDotFormatMissingArgument: ("format-missing-argument", Level.ERROR),
    messages.StringDotFormatInvalidFormat: ("format-invalid", Level.ERROR),
    messages.PercentFormatPositionalCountMismatch: ("format-count", Level.ERROR),
    messages.PercentFormatMissingArgument: ("format-missing-argument", Level.ERROR),
    messages.ForwardAnnotationSyntaxError: ("annotation-syntax", Level.ERROR),
    messages.LateFutureImport: ("late-future-import", Level.ERROR),
    messages.TwoStarredExpressions: ("two-starred", Level.ERROR),
}


def check(
    text: str, path: str | Path = "", *, project: Project | None = None, fixes: bool = True
) -> tuple[Diagnostic, ...]:
    """What is wrong with a text, in the order of the text. `path` tells its language and where it lies; it
    need not be saved, or exist. InputError for a text that is too long."""
    if not concerns(path):
        return ()
    if len(text) > MAX_TEXT:
        raise InputError(f"the text has {len(text):,} characters; at most {MAX_TEXT:,} are checked")
    if not is_python(path):
        return tuple(
            replace(item, fixes=foreign_fixes(text, item, path, _LIMIT)) if fixes else item
            for item in syntax_errors(text, path)
        )
    home = project or Project()
    found = _found(text, path, home)
    if not fixes:
        return found
    return tuple(
        replace(item, fixes=fixes_for(text, item, path, project=home, known=found))
        if at < MAX_FIXED
        else item
        for at, item in enumerate(found)
    )


def concerns(path: str | Path) -> bool:
    """Whether a path is one whose text can be checked."""
    return is_python(path) or foreign_language(path) is not None


def is_python(path: str | Path) -> bool:
    """Whether a path is Python's; a text without one is taken for it."""
    return Path(path).suffix.lower() in (".py", ".pyi", ".pyw", "")


def fixes_for(
    text: str,
    diagnostic: Diagnostic,
    path: str | Path = "",
    *,
    project: Project | None = None,
    known: tuple[Diagnostic, ...] | None = None,
    limit: int = _LIMIT,
) -> tuple[Fix, ...]:
    """The proved fixes of one diagnostic of `text`, best first. `known`: what the text's check said."""
    if not is_python(path):
        return foreign_fixes(text, diagnostic, path, limit)
    home = project or Project()
    if diagnostic.code == "syntax-error":
        error = broken(text)
        return syntax_fixes(text, error, limit) if error is not None else ()
    source = read(text)
    if source is None:
        return ()
    before = Counter(item.code for item in (known if known is not None else _found(text, path, home)))
    proved: list[Fix] = []
    seen: set[str] = set()
    for tried, fix in enumerate(candidates(source, diagnostic, home, _origin(path))):
        if tried >= _TRIES or len(proved) >= limit:
            break
        after = apply_edits(text, fix.edits)
        if after in seen:
            continue
        seen.add(after)
        now = Counter(item.code for item in _found(after, path, home))
        if now[diagnostic.code] < before[diagnostic.code] and not now - before:
            proved.append(fix)
    return tuple(proved)


def read(text: str) -> Source | None:
    """The text with its tree; None for a text that does not parse."""
    try:
        return Source(text, parsed(text), Document(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _origin(path: str | Path) -> Path | None:
    return Path(path) if str(path) else None


def _found(text: str, path: str | Path, project: Project) -> tuple[Diagnostic, ...]:
    source = read(text)
    if source is None:
        error = broken(text)
        if error is None:
            return ()
        end = max(error.end, min(error.start + 1, len(text)))
        message = error.message[:1].upper() + error.message[1:]
        return (Diagnostic("syntax-error", Level.ERROR, message, error.start, end),)
    found: list[Diagnostic] = []
    try:
        found += _flakes(source, path)
        found += _imports(source, project, _origin(path))
        found += _attributes(source, project, _origin(path))
        found += _own_attributes(source)
        found += _methods_without_self(source)
        found += _forgotten_prefixes(source)
    except RecursionError:
        pass  # machine-made code, deeper than the stack: what was found so far stands
    kept = [item for item in found if not _QUIET.search(_line(source, item.start))]
    return tuple(sorted(set(kept), key=lambda item: (item.start, item.end, item.code)))


def _line(source: Source, offset: int) -> str:
    return source.document.line(source.document.position(offset).line)


# ── names ─────────────────────────────────────────────────────────────────────────────────────


def _flakes(source: Source, path: str | Path) -> Iterator[Diagnostic]:
    name = Path(path).name if str(path) else "text.py"
    for message in checker.Checker(source.tree, filename=str(path) or "text.py").messages:
        known = _WARNED.get(type(message))
        if known is None or (known[0] == "unused-import" and name == "__init__.py"):
            continue
        code, level = known
        subject = str(message.message_args[0]) if message.message_args else ""
        start = source.offset(message.lineno, message.col)
        end = source.document.line_span(message.lineno - 1)[1]
        if code in ("undefined-name", "undefined-local"):
            place = source.word(message.lineno, message.col, subject)
            if place is None:
                continue
            start, end = place
            words = f"`{subject}` is not defined" if code == "undefined-name" else ""
            words = words or f"`{subject}` is used before this function gives it a value"
        else:
            words = (message.message % message.message_args).replace("'", "`")
            words = words[:1].upper() + words[1:]
            end = max(end, start)
        yield Diagnostic(code, level, words, start, end, subject)


# ── imports and attributes of modules ─────────────────────────────────────────────────────────


def _guarded(source: Source) -> set[int]:
    """The lines inside `try` blocks that expect what is reported here, and under tests of what there is."""
    lines: set[int] = set()
    for node in source.of(ast.Try):
        expected = [h.type for h in node.handlers]
        names = {n.id for t in expected if t is not None for n in ast.walk(t) if isinstance(n, ast.Name)}
        if None in expected or names & _GUARDS:
            for inner in node.body:
                lines.update(range(inner.lineno, (inner.end_lineno or inner.lineno) + 1))
    for test in source.of(ast.If):
        words = {n.attr for n in ast.walk(test.test) if isinstance(n, ast.Attribute)}
        words |= {n.id for n in ast.walk(test.test) if isinstance(n, ast.Name)}
        if words & {"hasattr", "version_info", "platform", "system", "name"}:
            lines.update(range(test.lineno, (test.end_lineno or test.lineno) + 1))
    return lines


def _imports(source: Source, project: Project, origin: Path | None) -> Iterator[Diagnostic]:
    guarded = _guarded(source)
    for plain in source.of(ast.Import):
        for alias in plain.names:
            if plain.lineno not in guarded:
                yield from _missing(alias.name, source.span(alias)[0], project, origin)
    for node in source.of(ast.ImportFrom):
        if node.lineno in guarded:
            continue
        if node.level:
            target = project.relative(origin, node.level, node.module or "") if origin is not None else None
            names = project.names_of(target) if target is not None else None
            module = "." * node.level + (node.module or "")
        else:
            module = node.module or ""
            absent = list(_missing(module, source.span(node)[0] + len("from "), project, origin))
            yield from absent
            names = None if absent else project.names(module, origin)
        if names is None:
            continue
        for alias in node.names:
            if alias.name != "*" and alias.name not in names:
                start = source.span(alias)[0]
                yield Diagnostic(
                    "unknown-import-name",
                    Level.ERROR,
                    f"`{module}` has no `{alias.name}`",
                    start,
                    start + len(alias.name),
                    alias.name,
                    module,
                )


def _missing(module: str, start: int, project: Project, origin: Path | None) -> Iterator[Diagnostic]:
    """A module that is not there. Where packages may be installed elsewhere, only a near miss is an error."""
    if project.exists(module, origin):
        return
    top = module.partition(".")[0]
    own = top in project.own_tops() or (top != module and project.exists(top, origin))
    if own or module in MOVED_MODULES or nearest(top, project.tops(), 1, least=0.8):
        yield Diagnostic(
            "unresolved-import",
            Level.ERROR,
            f"There is no module `{module}`",
            start,
            start + len(module),
            module,
        )


def _attributes(source: Source, project: Project, origin: Path | None) -> Iterator[Diagnostic]:
    modules: dict[str, str] = {}
    rebound: set[str] = set()
    for node in source.of(ast.Import):
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            module = alias.name if alias.asname else name
            if modules.setdefault(name, module) != module:
                rebound.add(name)
    if not modules:
        return
    rebound.update(alias.asname or alias.name for node in source.of(ast.ImportFrom) for alias in node.names)
    rebound.update(node.id for node in source.of(ast.Name) if not isinstance(node.ctx, ast.Load))
    rebound.update(node.arg for node in source.of(ast.arg))
    for kind in (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef):
        rebound.update(node.name for node in source.of(kind))  # type: ignore[attr-defined]
    rebound.update(
        node.value.id
        for node in source.of(ast.Attribute)
        if not isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Name)
    )
    guarded = _guarded(source)
    for use in source.of(ast.Attribute):
        if not isinstance(use.value, ast.Name):
            continue
        name = use.value.id
        if name not in modules or name in rebound or use.lineno in guarded:
            continue
        names = project.names(modules[name], origin)
        if names is None or use.attr in names:
            continue
        end = source.span(use)[1]
        if source.text[end - len(use.attr) : end] == use.attr:
            yield Diagnostic(
                "unknown-module-attribute",
                Level.ERROR,
                f"`{modules[name]}` has no `{use.attr}`",
                end - len(use.attr),
                end,
                use.attr,
                modules[name],
            )


# ── objects of this file ──────────────────────────────────────────────────────────────────────


def _own_attributes(source: Source) -> Iterator[Diagnostic]:
    known = Classes(source)
    stored = {node.attr for node in source.of(ast.Attribute) if not isinstance(node.ctx, ast.Load)}
    for node in known.known.values():
        names = known.members(node)
        if names is None:
            continue
        for method in node.body:
            own = receiver(method)
            if own not in ("self", "cls"):
                continue
            for child in ast.walk(method):
                if (
                    isinstance(child, ast.Attribute)
                    and isinstance(child.value, ast.Name)
                    and child.value.id == own
                    and child.attr not in names
                    and child.attr not in stored
                    and not (child.attr.startswith("__") and own == "cls")
                ):
                    end = source.span(child)[1]
                    if source.text[end - len(child.attr) : end] != child.attr:
                        continue
                    yield Diagnostic(
                        "unknown-self-attribute",
                        Level.WARNING,
                        f"`{node.name}` has no `{child.attr}`",
                        end - len(child.attr),
                        end,
                        child.attr,
                        node.name,
                    )


def _methods_without_self(source: Source) -> Iterator[Diagnostic]:
    """A method without parameters fails as soon as it is called on an object."""
    for node in Classes(source).known.values():
        if node.bases or node.keywords:
            continue
        for method in node.body:
            if not isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)) or method.decorator_list:
                continue
            given = method.args
            if given.posonlyargs or given.args or given.vararg:
                continue
            if _used_bare(source, node, method.name):
                continue
            opened = re.compile(r"def\s+\w+\s*\(\s*").search(source.text, source.span(method)[0])
            if opened:
                yield Diagnostic(
                    "missing-self",
                    Level.WARNING,
                    f"The method `{method.name}` takes no `self`",
                    opened.end(),
                    opened.end(),
                    method.name,
                    "empty" if source.text[opened.end() : opened.end() + 1] == ")" else "more",
                )


def _used_bare(source: Source, node: ast.ClassDef, name: str) -> bool:
    """Whether a function of a class body is used as a plain function: in the body, or through the class."""
    for child in source.of(ast.Attribute):
        if child.attr == name and isinstance(child.value, ast.Name) and child.value.id == node.name:
            return True
    return any(
        isinstance(child, ast.Name) and child.id == name
        for statement in node.body
        if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef))
        for child in ast.walk(statement)
    )


_BRACED = re.compile(r"\{([A-Za-z_]\w*)\}")


def _forgotten_prefixes(source: Source) -> Iterator[Diagnostic]:
    """A string printed or raised as it stands, whose braces hold names that are visible there."""
    for node in source.of(ast.Call):
        printed = isinstance(node.func, ast.Name) and (
            node.func.id == "print" or node.func.id.endswith(("Error", "Exception"))
        )
        if not printed:
            continue
        for argument in node.args:
            if not isinstance(argument, ast.Constant) or not isinstance(argument.value, str):
                continue
            names = set(_BRACED.findall(argument.value))
            start, end = source.span(argument)
            quoted = source.text[start : start + 1] in "\"'" and "\\" not in source.text[start:end]
            others = re.sub(r"\{[A-Za-z_]\w*\}", "", argument.value)
            if not names or not quoted or "{" in others or "}" in others:
                continue
            if names <= visible(source.tree, node.lineno) - BUILTINS:
                yield Diagnostic(
                    "missing-f-prefix",
                    Level.HINT,
                    "The braces are printed as they are: the string has no `f` before it",
                    start,
                    end,
                )

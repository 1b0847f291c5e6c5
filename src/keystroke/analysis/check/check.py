"""Checks unsaved text without running it: syntax, and in Python names, imports and attributes.

Ranges are offsets into the text. Every fix was applied and checked: its diagnostic is gone and no new one has
appeared. What cannot be known from the text is not reported.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from pyflakes import messages

from keystroke.analysis.check.candidates import candidate_fixes
from keystroke.analysis.check.diagnostic import Diagnostic, Fix, Level
from keystroke.analysis.check.facts import piece_facts
from keystroke.analysis.check.flakes import run_pyflakes, separable
from keystroke.analysis.check.knowledge import MOVED_MODULES
from keystroke.analysis.check.modules import Project
from keystroke.analysis.check.other_languages import other_language, other_language_fixes, syntax_errors
from keystroke.analysis.check.pieces import CodePiece, single_piece, split_pieces
from keystroke.analysis.check.scope import BUILTINS, ClassTable, closest_names, parse_source
from keystroke.analysis.check.syntax_fixes import parse_failure, syntax_fixes
from keystroke.errors import InputError
from keystroke.text import apply_edits

MAX_TEXT = 2_000_000  # characters; beyond this a file is data
MAX_FIXED = 24  # diagnostics per check that get fixes at once; `fixes_for` makes more when asked
_TRIES = 6
_LIMIT = 3
_QUIET = re.compile(r"#\s*(?:noqa(?!:)|noqa:[^#]*\bF\d|type:\s*ignore|pyright:\s*ignore)", re.IGNORECASE)
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
    """The diagnostics of a text, in its order. `path` gives its language and location; the file
    need not exist. Raises InputError for a text that is too long."""
    if not can_check(path):
        return ()
    if len(text) > MAX_TEXT:
        raise InputError(f"the text has {len(text):,} characters; at most {MAX_TEXT:,} are checked")
    if not is_python(path):
        return tuple(
            replace(item, fixes=other_language_fixes(text, item, path, _LIMIT)) if fixes else item
            for item in syntax_errors(text, path)
        )
    home = project or Project()
    found = _find_diagnostics(text, path, home)
    if not fixes:
        return found
    return tuple(
        replace(item, fixes=fixes_for(text, item, path, project=home, known=found))
        if at < MAX_FIXED
        else item
        for at, item in enumerate(found)
    )


def can_check(path: str | Path) -> bool:
    """Whether the language of a path can be checked."""
    return is_python(path) or other_language(path) is not None


def is_python(path: str | Path) -> bool:
    """Whether a path is a Python file; an empty path counts as one."""
    return Path(path).suffix.lower() in (".py", ".pyi", ".pyw", "")


def fixes_for(
    text: str,
    diagnostic: Diagnostic,
    path: str | Path = "",
    *,
    project: Project | None = None,
    known: tuple[Diagnostic, ...] | None = None,
) -> tuple[Fix, ...]:
    """The checked fixes of one diagnostic, best first. `known`: all diagnostics of `text`, if computed."""
    if not is_python(path):
        return other_language_fixes(text, diagnostic, path, _LIMIT)
    home = project or Project()
    if diagnostic.code == "syntax-error":
        error = parse_failure(text)
        return syntax_fixes(text, error, _LIMIT) if error is not None else ()
    source = parse_source(text)
    if source is None:
        return ()
    before = Counter(
        item.code for item in (known if known is not None else _find_diagnostics(text, path, home))
    )
    proved: list[Fix] = []
    seen: set[str] = set()
    for tried, fix in enumerate(candidate_fixes(source, diagnostic, home, _path_or_none(path))):
        if tried >= _TRIES or len(proved) >= _LIMIT:
            break
        after = apply_edits(text, fix.edits)
        if after in seen:
            continue
        seen.add(after)
        now = Counter(item.code for item in _find_diagnostics(after, path, home))
        if now[diagnostic.code] < before[diagnostic.code] and not now - before:
            proved.append(fix)
    return tuple(proved)


def _path_or_none(path: str | Path) -> Path | None:
    return Path(path) if str(path) else None


def _find_diagnostics(text: str, path: str | Path, project: Project) -> tuple[Diagnostic, ...]:
    cut = split_pieces(text)
    if cut is None:
        error = parse_failure(text)
        if error is None:
            return ()
        end = max(error.end, min(error.start + 1, len(text)))
        message = error.message[:1].upper() + error.message[1:]
        return (Diagnostic("syntax-error", Level.ERROR, message, error.start, end),)
    try:
        if len(cut) > 1 and not separable(cut):
            cut = single_piece(text) or cut
        module = _Module(cut)
        found = [
            *_check_with_pyflakes(module, path),
            *_check_imports(module, project, _path_or_none(path)),
            *_check_attributes(module, project, _path_or_none(path)),
            *_own_attributes(module),
            *_methods_without_self(module),
            *_missing_prefixes(module),
        ]
    except RecursionError:
        return ()  # machine-made code, deeper than the stack
    kept = {module.in_text(at, item) for at, item in found if not _QUIET.search(module.line(at, item.start))}
    return tuple(sorted(kept, key=lambda item: (item.start, item.end, item.code, item.subject)))


_Found = Iterator[tuple[int, Diagnostic]]  # the index of a piece, and a diagnostic in the piece's offsets


class _Module:
    """The pieces of one text with their facts and offsets."""

    def __init__(self, cut: list[CodePiece]) -> None:
        self.pieces = cut
        self.facts = [piece_facts(piece) for piece in cut]
        self.starts: list[int] = []
        self.lines: list[int] = []  # before each piece
        start = line = 0
        for piece in cut:
            self.starts.append(start)
            self.lines.append(line)
            start += len(piece.text)
            line += piece.text.count("\n")

    def in_text(self, at: int, item: Diagnostic) -> Diagnostic:
        start = self.starts[at]
        return replace(item, start=item.start + start, end=item.end + start) if start else item

    def line(self, at: int, offset: int) -> str:
        document = self.pieces[at].source.document
        return document.line(document.position(offset, "utf-32").line)


def _check_with_pyflakes(module: _Module, path: str | Path) -> _Found:
    name = Path(path).name if str(path) else "text.py"
    for at, message, origin in run_pyflakes(module.pieces, str(path) or "text.py"):
        known = _WARNED.get(type(message))
        if known is None or (known[0] == "unused-import" and name == "__init__.py"):
            continue
        source = module.pieces[at].source
        code, level = known
        given = message.message_args
        subject = str(given[0]) if given else ""
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
            if code == "redefined-unused":
                given = (given[0], given[1] + module.lines[origin])
            words = (message.message % given).replace("'", "`")
            words = words[:1].upper() + words[1:]
            end = max(end, start)
        yield at, Diagnostic(code, level, words, start, end, subject)


def _check_imports(module: _Module, project: Project, origin: Path | None) -> _Found:
    for at, piece in enumerate(module.facts):
        for item in piece.imports:
            if item.level is None:
                for name, start in item.names:
                    yield from ((at, found) for found in _missing_module(name, start, project, origin))
                continue
            if item.level:
                target = project.relative(origin, item.level, item.module) if origin is not None else None
                names = project.names_of(target) if target is not None else None
            else:
                absent = list(_missing_module(item.module, item.start, project, origin))
                yield from ((at, found) for found in absent)
                names = None if absent else project.names(item.module, origin)
            wanted = "." * item.level + item.module
            for name, start in item.names if names is not None else ():
                if names is not None and name not in names:
                    yield at, _no_member("unknown-import-name", Level.ERROR, start + len(name), name, wanted)


def _no_member(code: str, level: Level, end: int, name: str, owner: str) -> Diagnostic:
    return Diagnostic(code, level, f"`{owner}` has no `{name}`", end - len(name), end, name, owner)


def _missing_module(module: str, start: int, project: Project, origin: Path | None) -> Iterator[Diagnostic]:
    """A module that does not exist. A package may be installed elsewhere, so only a near miss is an error."""
    if project.exists(module, origin):
        return
    top = module.partition(".")[0]
    own = top in project.own_module_names() or (top != module and project.exists(top, origin))
    if own or module in MOVED_MODULES or closest_names(top, project.importable_names(), 1, least=0.8):
        words = f"There is no module `{module}`"
        yield Diagnostic("unresolved-import", Level.ERROR, words, start, start + len(module), module)


def _check_attributes(module: _Module, project: Project, origin: Path | None) -> _Found:
    modules: dict[str, str] = {}
    rebound: set[str] = set()
    for piece in module.facts:
        for name, meant in piece.modules:
            if modules.setdefault(name, meant) != meant:
                rebound.add(name)
    if not modules:
        return
    for piece in module.facts:
        rebound |= piece.rebound
    known = {name: meant for name, meant in modules.items() if name not in rebound}
    held: dict[str, frozenset[str] | None] = {}
    for at, piece in enumerate(module.facts):
        for name, attribute, end in piece.attributes:
            if name not in known:
                continue
            meant = known[name]
            if meant not in held:
                held[meant] = project.names(meant, origin)
            names = held[meant]
            if names is not None and attribute not in names:
                yield at, _no_member("unknown-module-attribute", Level.ERROR, end, attribute, meant)


def _own_attributes(module: _Module) -> _Found:
    own = {node: names for piece in module.facts for node, names in piece.own.items()}
    classes = ClassTable(*(piece.source for piece in module.pieces), own=lambda node: own[node])
    stored = frozenset().union(*(piece.stored for piece in module.facts)) if module.facts else frozenset()
    for at, piece in enumerate(module.facts):
        for node, uses in piece.self_uses.items():
            if not uses or classes.known.get(node.name) is not node:
                continue
            names = classes.members(node)
            for attribute, end in uses if names is not None else ():
                if names is not None and attribute not in names and attribute not in stored:
                    yield at, _no_member("unknown-self-attribute", Level.WARNING, end, attribute, node.name)


def _methods_without_self(module: _Module) -> _Found:
    names = Counter(node.name for piece in module.facts for node in piece.own)
    for at, piece in enumerate(module.facts):
        for method in piece.methods:
            through = any((method.owner, method.name) in other.of_names for other in module.facts)
            if names[method.owner] == 1 and not method.used and not through:
                words, place = f"The method `{method.name}` takes no `self`", method.place
                found = Diagnostic("missing-self", Level.WARNING, words, place, place, method.name)
                yield at, replace(found, context=method.context)


def _missing_prefixes(module: _Module) -> _Found:
    """Strings without an f prefix whose braces hold visible names."""
    words = "The braces are printed as they are: the string has no `f` before it"
    bound = frozenset().union(*(piece.bound for piece in module.facts)) if module.facts else frozenset()
    for at, piece in enumerate(module.facts):
        for item in piece.braces:
            if item.names <= (item.seen | bound) - BUILTINS:
                yield at, Diagnostic("missing-f-prefix", Level.HINT, words, item.start, item.end)

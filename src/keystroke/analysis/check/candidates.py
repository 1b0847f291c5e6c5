"""Candidate fixes for a wrong name, import, attribute or argument, likeliest first.

Works on one file's text and tree and on the names of the project's modules. The caller checks the candidates.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from keystroke.analysis.check.diagnostic import Diagnostic, Fix
from keystroke.analysis.check.knowledge import ALIASES, FOREIGN, HOMES, MOVED_MODULES, MOVED_NAMES
from keystroke.analysis.check.modules import Project
from keystroke.analysis.check.scope import (
    BUILTINS,
    ClassTable,
    PythonSource,
    closest_names,
    enclosing_scopes,
    own_members,
    receiver_name,
    visible_names,
)
from keystroke.text import Edit


def candidate_fixes(
    source: PythonSource, found: Diagnostic, project: Project, origin: Path | None
) -> Iterator[Fix]:
    """Candidate fixes for a diagnostic of a text that parses."""
    if found.code == "undefined-name":
        yield from undefined_name_fixes(source, found)
    elif found.code == "undefined-local":
        yield from declare_outside(source, found.subject, source.document.position(found.start).line + 1)
    elif found.code == "unused-import":
        yield from remove_import(source, found)
    elif found.code == "unresolved-import":
        yield from module_fixes(source, found, project)
    elif found.code == "unknown-import-name":
        yield from import_name_fixes(source, found, project, origin)
    elif found.code == "unknown-module-attribute":
        yield from similar_name_fixes(found, project.names(found.context, origin) or ())
        if (home := MOVED_NAMES.get((found.context, found.subject))) and home != "builtins":
            start = source.text.rfind(found.context.partition(".")[0], 0, found.start)
            if start >= 0:
                edit = Edit(start, found.end, found.subject)
                yield Fix(
                    f"Import {found.subject} from {home}", (*add_import(source, home, found.subject), edit)
                )
    elif found.code == "unknown-self-attribute":
        node = ClassTable(source).known.get(found.context)
        yield from similar_name_fixes(found, own_members(node) if node is not None else ())
    elif found.code == "missing-self":
        yield Fix(
            "Add `self`", (Edit(found.start, found.start, "self" if found.context == "empty" else "self, "),)
        )
    elif found.code == "missing-f-prefix":
        yield Fix("Make it an f-string", (Edit(found.start, found.start, "f"),))
    elif found.code == "useless-f-prefix":
        yield from remove_f_prefix(source, found)
    elif found.code == "is-literal":
        yield from compare_by_value(source, found)


def undefined_name_fixes(source: PythonSource, found: Diagnostic) -> Iterator[Fix]:
    name, line = found.subject, source.document.position(found.start).line + 1
    seen = visible_names(source.tree, line)
    if (own := FOREIGN.get(name)) is not None and (own != "self" or "self" in seen):
        yield _replace_name_fix(found, own)
    yield from _of_self(source, found, line)
    followed = source.text[found.end : found.end + 1]
    called = followed == "("
    if name in ALIASES and followed == ".":
        yield Fix(f"Add `import {ALIASES[name]} as {name}`", add_import(source, ALIASES[name], "", name))
    if name in sys.stdlib_module_names and followed == "." and not name.startswith("_"):
        yield Fix(f"Add `import {name}`", add_import(source, name))
    near = closest_names(name, (item for item in seen if item != name))
    if near and (near[0].lower() == name.lower() or name not in HOMES):
        yield from (_replace_name_fix(found, item) for item in near)
    if name in HOMES:
        yield Fix(f"Add `from {HOMES[name]} import {name}`", add_import(source, HOMES[name], name))
    yield from (_replace_name_fix(found, item) for item in closest_names(name, BUILTINS, 2, least=0.75))
    if not called:
        for item in closest_names(name, ["self", "cls"], 1):
            if item in seen:
                yield _replace_name_fix(found, item)


def _of_self(source: PythonSource, found: Diagnostic, line: int) -> Iterator[Fix]:
    """A member of the class that was written without `self`."""
    scopes = enclosing_scopes(source.tree, line)
    for at, scope in enumerate(scopes):
        if isinstance(scope, ast.ClassDef) and at + 1 < len(scopes):
            own = receiver_name(scopes[at + 1])
            if own is not None and found.subject in own_members(scope):
                edit = Edit(found.start, found.start, f"{own}.")
                yield Fix(f"Write `{own}.{found.subject}`", (edit,))
    if found.subject in ("self", "cls"):
        for scope in reversed(scopes):
            if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from add_parameter(source, scope, found.subject)
                return


def add_parameter(
    source: PythonSource, function: ast.FunctionDef | ast.AsyncFunctionDef, name: str
) -> Iterator[Fix]:
    """`name` as the first parameter of a function."""
    start = source.span(function)[0]
    opened = re.compile(r"def\s+\w+\s*(?:\[[^\]]*\])?\s*\(\s*").search(source.text, start)
    if opened:
        comma = "" if source.text[opened.end() : opened.end() + 1] == ")" else ", "
        yield Fix(f"Add the parameter `{name}`", (Edit(opened.end(), opened.end(), f"{name}{comma}"),))


def declare_outside(source: PythonSource, name: str, line: int) -> Iterator[Fix]:
    """`nonlocal` or `global` for a function that assigns a name which it also reads from outside."""
    functions = [
        s
        for s in enclosing_scopes(source.tree, line)
        if isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    if not functions:
        return
    function = functions[-1]
    outer = any(name in {n.id for n in ast.walk(s) if isinstance(n, ast.Name)} for s in functions[:-1])
    first = function.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and len(function.body) > 1:
        first = function.body[1]  # behind the docstring
    at = source.span(first)[0]
    indent = source.text[source.text.rfind("\n", 0, at) + 1 : at]
    if indent.strip():
        return
    for word in ("nonlocal", "global") if outer else ("global",):
        edit = Edit(at, at, f"{word} {name}{line_end(source.text)}{indent}")
        yield Fix(f"Declare `{word} {name}`", (edit,))


def similar_name_fixes(found: Diagnostic, names: Iterable[str]) -> Iterator[Fix]:
    yield from (_replace_name_fix(found, item) for item in closest_names(found.subject, names))


def _replace_name_fix(found: Diagnostic, name: str) -> Fix:
    return Fix(f"Change to `{name}`", (Edit(found.start, found.end, name),))


def line_end(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def add_import(source: PythonSource, module: str, name: str = "", alias: str = "") -> tuple[Edit, ...]:
    """The edit that imports a module, or a name from it, at its sorted position among the imports."""
    head = _imports_at_top(source.tree)
    if name:
        for node in head:
            single = isinstance(node, ast.ImportFrom) and node.lineno == node.end_lineno
            if single and isinstance(node, ast.ImportFrom) and node.module == module and not node.level:
                last = source.span(node.names[-1])[1]
                return (Edit(last, last, f", {name}"),)
    end = line_end(source.text)
    statement = f"from {module} import {name}" if name else f"import {module}"
    statement += f" as {alias}" if alias else ""
    alike = [node for node in head if isinstance(node, ast.ImportFrom if name else ast.Import)]
    if name:
        alike = [
            n for n in alike if not (isinstance(n, ast.ImportFrom) and (n.level or n.module == "__future__"))
        ]
    for node in alike:
        first = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
        if (first or "") > module:
            at = source.offset(node.lineno, 0)
            return (Edit(at, at, statement + end),)
    after = alike[-1] if alike else head[-1] if head else None
    if after is not None:
        at = source.document.line_span((after.end_lineno or after.lineno) - 1)[1]
        gap = end if isinstance(after, ast.ImportFrom) and after.module == "__future__" else ""
        return (Edit(at, at, f"{end}{gap}{statement}"),)
    body = source.tree.body
    docstring = body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    if docstring and isinstance(body[0].value.value, str):  # type: ignore[attr-defined]
        at = source.document.line_span((body[0].end_lineno or 1) - 1)[1]
        return (Edit(at, at, f"{end}{end}{statement}"),)
    at = 0
    for line in source.text.splitlines(keepends=True):
        if not line.startswith("#"):
            break
        at += len(line)
    return (Edit(at, at, f"{statement}{end}{end}" if at < len(source.text) else f"{statement}{end}"),)


def _imports_at_top(tree: ast.Module) -> list[ast.Import | ast.ImportFrom]:
    """The imports before the first other statement, after the docstring."""
    found: list[ast.Import | ast.ImportFrom] = []
    for at, node in enumerate(tree.body):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found.append(node)
        elif at or not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            break
    return found


def remove_import(source: PythonSource, found: Diagnostic) -> Iterator[Fix]:
    for node in ast.walk(source.tree):
        if not isinstance(node, (ast.Import, ast.ImportFrom)) or source.span(node)[0] != found.start:
            continue
        names = node.names
        prefix = "." * node.level + (node.module or "") + "." if isinstance(node, ast.ImportFrom) else ""
        for at, alias in enumerate(names):
            full = (
                prefix.rstrip(".") + alias.name if prefix.strip(".") == "" and prefix else prefix + alias.name
            )
            written = f"{full} as {alias.asname}" if alias.asname and alias.asname != alias.name else full
            if found.subject not in (written, full, alias.asname, f"{prefix}{alias.name}"):
                continue
            if len(names) > 1:
                first, last = source.span(alias)
                if at + 1 < len(names):
                    span = first, source.span(names[at + 1])[0]
                else:
                    span = source.span(names[at - 1])[1], last
                yield Fix("Remove the unused import", (Edit(*span, ""),))
            else:
                yield from _without_statement(source, node)
            return


def _without_statement(source: PythonSource, node: ast.stmt) -> Iterator[Fix]:
    start, end = source.span(node)
    first = source.text.rfind("\n", 0, start) + 1
    last = source.text.find("\n", end)
    last = len(source.text) if last < 0 else last + 1
    alone = not source.text[first:start].strip() and not source.text[end:last].strip()
    if _only_one(source.tree, node):
        yield Fix("Replace the unused import by `pass`", (Edit(start, end, "pass"),))
    elif alone:
        yield Fix("Remove the unused import", (Edit(first, last, ""),))


def _only_one(tree: ast.Module, node: ast.stmt) -> bool:
    """Whether a statement is the only one of its block."""
    return any(
        block == [node]
        for parent in ast.walk(tree)
        if not isinstance(parent, ast.Module)
        for name in ("body", "orelse", "finalbody")
        if isinstance(block := getattr(parent, name, None), list)
    )


def module_fixes(source: PythonSource, found: Diagnostic, project: Project) -> Iterator[Fix]:
    """The module under its current name, or one with a similar name."""
    if (moved := MOVED_MODULES.get(found.subject)) is not None:
        yield Fix(f"Import {moved}", (Edit(found.start, found.end, _with_alias(source, found, moved)),))
    head, dot, rest = found.subject.partition(".")
    near = closest_names(head, project.importable_names(), least=0.75)
    if project.exists(head) and dot:
        names = project.names(head) or frozenset()
        near = [f"{head}.{item}" for item in closest_names(rest.partition(".")[0], names)]
    else:
        near = [item + dot + rest for item in near]
    for item in near:
        yield Fix(f"Import {item}", (Edit(found.start, found.end, _with_alias(source, found, item)),))


def _with_alias(source: PythonSource, found: Diagnostic, module: str) -> str:
    """The module, with `as` its old name where the file uses that name after a plain `import`."""
    line = source.text[source.text.rfind("\n", 0, found.start) + 1 : found.start]
    following = source.text[found.end : found.end + 4]
    if "from" in line or following.startswith(" as "):
        return module
    used = re.search(rf"\b{re.escape(found.subject)}\s*\.", source.text[found.end :])
    return f"{module} as {found.subject}" if used and "." not in found.subject else module


def import_name_fixes(
    source: PythonSource, found: Diagnostic, project: Project, origin: Path | None
) -> Iterator[Fix]:
    """An imported name that was moved or misspelt."""
    name, module = found.subject, found.context
    node = next(
        (
            n
            for n in ast.walk(source.tree)
            if isinstance(n, ast.ImportFrom) and source.span(n)[0] <= found.start < source.span(n)[1]
        ),
        None,
    )
    home = MOVED_NAMES.get((module, name)) or (HOMES.get(name) if HOMES.get(name) != module else None)
    if home and home != "builtins" and node is not None:
        if len(node.names) == 1:
            at = re.compile(rf"from\s+({re.escape(module)})\s").match(source.text, source.span(node)[0])
            if at:
                yield Fix(f"Import it from {home}", (Edit(at.start(1), at.end(1), home),))
        else:
            pieces = [source.text[slice(*source.span(a))] for a in node.names]
            at_name = next((i for i, a in enumerate(node.names) if a.name == name), 0)
            others = [p for i, p in enumerate(pieces) if i != at_name]
            end = line_end(source.text)
            indent = " " * node.col_offset
            text = (
                f"from {module} import {', '.join(others)}{end}{indent}from {home} import {pieces[at_name]}"
            )
            yield Fix(f"Import it from {home}", (Edit(*source.span(node), text),))
    target = None
    if node is not None and node.level and origin is not None:
        target = project.relative(origin, node.level, node.module or "")
    names = project.names_of(target) if target is not None else project.names(module, origin)
    # The file uses the imported name, so its uses are renamed too.
    for item in closest_names(name, names or ()):
        uses = len(re.findall(rf"\b{re.escape(name)}\b", source.text))
        if uses <= 1 or (node is not None and any(a.name == name and a.asname for a in node.names)):
            yield _replace_name_fix(found, item)
        else:
            edits = tuple(
                Edit(m.start(), m.end(), item)
                for m in re.finditer(rf"(?<![\w.]){re.escape(name)}\b", source.text)
                if _is_code(source, m.start())
            )
            yield Fix(f"Change to `{item}`", edits)
            yield Fix(f"Import `{item} as {name}`", (Edit(found.start, found.end, f"{item} as {name}"),))


def _is_code(source: PythonSource, offset: int) -> bool:
    """Whether there is a name at `offset`, not a string or comment."""
    position = source.document.position(offset, "utf-8")
    here = position.line + 1, position.column
    return any((n.lineno, n.col_offset) == here for n in source.nodes(ast.Name)) or any(
        (n.lineno, n.col_offset) == here for n in source.nodes(ast.alias)
    )


def remove_f_prefix(source: PythonSource, found: Diagnostic) -> Iterator[Fix]:
    edits = tuple(
        Edit(found.start + m.start(1), found.start + m.end(1), m[1].replace("f", "").replace("F", ""))
        for m in [re.match(r"([rRfF]{1,2})[\"']", source.text[found.start : found.start + 4])]
        if m
    )
    if edits:
        yield Fix("Remove the f prefix", edits)


def compare_by_value(source: PythonSource, found: Diagnostic) -> Iterator[Fix]:
    text = source.text[found.start : found.end]
    places = list(re.finditer(r"\bis(\s+not)?\b", text))
    if len(places) == 1:
        at, new = places[0], "!=" if places[0][1] else "=="
        yield Fix(f"Compare with `{new}`", (Edit(found.start + at.start(), found.start + at.end(), new),))

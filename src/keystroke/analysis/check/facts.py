"""Imports, attributes, classes and strings of one piece of a text.

Computed once per piece and independent of the others; positions count from the start of the piece.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from keystroke.analysis.check.pieces import CodePiece
from keystroke.analysis.check.scope import (
    PythonSource,
    bound_names,
    is_plain_class,
    own_members,
    receiver_name,
    visible_names,
)

_GUARDS = {"ImportError", "ModuleNotFoundError", "AttributeError", "Exception", "NameError"}
_BRACED = re.compile(r"\{([A-Za-z_]\w*)\}")
_OPENED = re.compile(r"def\s+\w+\s*\(\s*")
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ImportStatement:
    """An unguarded import. `level` is None for a plain `import`, where `names` are modules."""

    level: int | None
    module: str
    start: int
    names: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class SelflessMethod:
    """A method without parameters; `used`: its class uses it as a plain function."""

    owner: str
    name: str
    place: int
    context: str
    used: bool


@dataclass(frozen=True, slots=True)
class BracedString:
    """A plain string with names in braces; `seen` are the names visible inside the piece."""

    start: int
    end: int
    names: frozenset[str]
    seen: frozenset[str]


@dataclass(frozen=True)
class PieceFacts:
    imports: tuple[ImportStatement, ...]
    modules: tuple[tuple[str, str], ...]  # a name, and the module it stands for
    rebound: frozenset[str]  # names that may stand for something else somewhere
    attributes: tuple[tuple[str, str, int], ...]  # name, attribute, where it ends: unguarded uses
    stored: frozenset[str]  # attributes that something is assigned to
    of_names: frozenset[tuple[str, str]]  # attributes of plain names
    own: dict[ast.ClassDef, frozenset[str] | None]
    self_uses: dict[ast.ClassDef, tuple[tuple[str, int], ...]]
    methods: tuple[SelflessMethod, ...]
    braces: tuple[BracedString, ...]
    bound: frozenset[str]


def piece_facts(piece: CodePiece) -> PieceFacts:
    found = piece.cache.get("piece_facts")
    if not isinstance(found, PieceFacts):
        found = piece.cache["piece_facts"] = _gather_facts(piece.source)
    return found


def _gather_facts(source: PythonSource) -> PieceFacts:
    guarded = _guarded_lines(source)
    attributes = source.nodes(ast.Attribute)
    classes = source.nodes(ast.ClassDef)
    rebound = {alias.asname or alias.name for node in source.nodes(ast.ImportFrom) for alias in node.names}
    rebound.update(node.id for node in source.nodes(ast.Name) if not isinstance(node.ctx, ast.Load))
    rebound.update(node.arg for node in source.nodes(ast.arg))
    for kind in (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef):
        rebound.update(node.name for node in source.nodes(kind))  # type: ignore[attr-defined]
    rebound.update(
        node.value.id
        for node in attributes
        if not isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Name)
    )
    modules = tuple(
        (name, alias.name if alias.asname else name)
        for node in source.nodes(ast.Import)
        for alias in node.names
        for name in [alias.asname or alias.name.partition(".")[0]]
    )
    uses = tuple(
        (node.value.id, node.attr, end)
        for node in attributes
        if isinstance(node.value, ast.Name) and node.lineno not in guarded
        for end in [source.span(node)[1]]
        if source.text[end - len(node.attr) : end] == node.attr
    )
    return PieceFacts(
        imports=_list_imports(source, guarded),
        modules=modules,
        rebound=frozenset(rebound),
        attributes=uses,
        stored=frozenset(node.attr for node in attributes if not isinstance(node.ctx, ast.Load)),
        of_names=frozenset((n.value.id, n.attr) for n in attributes if isinstance(n.value, ast.Name)),
        own={node: frozenset(own_members(node)) if is_plain_class(node) else None for node in classes},
        self_uses={node: tuple(_self_uses(source, node)) for node in classes},
        methods=tuple(_find_selfless_methods(source, classes)),
        braces=tuple(_find_braced_strings(source)),
        bound=frozenset(bound_names(source.tree)),
    )


def _guarded_lines(source: PythonSource) -> set[int]:
    """Lines inside `try` blocks that expect import or name errors, and under tests of the platform."""
    lines: set[int] = set()
    for node in source.nodes(ast.Try):
        expected = [h.type for h in node.handlers]
        names = {n.id for t in expected if t is not None for n in ast.walk(t) if isinstance(n, ast.Name)}
        if None in expected or names & _GUARDS:
            for inner in node.body:
                lines.update(range(inner.lineno, (inner.end_lineno or inner.lineno) + 1))
    for test in source.nodes(ast.If):
        words = {n.attr for n in ast.walk(test.test) if isinstance(n, ast.Attribute)}
        words |= {n.id for n in ast.walk(test.test) if isinstance(n, ast.Name)}
        if words & {"hasattr", "version_info", "platform", "system", "name"}:
            lines.update(range(test.lineno, (test.end_lineno or test.lineno) + 1))
    return lines


def _list_imports(source: PythonSource, guarded: set[int]) -> tuple[ImportStatement, ...]:
    plain = [
        ImportStatement(None, "", 0, tuple((alias.name, source.span(alias)[0]) for alias in node.names))
        for node in source.nodes(ast.Import)
        if node.lineno not in guarded
    ]
    named = [
        ImportStatement(
            node.level,
            node.module or "",
            source.span(node)[0] + len("from "),
            tuple((alias.name, source.span(alias)[0]) for alias in node.names if alias.name != "*"),
        )
        for node in source.nodes(ast.ImportFrom)
        if node.lineno not in guarded
    ]
    return (*plain, *named)


def _self_uses(source: PythonSource, node: ast.ClassDef) -> list[tuple[str, int]]:
    """Attributes of `self` that methods use, with their end offsets."""
    found = []
    for method in node.body:
        own = receiver_name(method)
        if own not in ("self", "cls"):
            continue
        for child in ast.walk(method):
            if not (isinstance(child, ast.Attribute) and isinstance(child.value, ast.Name)):
                continue
            if child.value.id == own and not (child.attr.startswith("__") and own == "cls"):
                end = source.span(child)[1]
                if source.text[end - len(child.attr) : end] == child.attr:
                    found.append((child.attr, end))
    return found


def _find_selfless_methods(source: PythonSource, classes: list[ast.ClassDef]) -> list[SelflessMethod]:
    found = []
    for node in classes:
        if node.bases or node.keywords:
            continue
        for method in node.body:
            if not isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)) or method.decorator_list:
                continue
            given = method.args
            if given.posonlyargs or given.args or given.vararg:
                continue
            opened = _OPENED.search(source.text, source.span(method)[0])
            if opened:
                context = "empty" if source.text[opened.end() : opened.end() + 1] == ")" else "more"
                used = any(
                    isinstance(child, ast.Name) and child.id == method.name
                    for statement in node.body
                    if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef))
                    for child in ast.walk(statement)
                )
                found.append(SelflessMethod(node.name, method.name, opened.end(), context, used))
    return found


def _find_braced_strings(source: PythonSource) -> list[BracedString]:
    """Plain strings that are printed or raised and have names in braces."""
    found = []
    for node in source.nodes(ast.Call):
        printed = isinstance(node.func, ast.Name) and (
            node.func.id == "print" or node.func.id.endswith(("Error", "Exception"))
        )
        for argument in node.args if printed else ():
            if not isinstance(argument, ast.Constant) or not isinstance(argument.value, str):
                continue
            names = frozenset(_BRACED.findall(argument.value))
            if not names:
                continue
            start, end = source.span(argument)
            quoted = source.text[start : start + 1] in "\"'" and "\\" not in source.text[start:end]
            others = re.sub(r"\{[A-Za-z_]\w*\}", "", argument.value)
            if quoted and "{" not in others and "}" not in others:
                found.append(
                    BracedString(start, end, names, frozenset(visible_names(source.tree, node.lineno)))
                )
    return found

"""Runs pyflakes on a Python text piece by piece, with the result of a run on the whole text.

A piece is checked again only if it changes, or if other pieces start or stop defining a name that it uses.
Unused imports are decided at the end, over all pieces. A text that cannot be separated is one piece.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pyflakes import checker, messages

from keystroke.analysis.check.pieces import CodePiece

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class PieceBindings:
    """The module-level names that a piece binds."""

    bound: frozenset[str]
    defined: frozenset[str]  # by def, class or import: those another binding would redefine
    deleted: frozenset[str]
    declared: frozenset[str]  # `global` in a function
    star: bool
    future: bool
    imports: Mapping[str, Any]  # pyflakes' own bindings of what is imported


@dataclass
class UnusedImport:
    """An import that its own piece does not use; `redefined` are the nodes that shadow it."""

    name: str
    message: Any
    line: int
    redefined: list[ast.AST] = field(default_factory=list)


@dataclass
class PieceReport:
    """The messages of one piece, given the names that other pieces bind."""

    messages: list[Any]
    unused: list[UnusedImport]
    used: frozenset[str]  # names of other pieces
    exported: frozenset[str]
    hidden: dict[str, list[ast.AST]]  # imports of other pieces that this one shadows


def run_pyflakes(pieces: list[CodePiece], filename: str) -> Iterator[tuple[int, Any, int]]:
    """Messages with the index of their piece, and of the piece that a line number in them refers to."""
    names = [_cached_bindings(piece) for piece in pieces]
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    always: set[str] = set()
    imports: dict[str, Any] = {}
    for at, item in enumerate(names):
        for name in item.bound:
            first.setdefault(name, at)
            last[name] = at
        always |= item.declared
        imports.update(item.imports)
    future = any(item.future for item in names)
    looks = []
    opening = True  # only a docstring and imports from __future__ so far
    for at, piece in enumerate(pieces):
        here = piece.words & (first.keys() | always)
        earlier = frozenset(n for n in here if n in always or first[n] < at)
        later = frozenset(n for n in here if n not in earlier and last[n] > at)
        looks.append(_check_piece(piece, earlier, later, imports, future, opening, filename))
        opening = opening and all(_may_open(node) for node in piece.source.tree.body)
    exported = frozenset().union(*(report.exported for report in looks)) if looks else frozenset()
    for at, report in enumerate(looks):
        yield from ((at, message, at) for message in report.messages)
        for unused in report.unused:
            name = unused.name
            if name in exported or any(name in o.used for n, o in enumerate(looks) if n != at):
                continue
            yield at, unused.message, at
            for other, there in enumerate(looks):
                for node in unused.redefined if other == at else there.hidden.get(name, ()):
                    place = _Place(unused.line)
                    yield other, messages.RedefinedWhileUnused(filename, node, name, place), at


def _may_open(node: ast.stmt) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == "__future__"
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


class _Place:
    """The position of a definition, in the form that pyflakes messages expect."""

    def __init__(self, lineno: int) -> None:
        self.lineno, self.col_offset = lineno, 0


def separable(pieces: list[CodePiece]) -> bool:
    """Whether checking the pieces one by one gives the same messages as checking the whole text."""
    names = [_cached_bindings(piece) for piece in pieces]
    if any(item.star for item in names):
        return False
    seen: set[str] = set()
    defined = frozenset().union(*(item.defined for item in names))
    for item in names:
        if item.declared & defined:
            return False  # a function binds again what stands elsewhere
        if (item.bound & seen & defined) or ("__all__" in item.bound and "__all__" in seen):
            return False
        seen |= item.bound
    for at, item in enumerate(names):
        if item.deleted and any(item.deleted & other.words for n, other in enumerate(pieces) if n != at):
            return False
    return True


def _cached_bindings(piece: CodePiece) -> PieceBindings:
    found = piece.cache.get("names")
    if not isinstance(found, PieceBindings):
        found = piece.cache["names"] = _find_bindings(piece)
    return found


def _find_bindings(piece: CodePiece) -> PieceBindings:
    bound: set[str] = set()
    defined: set[str] = set()
    deleted: set[str] = set()
    imported: list[ast.stmt] = []
    star = future = False
    todo: list[ast.AST] = [piece.source.tree]
    while todo:
        node = todo.pop()
        if isinstance(node, _SCOPES):
            defined.add(node.name)
            todo += node.decorator_list
            continue
        if isinstance(node, ast.Lambda):
            continue
        if isinstance(node, _COMPREHENSIONS):
            bound |= {
                inner.target.id
                for inner in ast.walk(node)
                if isinstance(inner, ast.NamedExpr) and isinstance(inner.target, ast.Name)
            }
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            imported.append(node)
            ahead = isinstance(node, ast.ImportFrom) and node.module == "__future__"
            for alias in node.names:
                future = future or (ahead and alias.name == "annotations")
                star = star or alias.name == "*"
                defined.add(alias.asname or alias.name.partition(".")[0])
        elif isinstance(node, ast.AnnAssign) and node.value is None:
            continue
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                bound.add(node.id)
            elif isinstance(node.ctx, ast.Del):
                deleted.add(node.id)
        elif isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name:
            bound.add(node.name)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
            deleted.add(node.name)  # at the end of the handler
        elif isinstance(node, ast.MatchMapping) and node.rest:
            bound.add(node.rest)
        todo.extend(ast.iter_child_nodes(node))
    declared = {name for node in piece.source.nodes(ast.Global) for name in node.names}
    imports = {}
    if imported and not star:
        alone = checker.Checker(ast.Module(imported[::-1], []), builtins=())
        scope = alone.deadScopes[-1]
        imports = {name: item for name, item in scope.items() if isinstance(item, checker.Importation)}
    return PieceBindings(
        frozenset(bound | defined), frozenset(defined), frozenset(deleted), frozenset(declared),
        star, future, imports,
    )  # fmt: skip


def _check_piece(
    piece: CodePiece,
    earlier: frozenset[str],
    later: frozenset[str],
    imports: Mapping[str, Any],
    future: bool,
    first: bool,
    filename: str,
) -> PieceReport:
    outside = {name: imports[name] for name in earlier | later if name in imports}
    meaning = frozenset((name, type(item), item.fullName) for name, item in outside.items())
    key = ("look", earlier, later, meaning, future, first, filename)
    found = piece.cache.get(key)
    if not isinstance(found, PieceReport):
        for old in [k for k in piece.cache if isinstance(k, tuple) and k[0] == "look"][:-3]:
            del piece.cache[old]
        own = _PieceChecker(piece.source.tree, filename, earlier, later, outside, future=future, first=first)
        found = piece.cache[key] = own.make_report()
    return found


class _PieceChecker(checker.Checker):  # type: ignore[misc]
    """pyflakes for one piece of a module. Other pieces bind the names `earlier` before the piece runs, and
    `later` before its functions are called."""

    def __init__(
        self,
        tree: ast.Module,
        filename: str,
        earlier: frozenset[str],
        later: frozenset[str],
        imports: Mapping[str, Any],
        *,
        future: bool,
        first: bool,
    ) -> None:
        self._earlier, self._later, self._imports = earlier, later, imports
        self._future, self._first = future, first
        self._module: Any = None
        self._outside: dict[str, Any] = {}
        self._unused: list[UnusedImport] = []
        self._used: set[str] = set()
        self._exported: frozenset[str] = frozenset()
        self._hidden: dict[str, list[ast.AST]] = {}
        super().__init__(tree, filename)

    def make_report(self) -> PieceReport:
        return PieceReport(self.messages, self._unused, frozenset(self._used), self._exported, self._hidden)

    def handleChildren(self, tree: ast.AST, omit: Any = None) -> None:  # noqa: N802 - pyflakes' name
        if tree is self.root and self._module is None:
            self._module = self.scopeStack[0]
            self._bring(self._earlier)
            if self._future:
                self._module._annotations_future_enabled = True
            if not self._first:
                self._module._futures_allowed = False
        super().handleChildren(tree, omit)

    def _run_deferred(self) -> None:
        self._bring(name for name in self._later if name not in self._module)
        super()._run_deferred()

    def _bring(self, names: Any) -> None:
        for name in names:
            binding = copy.copy(self._imports[name]) if name in self._imports else checker.Builtin(name)
            binding.used = False
            if isinstance(binding, checker.Importation):
                binding.redefined = []
            self._outside[name] = self._module[name] = binding

    def checkDeadScopes(self) -> None:  # noqa: N802 - pyflakes' name
        exports = self._module.get("__all__")
        if isinstance(exports, checker.ExportBinding):
            self._exported = frozenset(exports.names)
        for name, binding in self._outside.items():
            if binding.used:
                self._used.add(name)
            if isinstance(binding, checker.Importation):
                if binding.redefined:
                    self._hidden[name] = binding.redefined
                binding.used = True  # it is reported in its own piece
        for binding in self._module.values():
            if isinstance(binding, checker.Importation) and not binding.used:
                message = messages.UnusedImport(self.filename, binding.source, binding.imported_name)
                self._unused.append(
                    UnusedImport(binding.name, message, binding.source.lineno, list(binding.redefined))
                )
                binding.used = True
        super().checkDeadScopes()

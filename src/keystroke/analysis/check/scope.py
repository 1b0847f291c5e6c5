"""Names that are visible at a position in a Python file, and the members of its classes.

Works on the syntax tree alone. None means that the members cannot be known (a base class from elsewhere,
attributes set by name), and callers then report nothing.
"""

from __future__ import annotations

import ast
import builtins
import difflib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from keystroke.analysis.check.modules import add_bound_names, executed_statements
from keystroke.analysis.syntax import try_parse
from keystroke.text import Document

Function = ast.FunctionDef | ast.AsyncFunctionDef
_Node = TypeVar("_Node", bound=ast.AST)
BUILTINS = frozenset(dir(builtins))
_KNOWN_DECORATORS = {"dataclass", "total_ordering", "final", "runtime_checkable", "unique"}


@dataclass(frozen=True)
class PythonSource:
    """A text with its tree; converts positions of the tree (UTF-8 columns) to offsets."""

    text: str
    tree: ast.Module
    document: Document

    @cached_property
    def _nodes(self) -> dict[type, list[ast.AST]]:
        found: dict[type, list[ast.AST]] = {}
        for node in ast.walk(self.tree):
            found.setdefault(type(node), []).append(node)
        return found

    def nodes(self, kind: type[_Node]) -> list[_Node]:
        """Every node of one kind. The tree is walked only once."""
        return self._nodes.get(kind, [])  # type: ignore[return-value]

    def offset(self, line: int, column: int) -> int:
        return self.document.offset(line - 1, column, "utf-8", clamp=True)

    def span(self, node: ast.expr | ast.stmt | ast.alias | ast.arg | ast.keyword) -> tuple[int, int]:
        end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
        return self.offset(node.lineno, node.col_offset), self.offset(end_line, end_column)

    def word(self, line: int, column: int, name: str) -> tuple[int, int] | None:
        """The span of `name` at the position, or of its only occurrence on that line (positions inside
        f-strings are wrong before Python 3.12)."""
        start = self.offset(line, column)
        if self.text[start : start + len(name)] == name:
            return start, start + len(name)
        first, last = self.document.line_span(line - 1)
        places = list(find_words(self.text[first:last], name))
        return (first + places[0], first + places[0] + len(name)) if len(places) == 1 else None


def parse_source(text: str) -> PythonSource | None:
    """The text with its tree; None if it does not parse."""
    tree = try_parse(text)
    return PythonSource(text, tree, Document(text)) if tree is not None else None


def find_words(text: str, name: str) -> Iterable[int]:
    at = text.find(name)
    while at >= 0:
        before, after = text[at - 1 : at], text[at + len(name) : at + len(name) + 1]
        if not (before.isalnum() or before == "_" or after.isalnum() or after == "_"):
            yield at
        at = text.find(name, at + 1)


def enclosing_scopes(tree: ast.Module, line: int) -> list[Function | ast.ClassDef | ast.Lambda]:
    """The functions and classes that enclose a line, outermost first."""
    found: list[Function | ast.ClassDef | ast.Lambda] = []
    todo: list[ast.AST] = [tree]
    while todo:
        for child in ast.iter_child_nodes(todo.pop()):
            first, last = getattr(child, "lineno", None), getattr(child, "end_lineno", None)
            if first is None or last is None:
                todo.append(child)
            elif first <= line <= last:
                if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
                    found.append(child)
                todo.append(child)
    return sorted(found, key=lambda node: (node.lineno, node.col_offset))


def bound_names(node: Function | ast.Lambda | ast.ClassDef | ast.Module) -> set[str]:
    """The names that a scope binds: its parameters and assignments."""
    names: set[str] = set()
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        arguments = node.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        names |= {a.arg for a in (*named, arguments.vararg, arguments.kwarg) if a is not None}
    if not isinstance(node, ast.Lambda):
        for statement in executed_statements(node):
            add_bound_names(statement, names)
    return names


def visible_names(tree: ast.Module, line: int) -> set[str]:
    """Every name that an expression on `line` can use, builtins not included."""
    names = bound_names(tree)
    scopes = enclosing_scopes(tree, line)
    for at, scope in enumerate(scopes):
        if not isinstance(scope, ast.ClassDef) or at == len(scopes) - 1:
            names |= bound_names(scope)
    return names


def receiver_name(function: ast.AST) -> str | None:
    """The name of a method's first parameter; None for static methods and without parameters."""
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return None
    if any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in function.decorator_list):
        return None
    first = [*function.args.posonlyargs, *function.args.args][:1]
    return first[0].arg if first else None


def own_members(node: ast.ClassDef) -> set[str]:
    """Names of the class body, and attributes that its methods set on `self`."""
    names = bound_names(node)
    for method in executed_statements(node):
        if (own := receiver_name(method)) is None:
            continue
        for child in ast.walk(method):
            if (
                isinstance(child, ast.Attribute)
                and isinstance(child.ctx, (ast.Store, ast.Del))
                and isinstance(child.value, ast.Name)
                and child.value.id == own
            ):
                names.add(child.attr)
    return names


class ClassTable:
    """The classes of one file by name, without those that are defined twice."""

    def __init__(
        self, *sources: PythonSource, own: Callable[[ast.ClassDef], frozenset[str] | None] | None = None
    ) -> None:
        """`own`: gives the members that a class itself defines; computed from its body by default."""
        nodes = [node for source in sources for node in source.nodes(ast.ClassDef)]
        names = Counter(node.name for node in nodes)
        self.known = {node.name: node for node in nodes if names[node.name] == 1}
        self._own = own or (lambda node: frozenset(own_members(node)) if is_plain_class(node) else None)
        self._families: dict[str, list[ast.ClassDef] | None] = {}

    def members(self, node: ast.ClassDef) -> frozenset[str] | None:
        """All members of the class; None if bases, decorators or dynamic attributes hide some."""
        family = self._ancestors(node)
        if family is None:
            return None
        # A base may use members that only its derived classes define.
        derived = [other for other in self.known.values() if node in (self._ancestors(other) or ())]
        names = set(_OF_EVERY_OBJECT)
        for item in (*family, *derived):
            own = self._own(item)
            if own is None:
                return None
            names |= own
        return frozenset(names)

    def _ancestors(self, node: ast.ClassDef) -> list[ast.ClassDef] | None:
        """The class and its bases, if all are in this file."""
        if node.name not in self._families:
            self._families[node.name] = self._find_ancestors(node)
        return self._families[node.name]

    def _find_ancestors(self, node: ast.ClassDef) -> list[ast.ClassDef] | None:
        found: list[ast.ClassDef] = []
        todo = [node]
        while todo:
            item = todo.pop()
            if item in found:
                continue
            found.append(item)
            for base in item.bases:
                if isinstance(base, ast.Name) and base.id == "object":
                    continue
                if not isinstance(base, ast.Name) or base.id not in self.known:
                    return None
                todo.append(self.known[base.id])
        return found


_OF_EVERY_OBJECT = frozenset(dir(object)) | {
    f"__{name}__" for name in ("dict", "annotations", "module", "name", "qualname")
}


def is_plain_class(node: ast.ClassDef) -> bool:
    """Whether the members of a class can be read from its text."""
    if node.keywords or node.name.endswith("Mixin"):
        return False
    for decorator in node.decorator_list:
        head = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = head.attr if isinstance(head, ast.Attribute) else head.id if isinstance(head, ast.Name) else ""
        if name not in _KNOWN_DECORATORS:
            return False
    for child in ast.walk(node):
        if isinstance(child, ast.Name) and child.id in ("setattr", "vars"):
            return False
        if isinstance(child, ast.Attribute) and child.attr in ("__dict__", "__setattr__", "__class__"):
            return False
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) and child.name in (
            "__getattr__",
            "__getattribute__",
        ):
            return False
    return True


def closest_names(name: str, candidates: Iterable[str], limit: int = 3, *, least: float = 0.66) -> list[str]:
    """The candidates most similar to `name`, best first: those that differ in case only, then close ones."""
    if len(name) > 100:
        return []
    pool = {item for item in candidates if item != name and item}
    plain = name.lower().replace("_", "")
    same = sorted(item for item in pool if item.lower().replace("_", "") == plain)
    if len(name) < 2:
        return same[:limit]
    close = difflib.get_close_matches(name, sorted(pool - set(same)), n=limit, cutoff=least)
    if not name.startswith("__"):
        close = [item for item in close if not item.startswith("__")]
    return [*same, *close][:limit]

"""The intermediate representation (IR) that every language is lowered to before data flow analysis.

An IR node says what is computed, independent of the syntax of a language, and keeps the syntax node it came
from for its position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Syntax = Any  # ast_grep_py.SgNode: the binding ships no usable types


@dataclass(slots=True)
class Expr:
    node: Syntax


@dataclass(slots=True)
class ConstExpr(Expr):
    value: Any


@dataclass(slots=True)
class NameExpr(Expr):
    id: str


@dataclass(slots=True)
class AttrExpr(Expr):
    base: Expr
    name: str


@dataclass(slots=True)
class IndexExpr(Expr):
    base: Expr
    key: Expr


@dataclass(slots=True)
class CallExpr(Expr):
    func: Expr
    args: list[Expr]
    kwargs: dict[str, Expr] = field(default_factory=dict)
    new: bool = False


@dataclass(slots=True)
class TextExpr(Expr):
    """A string built from parts by interpolation or concatenation."""

    parts: list[Expr]


@dataclass(slots=True)
class OpExpr(Expr):
    op: str
    args: list[Expr]


@dataclass(slots=True)
class CollectionExpr(Expr):
    """A list, tuple, set or (with keys) mapping; `type` names a constructed type (Go composite literals)."""

    items: list[Expr]
    keys: list[Expr] | None = None
    type: str = ""


@dataclass(slots=True)
class ConditionalExpr(Expr):
    test: Expr
    then: Expr
    other: Expr


@dataclass(slots=True)
class ClosureExpr(Expr):
    function: Function


@dataclass(slots=True)
class AssignExpr(Expr):
    """Assignment; `op` is "" for a plain one, else the operator of an augmented one."""

    target: Expr
    value: Expr
    op: str = ""


@dataclass(slots=True)
class CastExpr(Expr):
    type: str
    value: Expr


@dataclass(slots=True)
class UnknownExpr(Expr):
    """Syntax the lowering does not model; data flows through it from its parts."""

    parts: list[Expr]
    last: bool = False  # only from its last part; the others are evaluated for their effects


@dataclass(slots=True)
class Stmt:
    node: Syntax


@dataclass(slots=True)
class ExprStmt(Stmt):
    expr: Expr


@dataclass(slots=True)
class DeclareStmt(Stmt):
    """A variable declaration; `size` is the element count of a fixed array."""

    name: str
    value: Expr | None
    type: str = ""
    size: Expr | None = None
    pointer: bool = False
    static: bool = False


@dataclass(slots=True)
class ImportStmt(Stmt):
    """Binds `name` to the dotted `path`."""

    name: str
    path: str


@dataclass(slots=True)
class IfStmt(Stmt):
    test: Expr
    then: list[Stmt]
    other: list[Stmt]


@dataclass(slots=True)
class LoopStmt(Stmt):
    init: list[Stmt]
    test: Expr | None
    step: list[Stmt]
    body: list[Stmt]
    target: Expr | None = None
    iterable: Expr | None = None


@dataclass(slots=True)
class SwitchStmt(Stmt):
    subject: Expr
    cases: list[tuple[list[Expr], list[Stmt]]]  # a case without labels is the default


@dataclass(slots=True)
class ReturnStmt(Stmt):
    value: Expr | None


@dataclass(slots=True)
class JumpStmt(Stmt):
    kind: str  # break, continue, raise, goto
    value: Expr | None = None


@dataclass(slots=True)
class TryStmt(Stmt):
    body: list[Stmt]
    handlers: list[list[Stmt]]
    final: list[Stmt]


@dataclass(slots=True)
class BlockStmt(Stmt):
    body: list[Stmt]


@dataclass(slots=True)
class LazyStmt(Stmt):
    """A statement lowered on first use; most are never needed while a function is being edited."""

    lower: Callable[[Syntax], list[Stmt]]
    lowered: list[Stmt] | None = None

    def statements(self) -> list[Stmt]:
        if self.lowered is None:
            self.lowered = self.lower(self.node)
        return self.lowered


@dataclass(slots=True)
class LabelStmt(Stmt):
    name: str


@dataclass(slots=True)
class FunctionStmt(Stmt):
    function: Function


@dataclass(slots=True)
class ClassStmt(Stmt):
    name: str
    bases: list[str]
    body: list[Stmt]
    decorators: list[Expr]


@dataclass(slots=True)
class Param:
    name: str
    type: str = ""
    annotations: tuple[str, ...] = ()
    default: Expr | None = None


@dataclass(slots=True)
class Function:
    node: Syntax
    name: str
    params: list[Param]
    body: list[Stmt]
    decorators: list[Expr] = field(default_factory=list)
    returns: str = ""


def last_name(expr: Expr | None) -> str:
    """The name, or the last part of a dotted name; "" for other expressions."""
    return expr.name if isinstance(expr, AttrExpr) else expr.id if isinstance(expr, NameExpr) else ""


def outside_casts(node: Syntax) -> Syntax | None:
    """The closest ancestor that is neither a cast nor a parenthesis."""
    parent = node.parent()
    while parent is not None and parent.kind() in ("cast_expression", "parenthesized_expression"):
        parent = parent.parent()
    return parent

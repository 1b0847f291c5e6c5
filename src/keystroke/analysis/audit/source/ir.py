"""The neutral form every language is lowered to before data flow looks at it.

An expression or statement here says what is computed, never how a language spells it. Each keeps the
syntax node it came from, for its place. Nothing here knows a rule or a value.
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
class Const(Expr):
    value: Any


@dataclass(slots=True)
class Name(Expr):
    id: str


@dataclass(slots=True)
class Attr(Expr):
    base: Expr
    name: str


@dataclass(slots=True)
class Index(Expr):
    base: Expr
    key: Expr


@dataclass(slots=True)
class Call(Expr):
    func: Expr
    args: list[Expr]
    kwargs: dict[str, Expr] = field(default_factory=dict)
    new: bool = False


@dataclass(slots=True)
class Text(Expr):
    """A string put together from parts: interpolation or concatenation."""

    parts: list[Expr]


@dataclass(slots=True)
class Op(Expr):
    op: str
    args: list[Expr]


@dataclass(slots=True)
class Coll(Expr):
    """A list, tuple, set or (with keys) mapping; `type` names a constructed type (Go composite literals)."""

    items: list[Expr]
    keys: list[Expr] | None = None
    type: str = ""


@dataclass(slots=True)
class Cond(Expr):
    test: Expr
    then: Expr
    other: Expr


@dataclass(slots=True)
class Closure(Expr):
    function: Function


@dataclass(slots=True)
class Bind(Expr):
    """Assignment; `op` is "" for a plain one, else the operator of an augmented one."""

    target: Expr
    value: Expr
    op: str = ""


@dataclass(slots=True)
class Cast(Expr):
    type: str
    value: Expr


@dataclass(slots=True)
class Other(Expr):
    parts: list[Expr]


@dataclass(slots=True)
class Stmt:
    node: Syntax


@dataclass(slots=True)
class Do(Stmt):
    expr: Expr


@dataclass(slots=True)
class Let(Stmt):
    """A declaration; `size` is the element count of a fixed array."""

    name: str
    value: Expr | None
    type: str = ""
    size: Expr | None = None
    pointer: bool = False
    static: bool = False


@dataclass(slots=True)
class Import(Stmt):
    """`name` now stands for the dotted `path`."""

    name: str
    path: str


@dataclass(slots=True)
class If(Stmt):
    test: Expr
    then: list[Stmt]
    other: list[Stmt]


@dataclass(slots=True)
class Loop(Stmt):
    init: list[Stmt]
    test: Expr | None
    step: list[Stmt]
    body: list[Stmt]
    target: Expr | None = None
    iterable: Expr | None = None


@dataclass(slots=True)
class Switch(Stmt):
    subject: Expr
    cases: list[tuple[list[Expr], list[Stmt]]]  # no labels: the default


@dataclass(slots=True)
class Return(Stmt):
    value: Expr | None


@dataclass(slots=True)
class Jump(Stmt):
    kind: str  # break, continue, raise, goto
    value: Expr | None = None


@dataclass(slots=True)
class Try(Stmt):
    body: list[Stmt]
    handlers: list[list[Stmt]]
    final: list[Stmt]


@dataclass(slots=True)
class Block(Stmt):
    body: list[Stmt]


@dataclass(slots=True)
class Pending(Stmt):
    """A statement lowered when it is asked for: most are not, while a function is typed in."""

    lower: Callable[[Syntax], list[Stmt]]
    lowered: list[Stmt] | None = None

    def statements(self) -> list[Stmt]:
        if self.lowered is None:
            self.lowered = self.lower(self.node)
        return self.lowered


@dataclass(slots=True)
class Label(Stmt):
    name: str


@dataclass(slots=True)
class Def(Stmt):
    function: Function


@dataclass(slots=True)
class ClassDef(Stmt):
    name: str
    bases: list[str]
    body: list[Stmt]
    decorators: list[Expr]


@dataclass(slots=True)
class Param:
    name: str
    type: str = ""
    marks: tuple[str, ...] = ()  # annotations on the parameter
    default: Expr | None = None


@dataclass(slots=True)
class Function:
    node: Syntax
    name: str
    params: list[Param]
    body: list[Stmt]
    decorators: list[Expr] = field(default_factory=list)
    returns: str = ""

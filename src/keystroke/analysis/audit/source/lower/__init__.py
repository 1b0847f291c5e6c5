"""Lowers syntax trees to the IR; one module per language family.

A syntax kind without a method becomes an `UnknownExpr` over its lowered children, so that data still flows
through it. Nesting deeper than MAX_DEPTH becomes an empty `UnknownExpr`.
"""

from __future__ import annotations

from collections.abc import Callable

from keystroke.analysis.audit.source import ir
from keystroke.analysis.audit.source.ir import Expr, Stmt, Syntax

ERROR = "@error"  # the name of the value that an exception handler catches
MAX_DEPTH = 90  # keeps well below Python's recursion limit
_NOTHING = frozenset({"comment", "line_comment", "block_comment", "empty_statement", "pass_statement"})
SwitchCases = list[tuple[list[Expr], list[Stmt]]]


class Lowering:
    """Dispatches on the kind of a syntax node.

    Methods named `x_KIND` lower expressions, `s_KIND` statements. Kinds that several grammars share are here.
    """

    for_fields = ("initializer", "condition", "update")  # fields of a C-style `for`

    def __init__(self) -> None:
        self.depth = 0
        self.exprs: dict[str, Callable[[Syntax], Expr]] = {}
        self.stmts: dict[str, Callable[[Syntax], list[Stmt]]] = {}
        for name in dir(self):
            if name.startswith("x_"):
                self.exprs[name[2:]] = getattr(self, name)
            elif name.startswith("s_"):
                self.stmts[name[2:]] = getattr(self, name)

    def expr(self, node: Syntax) -> Expr:
        if self.depth > MAX_DEPTH:
            return ir.UnknownExpr(node, [])
        self.depth += 1
        try:
            lower = self.exprs.get(node.kind())
            return lower(node) if lower else self.unknown(node)
        finally:
            self.depth -= 1

    def optional(self, node: Syntax | None) -> Expr | None:
        return self.expr(node) if node is not None else None

    def children(self, node: Syntax | None) -> list[Expr]:
        """The lowered named children of a node."""
        return [self.expr(child) for child in named(node)] if node is not None else []

    def unknown(self, node: Syntax) -> Expr:
        return ir.UnknownExpr(node, self.children(node))

    def stmt(self, node: Syntax) -> list[Stmt]:
        if self.depth > MAX_DEPTH:
            return []
        self.depth += 1
        try:
            kind = node.kind()
            lower = self.stmts.get(kind)
            if lower:
                return lower(node)
            if kind == "comment":
                return []
            if kind == "ERROR":
                return self.body(node)
            return [ir.ExprStmt(node, self.expr(node))]
        finally:
            self.depth -= 1

    def body(self, node: Syntax | None) -> list[Stmt]:
        """The statements inside a node."""
        return [stmt for child in named(node) for stmt in self.stmt(child)] if node is not None else []

    def lazy(self, node: Syntax | None) -> list[Stmt]:
        """The statements of a block, each lowered when the walk reaches it."""
        if node is None:
            return []
        depth = self.depth

        def lower(child: Syntax) -> list[Stmt]:
            outer, self.depth = self.depth, depth
            try:
                return self.stmt(child)
            finally:
                self.depth = outer

        return [ir.LazyStmt(child, lower) for child in named(node) if child.kind() not in _NOTHING]

    def block(self, node: Syntax | None) -> list[Stmt]:
        """A body that may be a single statement without braces."""
        return [] if node is None else self.stmt(node)

    def sum(self, node: Syntax) -> Expr:
        """A chain of `+`, lowered without recursion: a TextExpr if a part is text, else nested sums."""
        kind, whole_node = node.kind(), node
        parts: list[Syntax] = []
        while (
            node.kind() == kind
            and node.field("operator") is not None
            and node.field("operator").text() == "+"
        ):
            parts.append(node.field("right"))
            node = node.field("left")
        parts.append(node)
        parts.reverse()
        exprs = [self.expr(part) for part in parts if part is not None]
        if len(exprs) > 2 and any(
            isinstance(expr, ir.TextExpr) or (isinstance(expr, ir.ConstExpr) and isinstance(expr.value, str))
            for expr in exprs
        ):
            return ir.TextExpr(whole_node, exprs)
        whole = exprs[0]
        for expr in exprs[1:MAX_DEPTH]:
            whole = ir.OpExpr(expr.node.parent() or expr.node, "+", [whole, expr])
        return whole

    # Expressions

    def x_identifier(self, node: Syntax) -> Expr:
        return ir.NameExpr(node, node.text())

    def x_true(self, node: Syntax) -> Expr:
        return ir.ConstExpr(node, True)

    def x_false(self, node: Syntax) -> Expr:
        return ir.ConstExpr(node, False)

    def lower_none(self, node: Syntax) -> Expr:
        return ir.ConstExpr(node, None)

    def lower_number(self, node: Syntax) -> Expr:
        return ir.ConstExpr(node, number(node.text()))

    def lower_list(self, node: Syntax) -> Expr:
        return ir.CollectionExpr(node, self.children(node))

    def x_binary_expression(self, node: Syntax) -> Expr:
        op = node.field("operator").text()
        if op == "+":
            return self.sum(node)
        return ir.OpExpr(node, op, [self.expr(node.field("left")), self.expr(node.field("right"))])

    def x_unary_expression(self, node: Syntax) -> Expr:
        operand = node.field("argument") or node.field("operand")
        return ir.OpExpr(node, node.field("operator").text(), [self.expr(operand)])

    def x_parenthesized_expression(self, node: Syntax) -> Expr:
        inner = named(node)
        return self.expr(inner[0]) if inner else ir.UnknownExpr(node, [])

    def x_ternary_expression(self, node: Syntax) -> Expr:
        test, then, other = (
            self.expr(node.field(name)) for name in ("condition", "consequence", "alternative")
        )
        return ir.ConditionalExpr(node, test, then, other)

    def x_assignment_expression(self, node: Syntax) -> Expr:
        op = text(node.field("operator")).rstrip("=")
        return ir.AssignExpr(node, self.expr(node.field("left")), self.expr(node.field("right")), op)

    # Statements

    def s_expression_statement(self, node: Syntax) -> list[Stmt]:
        return [ir.ExprStmt(node, expr) for expr in self.children(node)]

    def s_block(self, node: Syntax) -> list[Stmt]:
        return [ir.BlockStmt(node, self.body(node))]

    def skip(self, node: Syntax) -> list[Stmt]:
        return []

    def s_if_statement(self, node: Syntax) -> list[Stmt]:
        other = node.field("alternative")
        wrapped = other is not None and other.kind() == "else_clause"
        return [
            ir.IfStmt(
                node,
                self.expr(node.field("condition")),
                self.block(node.field("consequence")),
                self.body(other) if wrapped else self.block(other),
            )
        ]

    def s_while_statement(self, node: Syntax) -> list[Stmt]:
        return [ir.LoopStmt(node, [], self.expr(node.field("condition")), [], self.block(node.field("body")))]

    s_do_statement = s_while_statement

    def s_for_statement(self, node: Syntax) -> list[Stmt]:
        init, test, step = (node.field(name) for name in self.for_fields)
        steps: list[Stmt] = [ir.ExprStmt(step, self.expr(step))] if step is not None else []
        first, test_expr = self.block(init), self.optional(test)
        return [ir.LoopStmt(node, first, test_expr, steps, self.block(node.field("body")))]

    def s_return_statement(self, node: Syntax) -> list[Stmt]:
        inner = named(node)
        return [ir.ReturnStmt(node, self.expr(inner[0]) if inner else None)]

    def s_throw_statement(self, node: Syntax) -> list[Stmt]:
        return [ir.JumpStmt(node, "raise", self.unknown(node))]

    def s_break_statement(self, node: Syntax) -> list[Stmt]:
        return [ir.JumpStmt(node, "break")]

    def s_continue_statement(self, node: Syntax) -> list[Stmt]:
        return [ir.JumpStmt(node, "continue")]


def named(node: Syntax) -> list[Syntax]:
    """The named children of a node, without comments."""
    return [
        child
        for child in node.children()
        if child.is_named() and child.kind() not in ("comment", "line_comment", "block_comment")
    ]


def first(node: Syntax, *kinds: str) -> Syntax | None:
    """The first child of one of these kinds."""
    for child in node.children():
        if child.kind() in kinds:
            return child
    return None


def text(node: Syntax | None) -> str:
    return node.text() if node is not None else ""


_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\n": "", "a": "\a", "b": "\b"}


def unescape(text: str) -> str:
    """Replaces the escapes of a C-like literal; an invalid numeric one becomes one placeholder character."""
    if "\\" not in text:
        return text
    out: list[str] = []
    at = 0
    while at < len(text):
        char = text[at]
        if char != "\\" or at + 1 == len(text):
            out.append(char)
            at += 1
            continue
        mark = text[at + 1]
        if mark in "xuU" and at + 2 < len(text):
            digits = 0
            while (
                digits < 8
                and at + 2 + digits < len(text)
                and text[at + 2 + digits] in "0123456789abcdefABCDEF"
            ):
                digits += 1
            code = int(text[at + 2 : at + 2 + digits] or "63", 16)
            out.append(chr(code) if code < 0x110000 else "?")
            at += 2 + digits
        else:
            out.append(_ESCAPES.get(mark, mark))
            at += 2
    return "".join(out)


def number(text: str) -> int | float | None:
    """The value of a number literal with any suffix or separator; None if it is not a plain number."""
    text = text.replace("_", "").replace("'", "").rstrip("uUlLnN")
    try:
        if len(text) > 1 and text[0] == "0" and text[1].isdigit() and "." not in text:
            return int(text, 8)
        return int(text, 0)
    except ValueError:
        try:
            return float(text.rstrip("fFdD"))
        except ValueError:
            return None

"""Syntax trees to the neutral form, one module per language family.

A lowering knows one grammar and no rule. Whatever it does not know becomes `Other` over the lowered
children, so that data still flows through it. Depth is bounded: hostile nesting becomes an empty `Other`.
"""

from __future__ import annotations

from collections.abc import Callable

from keystroke.analysis.audit.source.ir import Const, Do, Expr, Op, Other, Stmt, Syntax, Text

ERROR = "@error"  # stands for whatever a handler caught
MAX_DEPTH = 90  # deeper than any code a person writes; keeps Python's own stack far away


class Lowering:
    """Dispatch by node kind; subclasses fill the two tables with `x_KIND` and `s_KIND` methods."""

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
            return Other(node, [])
        self.depth += 1
        try:
            found = self.exprs.get(node.kind())
            return found(node) if found else self.other(node)
        finally:
            self.depth -= 1

    def other(self, node: Syntax) -> Expr:
        return Other(node, [self.expr(child) for child in named(node)])

    def stmt(self, node: Syntax) -> list[Stmt]:
        if self.depth > MAX_DEPTH:
            return []
        self.depth += 1
        try:
            kind = node.kind()
            found = self.stmts.get(kind)
            if found:
                return found(node)
            if kind == "comment":
                return []
            if kind == "ERROR":
                return self.body(node)
            return [Do(node, self.expr(node))]
        finally:
            self.depth -= 1

    def body(self, node: Syntax | None) -> list[Stmt]:
        if node is None:
            return []
        out: list[Stmt] = []
        for child in named(node):
            out.extend(self.stmt(child))
        return out

    def sum(self, node: Syntax) -> Expr:
        """A chain of `+`, read without recursion: text where one part is text, else nested sums."""
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
            isinstance(expr, Text) or (isinstance(expr, Const) and isinstance(expr.value, str))
            for expr in exprs
        ):
            return Text(whole_node, exprs)
        whole = exprs[0]
        for expr in exprs[1:MAX_DEPTH]:
            whole = Op(expr.node.parent() or expr.node, "+", [whole, expr])
        return whole

    def block(self, node: Syntax | None) -> list[Stmt]:
        """A body that may be one bare statement."""
        return [] if node is None else self.stmt(node)


def named(node: Syntax) -> list[Syntax]:
    return [
        child
        for child in node.children()
        if child.is_named() and child.kind() not in ("comment", "line_comment", "block_comment")
    ]


def first(node: Syntax, *kinds: str) -> Syntax | None:
    for child in node.children():
        if child.kind() in kinds:
            return child
    return None


_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "0": "\0",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "\n": "",
    "a": "\a",
    "b": "\b",
}


def unescape(text: str) -> str:
    """Simple escapes of C-like literals; numeric ones are left as one placeholder character each."""
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
    """A literal's value whatever suffix or separator its language allows; None when it is not plain."""
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

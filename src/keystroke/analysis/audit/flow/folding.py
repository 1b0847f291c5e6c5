"""Computations on expressions and constants that need no environment."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keystroke.analysis.audit.flow.values import (
    ALL,
    CONSTANT,
    UNKNOWN,
    Value,
    constant,
    mix,
    replace,
    text_of,
)
from keystroke.analysis.audit.source import ir

_DIRECTIVE = re.compile(r"%(?:\(\w+\))?[-+ #0]*\d*(?:\.\d+)?(?:hh|h|ll|l|z|j)?([a-zA-Z%])|\{[^{}]*\}")
_DOLLAR = re.compile(r"\$\{?([A-Za-z_]\w*)\}?")
_ARITHMETIC = {"+": operator.add, "-": operator.sub, "*": operator.mul, "&": operator.and_, "|": operator.or_}
_FIELD = re.compile(r"\{(\w+)|%\((\w+)\)")

# The uses for which a text without these characters is safe.
_REFUSED = {
    "'": ("xpath", "sql"),
    '"': ("xpath",),
    "<": ("html",),
    "(": ("ldap",),
    "*": ("ldap",),
    "\n": ("header", "log"),
    "\r": ("header", "log"),
    "$": ("nosql",),
    ";": ("shell",),
    "..": ("path",),
    "://": ("redirect", "url"),
}


def uses_without(text: str) -> frozenset[str]:
    """The uses for which a value that does not contain `text` is safe."""
    return frozenset(use for part, uses in _REFUSED.items() if text == part for use in uses)


def uses_after_replacing(pattern: Value, family: str) -> frozenset[str]:
    """The uses for which a text is safe after all matches of `pattern` are replaced."""
    text = pattern.text
    if text is None or pattern.level:
        return frozenset()
    body, _, flags = text[1:].rpartition("/") if pattern.path == "RegExp()" else (text, "", "g")
    if "g" not in flags:
        return frozenset()  # the first match only
    if (body.startswith("[^") and not any(char in body for char in "<'\"\\/;$")) or body in (
        r"\W",
        r"\W+",
        r"\D",
    ):
        return ALL  # only letters, digits and the like are left
    if pattern.path == "RegExp()" or (family == "python" and body.startswith("[")):
        if re.fullmatch(r"\[(?:[^\]\\]|\\.)*\][+*]?|\\?.(?:\|\\?.)*|\\[rn](?:\|\\[rn])*", body) is None:
            return frozenset()
        inside = body.replace("\\n", "\n").replace("\\r", "\r")
        literal = frozenset({"regex"}) if all(mark in inside for mark in "*+?([") else frozenset()
        return literal.union(use for part, uses in _REFUSED.items() if part in inside for use in uses)
    return uses_without(body) if family != "javascript" else frozenset()


def raises(path: str) -> bool:
    return not re.search(r"(?i)(?:^|\.)is_?[a-z]", path)


def key_of(expr: ir.Expr) -> str | None:
    """The environment's key of an expression: `x`, `self.x`; None for anything computed."""
    if isinstance(expr, ir.NameExpr):
        return expr.id
    if isinstance(expr, ir.AttrExpr):
        base = key_of(expr.base)
        return f"{base}.{expr.name}" if base is not None else None
    if isinstance(expr, ir.OpExpr) and expr.op == "&" and len(expr.args) == 1:
        return key_of(expr.args[0])
    if isinstance(expr, ir.CastExpr):
        return key_of(expr.value)
    return None


def format_text(
    template: Value,
    args: list[Value],
    named: dict[str, Value] | None = None,
    *,
    strict: bool = True,
    style: str = "%{",
) -> Value:
    """The text made from a template and its arguments; `named` are keyword arguments.

    `strict`: a directive for a number prints a number or fails (Go prints any other value as it is).
    `style`: what a directive starts with; "%s" is plain text for `str.format`.
    """
    text = template.text or ""
    named = named or {}
    parts: list[Value] = []
    at = used = 0
    dollars = template.path.endswith("Template()")
    for found in (_DOLLAR if dollars else _DIRECTIVE).finditer(text):
        if found[1] == "%" or not (dollars or found.group()[0] in style):
            continue
        parts.append(constant(text[at : found.start()]))
        at = found.end()
        name = None if dollars else _FIELD.match(found.group())
        word = found[1] if dollars else (name[1] or name[2]) if name is not None else ""
        if strict and found[1] and found[1] in "diufxXeEgG":
            parts.append(Value(numeric=True))
            used += not word
        elif word in named:
            parts.append(named[word])
        elif word.isdigit() and int(word) < len(args):
            parts.append(args[int(word)])
            used = len(args)
        elif used < len(args):
            arg = args[used]
            if word and arg.items is not None:  # a mapping behind "%(name)s"
                arg = arg.item(word) or arg
                used -= 1
            parts.append(
                Value(numeric=True) if found[1] and found[1] in "diufxXeEgGcp" and not arg.level else arg
            )
            used += 1
        else:
            parts.append(mix([*args, *named.values()]) if args or named else Value(level=template.level))
    parts.append(constant(text[at:]))
    if used < len(args):
        parts.extend(
            replace(arg, skeleton=None, const="") if arg.level == CONSTANT else arg for arg in args[used:]
        )
    if template.level:
        parts.append(template)
    return text_of(parts)


def fold(op: str, a: Any, b: Any, family: str) -> Any:
    """Constant integer arithmetic on operands of at most 64 bits."""
    if not isinstance(a, int) or not isinstance(b, int) or isinstance(a, bool) or isinstance(b, bool):
        return UNKNOWN
    if abs(a) > 1 << 64 or abs(b) > 1 << 64:
        return UNKNOWN
    if op in _ARITHMETIC:
        return _ARITHMETIC[op](a, b)
    if op in ("/", "//") and b and not (op == "/" and family in ("python", "javascript")):
        return a // b
    if op == "%" and b:
        return a % b
    if op in ("<<", ">>") and 0 <= b < 64:
        return a << b if op == "<<" else a >> b
    return UNKNOWN


def compare(op: str, a: Value, b: Value) -> Any:
    if not (a.known and b.known) or a.level or b.level:
        return UNKNOWN
    x, y = a.const, b.const
    if op in ("==", "===", "is"):
        return x == y
    if op in ("!=", "!==", "is not"):
        return x != y
    if isinstance(x, int | float) and isinstance(y, int | float):
        return {"<": x < y, ">": x > y, "<=": x <= y, ">=": x >= y}[op]
    return UNKNOWN


def assigned_names(stmts: list[ir.Stmt], known: AssignedNames | None = None) -> frozenset[str]:
    """The names that these statements assign; `known` holds those of statements seen before."""
    out: set[str] = set()
    for stmt in stmts:
        _collect_assigned(stmt, out, 0, known)
    return frozenset(out)


@dataclass(frozen=True, slots=True)
class AssignedNames:
    """The names that statements assign, by kind and text; a statement with a syntax error has no entry."""

    names: dict[tuple[str, str], frozenset[str]]
    is_broken: Callable[[ir.Syntax], bool]

    def of(self, stmt: ir.LazyStmt) -> frozenset[str]:
        if self.is_broken(stmt.node):
            return assigned_names(stmt.statements(), self)
        key = (stmt.node.kind(), stmt.node.text())
        if key not in self.names:
            self.names[key] = assigned_names(stmt.statements(), self)
        return self.names[key]


def _collect_assigned(node: Any, out: set[str], depth: int, known: AssignedNames | None) -> None:
    if depth > 60:
        return
    if isinstance(node, ir.AssignExpr):
        key = key_of(node.target)
        if key is not None:
            out.add(key)
    elif isinstance(node, ir.DeclareStmt):
        out.add(node.name)
    elif isinstance(node, ir.LazyStmt):
        out |= known.of(node) if known is not None else assigned_names(node.statements())
        return
    elif isinstance(node, ir.Function | ir.ConstExpr | ir.NameExpr):
        return
    for name in node.__slots__ if hasattr(node, "__slots__") else ():
        if name == "node":
            continue
        child = getattr(node, name)
        if isinstance(child, ir.Expr | ir.Stmt):
            _collect_assigned(child, out, depth + 1, known)
        elif isinstance(child, list):
            for item in child:
                if isinstance(item, tuple):
                    for part in item[1]:
                        _collect_assigned(part, out, depth + 1, known)
                elif isinstance(item, ir.Expr | ir.Stmt):
                    _collect_assigned(item, out, depth + 1, known)


def names(expr: ir.Expr) -> frozenset[str]:
    out: set[str] = set()
    stack: list[ir.Expr] = [expr]
    while stack:
        item = stack.pop()
        if isinstance(item, ir.NameExpr):
            out.add(item.id)
        elif isinstance(item, ir.OpExpr):
            stack.extend(item.args)
        elif isinstance(item, ir.AttrExpr):
            stack.append(item.base)
        elif isinstance(item, ir.CallExpr):
            stack.extend(item.args)
    return frozenset(out)

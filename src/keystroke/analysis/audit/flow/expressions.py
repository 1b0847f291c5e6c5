"""Evaluates expressions and assignments."""

from __future__ import annotations

import dataclasses
import re
import string
from typing import Any

from keystroke.analysis.audit.flow.base import CAPS, MAX_STEPS, ExhaustedError
from keystroke.analysis.audit.flow.calls import CallFlow
from keystroke.analysis.audit.flow.folding import compare, fold, format_text, key_of
from keystroke.analysis.audit.flow.roles import is_source_here
from keystroke.analysis.audit.flow.values import (
    CONSTANT,
    HTML,
    LOCAL,
    PARAMETER,
    PLAIN,
    REMOTE,
    UNKNOWN,
    Value,
    constant,
    join,
    mix,
    replace,
    text_of,
)
from keystroke.analysis.audit.source import ir
from keystroke.analysis.audit.source.lower import ERROR

_ALPHABETS = {
    name: getattr(string, name)
    for name in ("ascii_letters", "ascii_lowercase", "ascii_uppercase", "digits", "hexdigits", "punctuation")
}
# Fields of a Python exception that carry the message, the command or the place it came from.
_ERROR_TEXT = frozenset(
    {"args", "message", "msg", "strerror", "filename", "stderr", "stdout", "output", "cmd"}
    | {
        "orig",
        "statement",
        "__cause__",
        "__context__",
        "__traceback__",
        "with_traceback",
        "__str__",
        "__repr__",
    }
)
_OF_INPUT = re.compile(r"(?:[\w.]*(?:SyntaxError|(?:Validation|Decode|Parse)Error)[,\s]*)+")
_CLASSES = re.compile(r"[A-Za-z_][\w.]*")
_NONNEGATIVE = frozenset({"rand()", "random()", "std.rand()", "strlen()", "wcslen()", "sizeof()", "abs()"})
_PACKAGE = re.compile(r"(?:java|javax|jakarta|org|com|io|net)(?:\.[a-z][\w]*)*")


class ExpressionFlow(CallFlow):
    def eval(self, expr: ir.Expr) -> Value:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise ExhaustedError
        return self.dispatch[type(expr)](expr)

    def eval_name(self, expr: ir.NameExpr) -> Value:
        known = self.lookup(expr.id)
        if known is None:
            known = self.unknown_name(expr.id)
        elif not self.silent and known.memory is not None:
            self.listener.on_use(expr.id, known, expr.node)
        return known

    def unknown_name(self, path: str) -> Value:
        if self.knowledge.sources.match(path):
            return Value(level=REMOTE, path=path, origin=path, roots=frozenset({path}))
        if path == "arguments" and self.family == "javascript":
            return Value(level=PARAMETER, path=path, origin=path, roots=frozenset({path}))
        last = path.rsplit(".", 1)[-1]
        level = CONSTANT if CAPS.fullmatch(last) or self.knowledge.constants.match(path) else LOCAL
        origin = path if self.knowledge.origins.match(path) else ""
        clean = self.uses_by_name(path)
        return Value(level=level, path=path, origin=origin, roots=frozenset({path}), clean=clean)

    def eval_attr(self, expr: ir.AttrExpr) -> Value:
        key = key_of(expr)
        if key is not None:
            known = self.lookup(key)
            if known is not None:
                if not self.silent and known.memory is not None:
                    self.listener.on_use(key, known, expr.node)
                return known
        return self.member_of(self.eval(expr.base), expr.name)

    def member_of(self, base: Value, name: str) -> Value:
        item = base.item(name)
        if item is not None:
            return item
        path = f"{base.path}.{name}" if base.path else f"?.{name}"
        if base.path == "string" and name in _ALPHABETS:
            return Value(_ALPHABETS[name], path=path)
        if self.family == "java" and name[:1].isupper() and _PACKAGE.fullmatch(base.path):
            return Value(path=name)
        if self.knowledge.sources.match(path) and is_source_here(
            path, self.functions[-1] if self.functions else None
        ):
            return Value(level=REMOTE, path=path, origin=path, roots=base.roots)
        if base.level <= LOCAL and self.knowledge.origins.match(path):
            return Value(level=LOCAL, path=path, origin=path, roots=base.roots)
        if name == "length" and self.family in ("javascript", "java"):
            return Value(level=base.level, numeric=True, path=path, roots=base.roots)
        if base.path == ERROR and self.family == "python" and name not in _ERROR_TEXT:
            return Value(level=LOCAL, path=path, roots=base.roots)  # what the program put into its own error
        level = base.level
        if base.level == CONSTANT and not base.known and base.items is None:
            level = (
                CONSTANT
                if CAPS.fullmatch(name) or self.knowledge.constants.match(path) or not base.path
                else LOCAL
            )
        elif base.level == PARAMETER and self.family == "c":
            level = LOCAL
        elif base.level == LOCAL and CAPS.fullmatch(name):
            level = CONSTANT
        clean = base.clean | self.knowledge.sanitizers.uses(path) if self.family == "python" else base.clean
        if level < REMOTE and not base.path.startswith("$"):  # `$scope.html` is what the page gives
            clean |= self.uses_by_name(name)
        return Value(level=level, path=path, origin=base.origin, roots=base.roots, clean=clean)

    def element_of(self, whole: Value) -> Value:
        """The value of any one item of a collection."""
        if whole.items:
            value = whole.items[0][1]
            for _, other in whole.items[1:]:
                value = join(value, other)
            return value
        if whole.known:
            return replace(whole, const=UNKNOWN)
        return replace(
            whole, path=f"{whole.path}[]" if whole.path else "", items=None, memory=None, skeleton=None
        )

    def eval_index(self, expr: ir.IndexExpr) -> Value:
        base = self.eval(expr.base)
        key = self.eval(expr.key)
        if not self.silent:
            self.listener.on_index(base, key, expr.node, expr)
        if base.items is not None:
            if key.known:
                item = base.item(key.const)
                if item is not None:
                    return item
            return self.element_of(base)
        if isinstance(base.const, str) and isinstance(key.const, int) and not base.level:
            inside = -len(base.const) <= key.const < len(base.const)
            return constant(base.const[key.const]) if inside else PLAIN
        if isinstance(key.const, str) and base.path:
            return self.member_of(base, key.const)
        element = self.element_of(base)
        if base.memory is not None and base.memory.length is not None:
            element = replace(element, numeric=True)
        return element

    def eval_collection(self, expr: ir.CollectionExpr) -> Value:
        values = [self.eval(item) for item in expr.items]
        if expr.keys is None:
            items: tuple[tuple[Any, Value], ...] = tuple(enumerate(values))
        else:
            keys = [self.eval(key) for key in expr.keys]
            values = [
                value.as_safe_for(frozenset({"nosql"}))
                if key.const in self.knowledge.plain_operators
                else value
                for key, value in zip(keys, values, strict=True)
            ]
            items = tuple(
                (key.const if key.known else f"?{at}", value)
                for at, (key, value) in enumerate(zip(keys, values, strict=True))
            )
        whole = mix(values)
        path = self.resolve_type(expr.type) if expr.type else ""
        value = replace(whole, items=items[:200], path=path, roots=whole.roots)
        if not self.silent:
            self.listener.on_collection(value, expr.node, expr)
        return value

    def eval_conditional(self, expr: ir.ConditionalExpr) -> Value:
        test = self.eval(expr.test)
        if test.known and test.level == CONSTANT:
            return self.eval(expr.then if test.const else expr.other)
        before = self.env
        self.env = dict(before)
        self.narrow(expr.test, True)
        left = self.eval(expr.then)
        self.env = dict(before)
        self.narrow(expr.test, False)
        right = self.eval(expr.other)
        self.env = before
        return join(left, right)

    def eval_cast(self, expr: ir.CastExpr) -> Value:
        value = self.eval(expr.value)
        if self.family == "python":
            return replace(value, origin="") if self.is_own_error(expr.type) else value
        kind = expr.type.strip("()* ")
        if kind in self.knowledge.numeric_types and "*" not in expr.type:
            return replace(value, numeric=True)
        if self.family == "java" and kind and kind not in ("String", "Object"):
            return replace(value, path=kind)
        return value

    def is_own_error(self, caught: str) -> bool:
        """Whether all exceptions that a clause names come from modules of the same package, or tell of input.

        Their texts are the program's own, or say what is wrong with what a client sent.
        """
        if _OF_INPUT.fullmatch(caught.strip("() ")):
            return True
        held = [self.lookup(name.partition(".")[0]) for name in _CLASSES.findall(caught)]
        return bool(held) and all(value is not None and value.path.startswith(".") for value in held)

    def eval_op(self, expr: ir.OpExpr) -> Value:
        op = expr.op
        if op in ("and", "&&", "or", "||", "??"):
            return self.eval_logical(expr)
        args = [self.eval(arg) for arg in expr.args]
        if len(args) == 1:
            return self.eval_unary(op, args[0])
        if (
            op == "%" and self.family == "python" and args[0].text is not None
        ):  # a format string in a variable
            several = isinstance(expr.args[1], ir.CollectionExpr) and expr.args[1].keys is None
            return format_text(
                args[0], [value for _, value in args[1].items or ()] if several else [args[1]], style="%"
            )
        if op == "+" and not all(arg.numeric for arg in args):
            if any(arg.memory is not None for arg in args):
                return self.offset_pointer(args)
            if self.family == "python" and args[0].items is not None and args[1].items is not None:
                held = [value for arg in args for _, value in arg.items or ()]
                return replace(mix(args), items=tuple(enumerate(held))[:200])  # a longer list
            texts = [arg for arg in args if arg.text is not None]
            if texts or not any(isinstance(arg.const, int) for arg in args):
                if self.family == "c" and not texts:
                    return mix(args)
                return text_of(args)
            return mix(args)
        if (
            op == "*"
            and any(isinstance(arg.const, str | bytes) for arg in args)
            and max(arg.level for arg in args) <= LOCAL
        ):
            return next(arg for arg in args if isinstance(arg.const, str | bytes))  # repetition of a constant
        if op == "+" or op in ("-", "*", "/", "%", "//", "<<", ">>", "&", "|", "^"):
            folded = fold(op, args[0].const, args[1].const, self.family)
            if folded is not UNKNOWN:
                return constant(folded)
            if not self.silent:
                self.listener.on_arithmetic(op, args, expr.node)
            if op == "/" and self.family == "python" and not args[0].numeric:
                return self.join_path(args)
            # What is taken from a pointer is a number, or another pointer: then the difference is one.
            steps = args[1].memory is None and (args[1].numeric or args[1].level < PARAMETER)
            if op == "-" and args[0].memory is not None and steps:
                return self.offset_pointer([args[0], self.eval_unary("-", args[1])])
            return self.eval_range(op, args)
        if op in ("==", "===", "!=", "!==", "<", ">", "<=", ">=", "is", "is not"):
            if not self.silent and op in ("==", "===", "!=", "!=="):
                self.listener.on_comparison(expr, args)
            result = compare(op, args[0], args[1])
            return Value(numeric=True) if result is UNKNOWN else Value(result)
        if op in ("in", "not in"):
            held, group = args[0].const, args[1].const
            if isinstance(held, str) and isinstance(group, str) and not args[0].level and not args[1].level:
                return Value((held in group) == (op == "in"))
            return Value(numeric=True)
        return Value(numeric=True, level=mix(args).level)

    def eval_range(self, op: str, args: list[Value]) -> Value:
        worst = max(args, key=lambda arg: arg.level)
        low = high = None
        a, b = args
        if op == "+" and a.high is not None and b.high is not None:
            high = a.high + b.high
        if op == "+" and a.low is not None and b.low is not None:
            low = a.low + b.low
        if op == "-" and a.high is not None and b.low is not None:
            high = a.high - b.low
        if op == "%" and isinstance(b.const, int) and b.const > 0:
            nonnegative = (a.low is not None and a.low >= 0) or a.path in _NONNEGATIVE
            high, low = b.const - 1, (0 if nonnegative else None)
        if op == "&" and isinstance(b.const, int) and b.const >= 0:
            low, high = 0, b.const
        bounded = (
            all(arg.bounded or arg.known or arg.high is not None or not arg.level for arg in args)
            or high is not None
            or op == "%"
        )
        return Value(
            level=worst.level,
            numeric=True,
            origin=worst.origin,
            roots=a.roots | b.roots,
            low=low,
            high=high,
            bounded=bounded,
        )

    def offset_pointer(self, args: list[Value]) -> Value:
        pointer = next(arg for arg in args if arg.memory is not None)
        step = next((arg for arg in args if arg is not pointer), PLAIN)
        memory = pointer.memory
        if memory is None:
            return pointer
        capacity = None
        if memory.capacity is not None and isinstance(step.const, int):
            capacity = memory.capacity - step.const * memory.unit
        return replace(
            pointer, memory=dataclasses.replace(memory, capacity=capacity, length=None, array=False, fits="")
        )

    def join_path(self, args: list[Value]) -> Value:
        pieces: list[Value] = []
        for at, arg in enumerate(args):
            if at and not (pieces[-1].text or "").endswith("/"):
                pieces.append(constant("/"))
            pieces.append(arg)
        whole = replace(text_of(pieces), path=args[0].path)
        if args[0].level < whole.level and all(
            arg.is_safe_for("path") for arg in args if arg.level == whole.level
        ):
            return whole.as_safe_for(
                frozenset({"path"})
            )  # a folder of the caller, and names that cannot leave it
        return whole

    def eval_unary(self, op: str, arg: Value) -> Value:
        if op in ("!", "not"):
            return Value(not arg.const) if arg.known and arg.level == CONSTANT else Value(numeric=True)
        if op == "-" and isinstance(arg.const, int | float):
            return constant(-arg.const)
        if op == "&":
            return replace(arg, numeric=False)
        if op in ("-", "~", "+"):
            return replace(arg, numeric=True, const=UNKNOWN)
        if op == "typeof":
            return PLAIN
        return arg

    def eval_logical(self, expr: ir.OpExpr) -> Value:
        left = self.eval(expr.args[0])
        both = expr.op in ("and", "&&")
        if left.known and left.level == CONSTANT and expr.op != "??":
            if bool(left.const) != both:
                return left
            return self.eval(expr.args[1])
        before = self.env
        self.env = dict(before)
        self.narrow(expr.args[0], both)
        right = self.eval(expr.args[1])
        self.env = self.join_envs([before, self.env]) if self.family == "c" else before
        if both and self.family != "javascript":
            return right if not left.numeric else replace(right, const=UNKNOWN)
        if self.family == "javascript" and right.numeric and right.known and left.level < REMOTE and not both:
            left = left.as_safe_for(HTML)  # instead of it a number: it is one
        return join(left, right)

    # Assignment

    def eval_assign(self, expr: ir.AssignExpr) -> Value:
        value = self.eval(expr.value)
        if expr.op and expr.op != ":":
            old = self.eval(expr.target)
            if expr.op == "+":
                if not (old.numeric and value.numeric):
                    value = (
                        self.offset_pointer([old, value])
                        if old.memory is not None
                        else (mix([old, value]) if old.items is not None else text_of([old, value]))
                    )
                else:
                    folded = fold("+", old.const, value.const, self.family)
                    value = constant(folded) if folded is not UNKNOWN else self.eval_range("+", [old, value])
            elif expr.op == "-" and old.memory is not None and value.memory is None:
                value = self.offset_pointer([old, self.eval_unary("-", value)])
            elif expr.op in ("||", "??", "&&", "|"):
                value = join(old, value)
            else:
                folded = fold(expr.op, old.const, value.const, self.family)
                value = constant(folded) if folded is not UNKNOWN else self.eval_range(expr.op, [old, value])
        elif (
            self.family == "java"
            and isinstance(expr.target, ir.NameExpr)
            and expr.target.id in self.declared_types
        ):
            value = self.declared_value(self.declared_types[expr.target.id], value)
        self.assign(expr.target, value, expr.node)
        return value

    def assign(self, target: ir.Expr, value: Value, node: ir.Syntax) -> None:
        if isinstance(target, ir.CollectionExpr):
            for at, item in enumerate(target.items):
                part = value.item(at) if target.keys is None else None
                if part is None and target.keys is not None:
                    label = target.keys[at]
                    name = label.value if isinstance(label, ir.ConstExpr) else "*"
                    part = self.member_of(value, str(name)) if name != "..." else value
                elif part is None:
                    part = value if at == 0 else replace(value, memory=None)
                self.assign(item, part, node)
            return
        if isinstance(target, ir.AssignExpr):  # a default: {a = 1}
            self.assign(target.target, value, node)
            return
        key = key_of(target)
        path = key or ""
        if isinstance(target, ir.AttrExpr):
            base = self.eval(target.base)
            path = f"{base.path}.{target.name}" if base.path else key or f"?.{target.name}"
            owner = key_of(target.base)
            if self.family == "javascript" and owner is not None and base.items is not None:
                self.store_item(owner, target.name, value)
            if owner is not None and target.name in self.knowledge.text_properties:
                self.store(f"{owner}.innerHTML", value.as_safe_for(frozenset({"html"})))
        elif isinstance(target, ir.IndexExpr):
            base = self.eval(target.base)
            index = self.eval(target.key)
            if not self.silent:
                self.listener.on_index(base, index, target.node, target)
            path = f"{base.path or key_of(target.base) or '?'}[]"
            holder = key_of(target.base)
            if holder is not None and self.lookup(holder) is not None:
                self.store_item(holder, index.const if index.known else UNKNOWN, value)
        if key is not None and not isinstance(target, ir.IndexExpr):
            self.store(key, value)
        if not self.silent:
            self.listener.on_assign(path, key or path, value, node, target)

    def store(self, key: str, value: Value) -> None:
        if (
            value.path.endswith("()")
            and value.level < REMOTE
            and not value.origin
            and (value.level <= LOCAL or not value.built)
        ):
            value = value.as_safe_for(self.uses_by_name(key))
        if value.level and key not in value.roots:
            value = replace(value, roots=value.roots | {key})
        self.env[key] = value
        if "." in key:
            self.dotted_keys.add(key)
        if self.dotted_keys:
            prefix = key + "."
            for other in [name for name in self.dotted_keys if name.startswith(prefix)]:
                self.env.pop(other, None)

    def store_item(self, holder: str, key: Any, value: Value) -> None:
        """`holder[key] = value`; exact if the key is constant."""
        whole = self.lookup(holder) or PLAIN
        if whole.memory is not None:
            length = None if not (value.const == 0 and isinstance(key, int)) else key
            if length is not None:
                self.env[holder] = replace(whole, memory=dataclasses.replace(whole.memory, length=length))
            elif value.level > whole.level:
                self.env[holder] = replace(whole, level=value.level, origin=value.origin)
            return
        items = dict(whole.items) if whole.items is not None else None
        if items is not None and key is not UNKNOWN and not isinstance(key, float):
            items[key] = value
            mixed = mix(list(items.values()))
            self.env[holder] = replace(
                whole,
                items=tuple(items.items()),
                level=mixed.level,
                clean=mixed.clean,
                origin=mixed.origin,
                roots=whole.roots | mixed.roots,
            )
            return
        mixed = mix([whole, value])
        self.env[holder] = replace(mixed, path=whole.path, const=UNKNOWN, roots=whole.roots | mixed.roots)

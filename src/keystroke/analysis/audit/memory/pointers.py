"""The data flow of C and C++: pointers into buffers, addresses of variables, aliases of a block.

A pointer is a block with an offset, so that what is written through one name is visible through all.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any

from keystroke.analysis.audit.flow.base import CallEvent, Env
from keystroke.analysis.audit.flow.data_flow import DataFlow
from keystroke.analysis.audit.flow.folding import key_of
from keystroke.analysis.audit.flow.values import PLAIN, REMOTE, UNKNOWN, Value, constant, join
from keystroke.analysis.audit.memory.library import LIBRARY
from keystroke.analysis.audit.memory.sizes import size_of
from keystroke.analysis.audit.source import ir

MAX_VISITS = 24  # inlined calls per walk
PARSED = re.compile(r"ato[il]|strto|scanf|rand|argv|fgets")
FORGED = "@forged"  # the path of a pointer computed from a foreign number
_NUMBER = re.compile(r"scanf|ato[il]|strto|argv|getenv|recv|read|fgets")
_CHECKED = re.compile(r"__builtin_s?(?:add|sub|mul)l{0,2}_overflow(?:_p)?|ckd_(?:add|sub|mul)")
_READERS = frozenset({"free", "memcmp", "strcmp", "sizeof", "printf", "fprintf", "delete"})


class PointerFlow(DataFlow):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.call_stack: list[ir.CallExpr] = []
        self.inlined_calls = 0
        self.rules_broken_by: Callable[[str], frozenset[str]] | None = None  # by a function itself

    def pointed_variable(self, expr: ir.Expr) -> str | None:
        """The variable whose memory an expression points into."""
        while True:
            if isinstance(expr, ir.CastExpr):
                expr = expr.value
            elif isinstance(expr, ir.OpExpr) and expr.op == "&" and len(expr.args) == 1:
                inner = expr.args[0]
                expr = inner.base if isinstance(inner, ir.IndexExpr) else inner
            elif isinstance(expr, ir.OpExpr) and expr.op in ("+", "-") and len(expr.args) == 2:
                left, right = expr.args
                held = self.eval_silently(left)
                expr = left if held.memory is not None or not isinstance(right, ir.NameExpr) else right
            else:
                return key_of(expr)

    def aliases_of(self, block: int) -> list[str]:
        if not block:
            return []
        return [
            key for key, value in self.env.items() if value.memory is not None and value.memory.block == block
        ]

    # Expressions

    def eval_name(self, expr: ir.NameExpr) -> Value:
        if expr.id not in self.env and expr.id.isupper():  # a macro may be an alias of a variable
            known = self.file_env.get(expr.id)
            if known is not None and known.path in self.env:
                return super().eval_name(ir.NameExpr(expr.node, known.path))
        return super().eval_name(expr)

    def run_declare(self, stmt: ir.DeclareStmt) -> None:
        held = stmt.value.id if isinstance(stmt.value, ir.NameExpr) else ""
        known = self.env.get(held)
        if known is not None and known.memory is not None and known.memory.kind == "unset":
            declarator = stmt.node.field("declarator")
            if declarator is not None and declarator.text().lstrip("* ").startswith("&"):
                self.env[held] = replace(known, memory=None)  # a reference reads nothing and may write it
        super().run_declare(stmt)

    def eval_op(self, expr: ir.OpExpr) -> Value:
        if expr.op == "&" and len(expr.args) == 1:
            return self.eval_address(expr.args[0])
        return super().eval_op(expr)

    def unknown_name(self, path: str) -> Value:
        limit = LIBRARY.limits.get(path)
        return constant(limit) if limit is not None else super().unknown_name(path)

    def eval_address(self, inner: ir.Expr) -> Value:
        if isinstance(inner, ir.IndexExpr):
            base, at = self.eval(inner.base), self.eval(inner.key)
            if base.memory is not None:
                return self.offset_pointer([base, at])
            return replace(base, numeric=False)
        value = self.eval(inner)
        key = key_of(inner)
        if key is None or (value.memory is not None and value.memory.array):
            return replace(value, numeric=False)
        memory = value.memory if value.memory is not None and value.memory.kind != "unset" else None
        return replace(value, numeric=False, target=key, memory=memory)

    def offset_pointer(self, args: list[Value]) -> Value:
        pointer = next(arg for arg in args if arg.memory is not None)
        step = next((arg for arg in args if arg is not pointer), PLAIN)
        memory = pointer.memory
        if memory is None or step.const == 0:
            return pointer
        moved = step.const * memory.unit if isinstance(step.const, int) else None
        foreign = step.level >= REMOTE and step.numeric and not step.bounded and step.high is None
        if foreign and _NUMBER.search(step.origin):
            pointer = replace(pointer, path=FORGED, origin=step.origin)
        known = moved is not None and memory.start is not None
        return replace(
            pointer,
            target="",
            memory=replace(
                memory,
                capacity=memory.capacity - moved
                if memory.capacity is not None and moved is not None
                else None,
                length=memory.length - moved
                if memory.length is not None and moved is not None and 0 <= moved <= memory.length
                else None,
                start=memory.start + moved
                if known and memory.start is not None and moved is not None
                else None,
                array=False,
                fits="",
            ),
        )

    def eval_index(self, expr: ir.IndexExpr) -> Value:
        if (
            isinstance(expr.key, ir.ConstExpr)
            and expr.key.value == 0
            and isinstance(expr.base, ir.NameExpr | ir.AttrExpr)
        ):
            base = self.eval_silently(expr.base)
            held = self.lookup(base.target) if base.target else None
            if held is not None:
                self.eval(expr.base)
                return held
        return super().eval_index(expr)

    def eval_call(self, expr: ir.CallExpr) -> Value:
        if isinstance(expr.func, ir.NameExpr) and expr.func.id == "sizeof":  # its operand is not evaluated
            args = [self.eval_silently(arg) for arg in expr.args]
            kwargs = {name: self.eval_silently(arg) for name, arg in expr.kwargs.items()}
            event = CallEvent(expr, "sizeof", None, args, kwargs, None)
            return self.listener.on_call(event) or Value(numeric=True)
        self.call_stack.append(expr)
        try:
            return super().eval_call(expr)
        finally:
            self.call_stack.pop()

    def inline_call(self, function: ir.Function, args: list[Value]) -> Value | None:
        """Walks a function of the file with the arguments of a call; new matches are reported at the call."""
        if (
            self.inline_depth
            or not function.body
            or self.rules_broken_by is None
            or len(args) < len(function.params)
        ):
            return None
        self.inlined_calls += 1
        if self.inlined_calls > MAX_VISITS:
            return None
        call = self.call_stack[-1]
        outer, breaks, gotos = self.env, self.breaks, self.gotos
        self.env, self.breaks, self.gotos = dict(outer), [], {}
        for param, arg in zip(function.params, args, strict=False):
            self.env[param.name] = arg
        self.inline_depth += 1
        self.functions.append(function)
        self.returns.append([])
        self.listener.call_site = (call.node, self.rules_broken_by(function.name))
        try:
            self.run(function.body)
        finally:
            after, self.env, self.breaks, self.gotos = self.env, outer, breaks, gotos
            self.listener.call_site = None
            self.inline_depth -= 1
            self.functions.pop()
            results = self.returns.pop()
        self.adopt_effects(after, call, function)
        return reduce(join, results) if results else None

    def adopt_effects(self, after: Env, call: ir.CallExpr, function: ir.Function) -> None:
        """Applies the effects of an inlined function on blocks, globals and references."""
        for key, value in after.items():
            if (key.startswith("#") and not key.startswith("#l")) or key in self.file_env:
                self.env[key] = value
        for key, known in list(self.env.items()):
            inner = after.get(key)
            if known.memory is None or not known.memory.block or inner is None or inner.memory is None:
                continue
            if inner.memory.block == known.memory.block:
                self.env[key] = inner
        for arg in call.args:  # variables whose address was passed
            place = key_of(arg) if isinstance(arg, ir.OpExpr) and arg.op == "&" else None
            if place is not None and place in after and place in self.env:
                self.env[place] = after[place]
        for param, arg in zip(function.params, call.args, strict=False):
            name = key_of(arg) if "&" in param.type else None
            if name is not None and param.name in after:
                self.store(name, after[param.name])

    def eval_cast(self, expr: ir.CastExpr) -> Value:
        value = super().eval_cast(expr)
        if expr.type in ("float", "double") and value.level >= REMOTE:
            return replace(value, bounded=True)  # it does not overflow
        open_ended = value.numeric and not value.bounded and value.high is None
        if (
            expr.type in LIBRARY.narrow_types
            and value.level >= REMOTE
            and open_ended
            and PARSED.search(value.origin)
            and "rand" not in value.origin  # some of its bits are wanted
            and ">>" not in expr.node.text()
        ):
            if not self.silent:
                self.listener.on_remark("truncation", expr.node)
            value = replace(value, bounded=True)
        foreign = value.numeric and value.level >= REMOTE and not value.bounded and value.high is None
        if foreign and "*" in expr.type and value.memory is None and _NUMBER.search(value.origin):
            return replace(value, numeric=False, path=FORGED)
        if value.memory is not None and "*" in expr.type and value.memory.kind not in ("file", "unset"):
            unit = size_of(expr.type.replace("*", "", 1)) or 0
            if unit != value.memory.unit and "void" not in expr.type:
                return replace(value, memory=replace(value.memory, unit=unit))
        return value

    def eval_attr(self, expr: ir.AttrExpr) -> Value:
        if not self.silent and isinstance(expr.base, ir.NameExpr | ir.AttrExpr) and "->" in expr.node.text():
            self.listener.on_field_access(self.eval_silently(expr.base), expr)
        return super().eval_attr(expr)

    def widen(self, changed: frozenset[str]) -> None:
        super().widen(changed)
        for key in changed:
            value = self.env.get(key)
            if value is None or value.memory is None or value.memory.array or value.memory.capacity is None:
                continue
            self.env[key] = replace(value, memory=replace(value.memory, capacity=None, length=None))

    def run_if(self, stmt: ir.IfStmt) -> bool:
        test = stmt.test
        if (
            isinstance(test, ir.AssignExpr)
            and not test.op
            and isinstance(test.value, ir.ConstExpr)
            and not self.silent
        ):
            self.listener.on_remark("assigned-test", test.node)
        return super().run_if(stmt)

    def run_expr(self, stmt: ir.ExprStmt) -> bool:
        if isinstance(stmt.expr, ir.OpExpr) and stmt.expr.op == "==" and not self.silent:
            parent = stmt.expr.node.parent()
            if parent is not None and parent.kind() == "expression_statement":
                self.listener.on_remark("lost-comparison", stmt.expr.node)
        return super().run_expr(stmt)

    def narrow_validation(self, test: ir.CallExpr, truth: bool) -> None:
        """Overflow built-ins of the compiler: where they return false, the operands are in range."""
        if isinstance(test.func, ir.NameExpr) and _CHECKED.fullmatch(test.func.id):
            for arg in test.args[:2]:
                key = key_of(arg)
                known = self.lookup(key) if key is not None and not truth else None
                if key is not None and known is not None:
                    self.env[key] = replace(known, bounded=True, low=known.low or LIBRARY.limits["LLONG_MIN"])
            return
        super().narrow_validation(test, truth)

    # Effects

    def eval_assign(self, expr: ir.AssignExpr) -> Value:
        if expr.op in ("+", "-", "*") and not self.silent:
            parent = expr.node.parent()
            if parent is not None and parent.kind() == "expression_statement":
                args = [self.eval_silently(expr.target), self.eval_silently(expr.value)]
                if args[0].memory is None:
                    self.listener.on_arithmetic(expr.op, args, expr.node)
        if expr.node.kind() == "update_expression" and expr.node.text()[0] not in "+-":
            old = self.eval_silently(expr.target)
            super().eval_assign(expr)
            return old  # the value of `p++` is the old one
        return super().eval_assign(expr)

    def assign(self, target: ir.Expr, value: Value, node: ir.Syntax) -> None:
        if (
            isinstance(target, ir.IndexExpr)
            and isinstance(target.key, ir.ConstExpr)
            and target.key.value == 0
            and isinstance(target.base, ir.NameExpr | ir.AttrExpr)
        ):
            base = self.eval_silently(target.base)
            if base.target and self.lookup(base.target) is not None:
                self.eval(target.base)
                self.store(base.target, value)
                return
        super().assign(target, value, node)

    def store_item(self, holder: str, key: Any, value: Value) -> None:
        whole = self.lookup(holder) or PLAIN
        memory = whole.memory
        if memory is None:
            super().store_item(holder, key, value)
            return
        length = memory.length
        if value.const == 0 and isinstance(key, int):
            end = key * memory.unit
            length = end if length is None or end < length else length
        for name in {holder, *self.aliases_of(memory.block)}:
            known = self.lookup(name)
            if known is None or known.memory is None:
                continue
            level, origin = known.level, known.origin
            if value.level > level:
                level, origin = value.level, value.origin
            here = length if known.memory.start == memory.start else known.memory.length
            changed = replace(known.memory, length=here, fresh=False)
            if changed != known.memory or level != known.level:
                self.env[name] = replace(known, level=level, origin=origin, memory=changed)

    def apply_effects(self, expr: ir.CallExpr, path: str, receiver: Value | None, args: list[Value]) -> None:
        if path in ("swap", "std.swap", "std::swap") and len(expr.args) == 2:
            keys = [key_of(arg) for arg in expr.args]
            if all(isinstance(arg, ir.NameExpr) for arg in expr.args) and keys[0] and keys[1]:
                self.env[keys[0]], self.env[keys[1]] = args[1], args[0]
                return
        exprs = [self.pointed_expr(arg) for arg in expr.args]
        super().apply_effects(replace(expr, args=exprs), path, receiver, args)
        for place, arg in zip(exprs, args, strict=True):
            if arg.target and path not in _READERS:
                self.forget_variable(arg.target)
            if arg.memory is None or not arg.memory.block or not isinstance(place, ir.NameExpr):
                continue
            filled = self.lookup(place.id)
            if filled is None:
                continue
            for name in self.aliases_of(arg.memory.block):
                known = self.env[name]
                if name != place.id and known.level < filled.level:
                    self.env[name] = replace(
                        known, level=filled.level, origin=filled.origin, clean=filled.clean, const=UNKNOWN
                    )

    def forget_variable(self, key: str) -> None:
        """Forgets the value of a variable whose address was passed to a call."""
        known = self.env.get(key)
        if known is None or (known.memory is not None and known.memory.array):
            return
        if known.known or known.memory is not None or known.high is not None:
            self.env[key] = replace(known, const=UNKNOWN, memory=None, low=None, high=None)

    def store(self, key: str, value: Value) -> None:
        old = self.env.get(key)
        if old is not None and old.memory is not None and old.memory.block:
            block = old.memory.block
            here = value.memory is not None and value.memory.block == block
            if not here and self.aliases_of(block) == [key]:
                if f"#{block}" in self.env:
                    del self.env[f"#{block}"]  # the last pointer to a released block
                elif not self.silent and not self.inline_depth:
                    self.listener.on_block_lost(block)
        super().store(key, value)

    def pointed_expr(self, expr: ir.Expr) -> ir.Expr:
        if isinstance(expr, ir.OpExpr | ir.CastExpr):
            key = self.pointed_variable(expr)
            if key is not None:
                return ir.NameExpr(expr.node, key)
        return expr

    def eval_range(self, op: str, args: list[Value]) -> Value:
        value = super().eval_range(op, args)
        a, b = args
        if op == "/":
            value = replace(value, bounded=value.bounded or a.bounded)
        if op == "-" and a.level < REMOTE <= b.level:
            value = replace(value, level=a.level, origin=a.origin)  # the difference is not larger
        if op == "&" and value.level < REMOTE:  # a mask bounds the result from above only
            return replace(value, low=None)
        if op == "*" and all(arg.low is not None and arg.low >= 0 and arg.high is not None for arg in args):
            return replace(value, low=a.low * b.low, high=a.high * b.high, bounded=True)  # type: ignore[operator]
        if op == "-" and a.low is not None and b.high is not None and value.low is None:
            return replace(value, low=a.low - b.high)
        if op == "/" and isinstance(b.const, int) and b.const > 0 and a.high is not None:
            return replace(value, low=a.low, high=a.high // b.const, bounded=True)
        return value

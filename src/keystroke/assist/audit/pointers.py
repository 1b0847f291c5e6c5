"""C's and C++'s walk: pointers into buffers, addresses of variables, and aliases of one block.

Law: a pointer is its block with an offset, so that what is written through one name is seen through all. What
a pointer may do to memory is told to the listener; no size is judged here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from keystroke.assist.audit import ir
from keystroke.assist.audit.flow import Flow
from keystroke.assist.audit.folding import key_of
from keystroke.assist.audit.sizes import size_of
from keystroke.assist.audit.values import PLAIN, REMOTE, UNKNOWN, Value
from keystroke.assist.audit.walk import CallEvent

_READERS = frozenset({"free", "memcmp", "strcmp", "sizeof", "printf", "fprintf", "delete"})


class Pointers(Flow):
    def place(self, expr: ir.Expr) -> str | None:
        """The variable whose memory an expression points into."""
        while True:
            if isinstance(expr, ir.Cast):
                expr = expr.value
            elif isinstance(expr, ir.Op) and expr.op == "&" and len(expr.args) == 1:
                inner = expr.args[0]
                expr = inner.base if isinstance(inner, ir.Index) else inner
            elif isinstance(expr, ir.Op) and expr.op in ("+", "-") and len(expr.args) == 2:
                left, right = expr.args
                held = self.eval_quiet(left)
                expr = left if held.memory is not None or not isinstance(right, ir.Name) else right
            else:
                return key_of(expr)

    def aliases(self, block: int) -> list[str]:
        if not block:
            return []
        return [
            key for key, value in self.env.items() if value.memory is not None and value.memory.block == block
        ]

    # Expressions

    def name(self, expr: ir.Name) -> Value:
        if expr.id not in self.env and expr.id.isupper():  # a macro may be another name for a variable
            known = self.outside.get(expr.id)
            if known is not None and known.path in self.env:
                return super().name(ir.Name(expr.node, known.path))
        return super().name(expr)

    def op(self, expr: ir.Op) -> Value:
        if expr.op == "&" and len(expr.args) == 1:
            return self.address(expr.args[0])
        return super().op(expr)

    def address(self, inner: ir.Expr) -> Value:
        if isinstance(inner, ir.Index):
            base, at = self.eval(inner.base), self.eval(inner.key)
            if base.memory is not None:
                return self.offset([base, at])
            return replace(base, numeric=False)
        value = self.eval(inner)
        key = key_of(inner)
        if key is None or (value.memory is not None and value.memory.array):
            return replace(value, numeric=False)
        memory = value.memory if value.memory is not None and value.memory.kind != "unset" else None
        return replace(value, numeric=False, target=key, memory=memory)

    def offset(self, args: list[Value]) -> Value:
        pointer = next(arg for arg in args if arg.memory is not None)
        step = next((arg for arg in args if arg is not pointer), PLAIN)
        memory = pointer.memory
        if memory is None or step.const == 0:
            return pointer
        moved = step.const * memory.unit if isinstance(step.const, int) else None
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

    def index(self, expr: ir.Index) -> Value:
        if isinstance(expr.key, ir.Const) and expr.key.value == 0:
            base = self.eval_quiet(expr.base)
            held = self.held(base.target) if base.target else None
            if held is not None:
                self.eval(expr.base)
                return held
        return super().index(expr)

    def call(self, expr: ir.Call) -> Value:
        if isinstance(expr.func, ir.Name) and expr.func.id == "sizeof":  # its operand is never evaluated
            args = [self.eval_quiet(arg) for arg in expr.args]
            kwargs = {name: self.eval_quiet(arg) for name, arg in expr.kwargs.items()}
            function = self.functions[-1] if self.functions else None
            return self.hear.call(CallEvent(expr, "sizeof", None, args, kwargs, function)) or Value(
                numeric=True
            )
        return super().call(expr)

    def cast(self, expr: ir.Cast) -> Value:
        value = super().cast(expr)
        if expr.type in ("float", "double") and value.level >= REMOTE:
            return replace(value, bounded=True)  # it does not wrap around
        if value.memory is not None and "*" in expr.type and value.memory.kind not in ("file", "unset"):
            unit = size_of(expr.type.replace("*", "", 1)) or 0
            if unit != value.memory.unit and "void" not in expr.type:
                return replace(value, memory=replace(value.memory, unit=unit))
        return value

    def attr(self, expr: ir.Attr) -> Value:
        if not self.quiet and "->" in expr.node.text():
            self.hear.reached(self.eval_quiet(expr.base), expr)
        return super().attr(expr)

    def branch(self, stmt: ir.If) -> bool:
        test = stmt.test
        if isinstance(test, ir.Bind) and not test.op and isinstance(test.value, ir.Const) and not self.quiet:
            self.hear.remark("assigned-test", test.node)
        return super().branch(stmt)

    def do(self, stmt: ir.Do) -> bool:
        if isinstance(stmt.expr, ir.Op) and stmt.expr.op == "==" and not self.quiet:
            parent = stmt.expr.node.parent()
            if parent is not None and parent.kind() == "expression_statement":
                self.hear.remark("lost-comparison", stmt.expr.node)
        return super().do(stmt)

    def loop(self, stmt: ir.Loop) -> bool:
        """A loop that counts to one is no loop."""
        test = stmt.test
        if not isinstance(test, ir.Op) or test.op != "<" or not stmt.init:
            return super().loop(stmt)
        self.run(stmt.init)
        first, last = (self.eval_quiet(arg).const for arg in test.args)
        if isinstance(first, int) and isinstance(last, int) and last - first == 1:
            return self.run([ir.Switch(stmt.node, ir.Const(stmt.node, True), [([], stmt.body)]), *stmt.step])
        return super().loop(replace(stmt, init=[]))

    # Effects

    def assign(self, target: ir.Expr, value: Value, node: ir.Syntax) -> None:
        if isinstance(target, ir.Index) and isinstance(target.key, ir.Const) and target.key.value == 0:
            base = self.eval_quiet(target.base)
            if base.target and self.held(base.target) is not None:
                self.eval(target.base)
                self.store(base.target, value)
                return
        super().assign(target, value, node)

    def put(self, holder: str, key: Any, value: Value) -> None:
        whole = self.held(holder) or PLAIN
        memory = whole.memory
        if memory is None:
            super().put(holder, key, value)
            return
        length = memory.length
        if value.const == 0 and isinstance(key, int):
            end = key * memory.unit
            length = end if length is None or end < length else length
        for name in {holder, *self.aliases(memory.block)}:
            known = self.held(name)
            if known is None or known.memory is None:
                continue
            level, origin = known.level, known.origin
            if value.level > level:
                level, origin = value.level, value.origin
            here = length if known.memory.start == memory.start else known.memory.length
            changed = replace(known.memory, length=here, fresh=False)
            if changed != known.memory or level != known.level:
                self.env[name] = replace(known, level=level, origin=origin, memory=changed)

    def effects(self, expr: ir.Call, path: str, receiver: Value | None, args: list[Value]) -> None:
        exprs = [self.pointed(arg) for arg in expr.args]
        super().effects(replace(expr, args=exprs), path, receiver, args)
        for place, arg in zip(exprs, args, strict=True):
            if arg.target and path not in _READERS:
                self.given(arg.target)
            if arg.memory is None or not arg.memory.block or not isinstance(place, ir.Name):
                continue
            filled = self.held(place.id)
            if filled is None:
                continue
            for name in self.aliases(arg.memory.block):
                known = self.env[name]
                if name != place.id and known.level < filled.level:
                    self.env[name] = replace(
                        known, level=filled.level, origin=filled.origin, clean=filled.clean, const=UNKNOWN
                    )

    def given(self, key: str) -> None:
        """A call was given the address of a variable: it may hold anything now."""
        known = self.env.get(key)
        if known is None or (known.memory is not None and known.memory.array):
            return
        if known.known or known.memory is not None or known.high is not None:
            self.env[key] = replace(known, const=UNKNOWN, memory=None, low=None, high=None)

    def store(self, key: str, value: Value) -> None:
        old = self.env.get(key)
        if old is not None and old.memory is not None and old.memory.block:
            freed = f"#{old.memory.block}"
            if freed in self.env and self.aliases(old.memory.block) == [key]:
                del self.env[freed]  # the last name of a freed block is gone
        super().store(key, value)

    def pointed(self, expr: ir.Expr) -> ir.Expr:
        if isinstance(expr, ir.Op | ir.Cast):
            key = self.place(expr)
            if key is not None:
                return ir.Name(expr.node, key)
        return expr

    def ranged(self, op: str, args: list[Value]) -> Value:
        value = super().ranged(op, args)
        a, b = args
        if op == "&" and value.level < REMOTE:  # a mask says what fits, not what comes
            return replace(value, low=None)
        if op == "*" and all(arg.low is not None and arg.low >= 0 and arg.high is not None for arg in args):
            return replace(value, low=a.low * b.low, high=a.high * b.high, bounded=True)  # type: ignore[operator]
        if op == "-" and a.low is not None and b.high is not None and value.low is None:
            return replace(value, low=a.low - b.high)
        if op == "/" and isinstance(b.const, int) and b.const > 0 and a.high is not None:
            return replace(value, low=a.low, high=a.high // b.const, bounded=True)
        return value

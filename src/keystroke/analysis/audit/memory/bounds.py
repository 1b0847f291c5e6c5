"""C: bounds of numbers and lengths from comparisons, and null checks of pointers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from keystroke.analysis.audit.flow.base import FlowBase
from keystroke.analysis.audit.flow.folding import key_of
from keystroke.analysis.audit.flow.values import UNKNOWN, Memory, Value
from keystroke.analysis.audit.memory.library import LIBRARY
from keystroke.analysis.audit.rules.match import RuleMatcher
from keystroke.analysis.audit.source import ir


class BoundsMatcher(RuleMatcher):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Blocks whose pointer may be null and is followed, here or in a called function.
        self.reported_blocks: set[int] = set()

    def report_before_start(self, node: ir.Syntax, writes: bool) -> None:
        self.report(
            "overflow" if writes else "over-read", node, "the pointer points before the start of its buffer"
        )

    def on_remark(self, detector: str, node: ir.Syntax) -> None:
        self.report(detector, node)

    def on_field_access(self, base: Value, expr: ir.AttrExpr) -> None:
        self.check_dereference(base, expr.node, expr.base)

    def check_dereference(self, value: Value, node: ir.Syntax, expr: ir.Expr) -> None:
        memory = value.memory
        if value.known and value.const is None and memory is None and isinstance(expr, ir.NameExpr):
            if expr.id not in self.flow.env:
                return  # a global may change
            if self.call_site is None:
                self.report("null-dereference", node, "a pointer that is null here is dereferenced")
            return
        if memory is None or not memory.nullable:
            return
        key = key_of(expr)
        if key is None or memory.block in self.reported_blocks:
            return
        if memory.block:  # told once for each pointer
            self.reported_blocks.add(memory.block)
        self.report("null-dereference", node)
        for name in {key, *self.flow.aliases_of(memory.block)}:
            self.assume_presence(name, present=True)

    # Tests

    def on_narrow(self, flow: FlowBase, test: ir.OpExpr, truth: bool) -> None:
        left, right = test.args
        op = test.op
        for side, other, turned in ((left, right, op), (right, left, _FLIP.get(op, op))):
            effective = turned if truth else _NEGATED.get(turned)
            if effective is None:
                continue
            bound = flow.eval_silently(other)
            if isinstance(side, ir.CallExpr) and isinstance(side.func, ir.NameExpr | ir.AttrExpr):
                name = ir.last_name(side.func)
                if name in LIBRARY.lengths and effective in ("<", "<=", "=="):
                    inner = (
                        side.args[0]
                        if side.args
                        else (side.func.base if isinstance(side.func, ir.AttrExpr) else None)
                    )
                    if inner is not None:
                        self.set_known_length(flow, inner, bound.const, effective)
                    continue
                if effective in ("<", "<="):  # such as abs(x) < bound
                    for arg in side.args:
                        self.narrow_number(flow, arg, effective, bound)
                continue
            if isinstance(side, ir.OpExpr) and effective in ("<", "<=") and side.op in ("+", "-"):
                step = flow.eval_silently(side.args[-1]).const
                if isinstance(step, int) and isinstance(bound.const, int) and len(side.args) == 2:
                    limit = bound.const - step if side.op == "+" else bound.const + step
                    self.narrow_number(flow, side.args[0], effective, Value(limit, numeric=True))
                    continue
            if isinstance(side, ir.OpExpr) and effective in ("<", "<=", ">", ">="):
                for arg in side.args:
                    self.narrow_number(flow, arg, "<", Value(numeric=True))
                continue
            if isinstance(side, ir.AssignExpr):
                side = side.target
            key = key_of(side)
            if key is None:
                continue
            if bound.known and (bound.const is None or bound.const == 0) and effective in ("==", "!="):
                self.assume_presence(key, present=effective == "!=")
                if effective == "!=":
                    self.mark_safe(flow, key, "zero")
            self.narrow_number(flow, side, effective, bound)

    def set_known_length(self, flow: FlowBase, expr: ir.Expr, bound: Any, op: str) -> None:
        key = key_of(expr)
        known = flow.lookup(key) if key is not None else None
        if key is None:
            return
        if known is None:
            known = flow.eval_silently(expr)
        memory = known.memory or Memory()
        if isinstance(bound, int):
            memory = replace(memory, length=bound - 1 if op == "<" else bound)
        flow.env[key] = replace(
            known.as_safe_for(frozenset({"length"})),
            memory=memory if known.memory or isinstance(bound, int) else None,
        )

    def narrow_number(self, flow: FlowBase, expr: ir.Expr, op: str, limit: Value) -> None:
        key = key_of(expr)
        if key is None:
            return
        known = flow.lookup(key)
        if known is None:
            known = flow.eval_silently(expr)
        if known.memory is not None:
            if known.memory.kind != "unset":
                return
            known = replace(known, memory=None)
        number = limit.const if isinstance(limit.const, int) and not isinstance(limit.const, bool) else None
        if op in ("<", "<="):
            top = number if number is not None else limit.high
            high = top - (op == "<") if top is not None else None
            if high is not None and known.high is not None:
                high = min(high, known.high)
            known = replace(
                known, high=high if high is not None else known.high, bounded=known.bounded or high is None
            )
        elif op in (">", ">="):
            low = (
                number + (op == ">")
                if number is not None
                else (limit.low if limit.low is not None else 0 if limit.level == 0 else None)
            )
            known = replace(known, low=low if low is not None else known.low)
            if known.low is not None and known.low > 0:
                known = known.as_safe_for(frozenset({"zero"}))
        elif op == "==":
            known = replace(known, low=number, high=number, bounded=True)
        flow.env[key] = known

    def mark_safe(self, flow: FlowBase, key: str, use: str) -> None:
        known = flow.lookup(key)
        if known is not None:
            flow.env[key] = known.as_safe_for(frozenset({use}))

    def assume_presence(self, key: str, present: bool) -> None:
        known = self.flow.lookup(key)
        if not present:
            if known is not None and known.memory is not None and known.memory.block:
                self.flow.env.pop(f"#l{known.memory.block}", None)
                self.flow.env[key] = replace(known, memory=None, const=None)
            elif known is not None and known.memory is None and not known.numeric and not known.known:
                self.flow.env[key] = replace(known, const=None)
            return
        if known is not None and known.known and known.const is None:
            self.flow.env[key] = replace(known, const=UNKNOWN)
        elif known is not None and known.memory is not None and known.memory.nullable:
            self.flow.env[key] = replace(known, memory=replace(known.memory, nullable=False))


_FLIP = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
_NEGATED = {"<": ">=", ">": "<=", "<=": ">", ">=": "<", "==": "!=", "!=": "=="}

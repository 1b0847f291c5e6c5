"""Go: foreign numbers that are narrowed, used as divisors or used as allocation sizes without a check.

Any comparison of a number counts as a check of its range.
"""

from __future__ import annotations

import re
from dataclasses import replace

from keystroke.analysis.audit.detectors import Detectors
from keystroke.analysis.audit.flow.base import CallEvent, FlowBase
from keystroke.analysis.audit.flow.folding import key_of
from keystroke.analysis.audit.flow.values import REMOTE, Value
from keystroke.analysis.audit.source import ir

_BITS = {"int8": 8, "int16": 16, "int32": 32, "uint8": 8, "uint16": 16, "uint32": 32, "byte": 8, "rune": 32}
_PARSED = re.compile(r"strconv\.(?:Atoi|ParseInt|ParseUint)(\d*)\(\)")
_RANGE = frozenset({"range"})


class GoDetectors(Detectors):
    def on_call(self, event: CallEvent) -> Value | None:
        replaced = super().on_call(event)
        path, args = event.path, event.args
        if path in ("strconv.ParseInt", "strconv.ParseUint") and len(args) > 2:
            bits = args[2].const
            size = bits if isinstance(bits, int) and bits else 64
            return Value(
                level=args[0].level,
                numeric=True,
                path=f"{path}{size}()",
                origin=args[0].origin,
                roots=args[0].roots,
            )
        if path in _BITS and args:
            self.check_conversion(event, _BITS[path])
        elif path == "make" and len(args) > 1 and self.is_unchecked(args[-1]):
            self.report("foreign-allocation", event.call.node, origin=args[-1].origin)
        return replaced

    def check_conversion(self, event: CallEvent, bits: int) -> None:
        found = _PARSED.fullmatch(event.args[0].path)
        if found is None or "range" in event.args[0].clean:
            return
        if int(found[1] or 64) > bits:
            self.report("narrowed-number", event.call.node, origin=event.args[0].origin)

    def is_unchecked(self, value: Value) -> bool:
        return value.numeric and value.level >= REMOTE and "range" not in value.clean and not value.bounded

    def on_arithmetic(self, op: str, args: list[Value], node: ir.Syntax) -> None:
        super().on_arithmetic(op, args, node)
        if op in ("/", "%") and self.is_unchecked(args[1]):
            self.report("foreign-divisor", node, origin=args[1].origin)

    def on_narrow(self, flow: FlowBase, test: ir.OpExpr, truth: bool) -> None:
        super().on_narrow(flow, test, truth)
        if test.op not in ("<", ">", "<=", ">=", "==", "!="):
            return
        for side in test.args:
            inner = side.args[0] if isinstance(side, ir.CallExpr) and side.args else side
            key = key_of(inner)
            known = flow.lookup(key) if key is not None else None
            if key is not None and known is not None and known.numeric and "range" not in known.clean:
                flow.env[key] = replace(known, clean=known.clean | _RANGE)

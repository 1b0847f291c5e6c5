"""C's and C++'s memory: capacities, string lengths, allocations and the bounds that tests give to numbers.

Law: hears the same walk as the rules do and says only what the numbers show: a copy that cannot fit, an index
past the end, a block used after it was freed. Unknown sizes stay silent unless data comes from outside.
"""

from __future__ import annotations

import re
from dataclasses import replace

from keystroke.assist.audit import ir
from keystroke.assist.audit.copies import COUNTED, SCANS, STRING, Copies, named
from keystroke.assist.audit.folding import key_of
from keystroke.assist.audit.values import (
    LOCAL,
    NONE,
    PARAMETER,
    REMOTE,
    UNKNOWN,
    Memory,
    Value,
    constant,
)
from keystroke.assist.audit.walk import CallEvent

_SIZES = {
    "char": 1,
    "wchar_t": 4,
    "short": 2,
    "int": 4,
    "long": 8,
    "float": 4,
    "double": 8,
    "size_t": 8,
    "bool": 1,
    "void": 1,
}
_FIXED = re.compile(r"u?int(\d+)_t")
_ALLOC = {
    "malloc": 0,
    "calloc": 1,
    "realloc": 1,
    "alloca": 0,
    "ALLOCA": 0,
    "valloc": 0,
    "xmalloc": 0,
    "new[]": 0,
    "kmalloc": 0,
}
_FREE = {"free": "malloc", "delete": "new", "delete[]": "new[]", "kfree": "malloc"}


def size_of(kind: str) -> int | None:
    text = kind.replace("const", "").replace("signed", "").replace("un", "").strip() or "int"
    if "*" in text:
        return 8
    fixed = _FIXED.search(text)
    if fixed:
        return int(fixed[1]) // 8
    if text.startswith("long"):
        return 8
    return _SIZES.get(text.split()[-1])


class MemoryMatcher(Copies):
    blocks = 0  # allocations seen so far; each gets its number

    # Declarations

    def let(self, stmt: ir.Let, value: Value) -> Value:
        unit = size_of(stmt.type) or 1
        if stmt.size is not None and self.flow is not None:
            count = self.flow.eval_quiet(stmt.size).const
            capacity: int | None = count * unit if isinstance(count, int) else None
            length: int | None = None
            if isinstance(value.const, str):
                length = len(value.const) * unit
                capacity = capacity if capacity is not None else length + unit
            elif value.items is not None and capacity is None and not isinstance(stmt.size, ir.Const):
                capacity = len(value.items) * unit or None
            if unit == 1 and size_of(stmt.type) is None:
                capacity = None if stmt.type not in ("char",) and size_of(stmt.type) is None else capacity
            memory = Memory(capacity, unit, length, array=True, kind="static" if stmt.static else "stack")
            return replace(value, memory=memory, const=UNKNOWN, items=None, numeric=False, level=value.level)
        if value.memory is not None:
            if stmt.pointer:
                return replace(
                    value, memory=replace(value.memory, unit=unit, array=value.memory.array), numeric=False
                )
            return value
        if stmt.pointer and isinstance(value.const, str):
            size = len(value.const)
            return replace(value, memory=Memory(size * unit + unit, unit, size * unit))
        if value.numeric and (
            "unsigned" in stmt.type or "size_t" in stmt.type or stmt.type.startswith("uint")
        ):
            return replace(value, low=max(value.low or 0, 0))
        return value

    # Calls

    def call(self, event: CallEvent) -> Value | None:
        super().call(event)
        name = event.path.rsplit(".", 1)[-1]
        args = event.args
        if name == "sizeof":
            return self.sizeof(event)
        if name in _ALLOC or name in ("strdup", "wcsdup", "strndup", "new"):
            return self.allocate(event, name)
        if name in _FREE and args:
            self.release(event, name)
        elif name in COUNTED:
            self.counted(event, name)
        elif name in STRING and len(args) > 1:
            self.copied(event, name)
        elif name in ("sprintf", "vsprintf", "swprintf", "wsprintf") and len(args) > 1 and name != "swprintf":
            self.printed(event)
        elif name in ("strncat", "wcsncat") and len(args) > 2:
            self.appended(event)
        elif name in SCANS:
            self.scanned(event, name)
        if name in ("strlen", "wcslen") and args:
            memory = args[0].memory
            high = memory.length // memory.unit if memory is not None and memory.length is not None else None
            return Value(
                level=args[0].level,
                numeric=True,
                path=f"{event.path}()",
                origin=args[0].origin,
                roots=args[0].roots,
                low=0,
                high=high,
            )
        return None

    def sizeof(self, event: CallEvent) -> Value:
        if not event.args:
            return Value(numeric=True)
        arg = event.args[0]
        if "type" in event.kwargs:
            size = size_of(str(arg.const))
            return constant(size) if size is not None else Value(numeric=True)
        if arg.memory is not None and arg.memory.array:
            return constant(arg.memory.capacity) if arg.memory.capacity is not None else Value(numeric=True)
        if arg.memory is not None:
            return constant(8)
        return Value(numeric=True)

    def allocate(self, event: CallEvent, name: str) -> Value:
        self.blocks += 1
        block = self.blocks
        capacity: int | None = None
        fits = ""
        at = _ALLOC.get(name)
        if at is not None and at < len(event.args):
            size, expr = event.args[at], event.call.args[at]
            if isinstance(size.const, int):
                capacity = size.const
            if name == "calloc" and isinstance(event.args[0].const, int) and capacity is not None:
                capacity *= event.args[0].const
            if name == "new[]":
                unit = size_of(str(event.args[1].const)) if len(event.args) > 1 else 1
                capacity = capacity * unit if capacity is not None and unit else None
            fits = self.sized(event, name, expr, size)
        elif name in ("strdup", "strndup", "wcsdup") and event.args:
            memory = event.args[0].memory
            capacity = memory.length + 1 if memory is not None and memory.length is not None else None
        kind = (
            "new"
            if name == "new"
            else "new[]"
            if name == "new[]"
            else "stack"
            if name.lower() == "alloca"
            else "malloc"
        )
        nullable = kind == "malloc" and name != "xmalloc"
        memory = Memory(capacity, 1, None, 0 if kind == "stack" else block, nullable, fits, False, kind)
        level = (
            max((arg.level for arg in event.args), default=0) if name.startswith(("strdup", "strndup")) else 0
        )
        return Value(level=level, path=f"{event.path}()", memory=memory, roots=NONE)

    def sized(self, event: CallEvent, name: str, expr: ir.Expr, size: Value) -> str:
        """Checks the size asked for; answers the variable whose string it was made for."""
        bare = expr
        if (
            isinstance(bare, ir.Op)
            and bare.op == "*"
            and any(isinstance(arg, ir.Call) and named(arg, "sizeof") for arg in bare.args)
        ):
            bare = next(arg for arg in bare.args if not (isinstance(arg, ir.Call) and named(arg, "sizeof")))
        if isinstance(bare, ir.Call) and named(bare, "strlen", "wcslen"):
            self.detected("strlen-allocation", event.call.node, subject=event.call, args=event.args)
        if (isinstance(expr, ir.Op) and expr.op in ("*", "+", "<<")) or name == "new[]":
            foreign = size.level >= REMOTE or (
                size.level >= PARAMETER and isinstance(expr, ir.Op) and expr.op in ("*", "<<")
            )
            lengths = "strlen" in str(event.call.node.text())
            if foreign and size.numeric and not size.bounded and size.high is None and not lengths:
                self.detected("allocation-overflow", event.call.node, origin=size.origin, subject=event.call)
        if isinstance(expr, ir.Op) and expr.op == "+":
            for arg in expr.args:
                if isinstance(arg, ir.Call) and named(arg, "strlen", "wcslen") and arg.args:
                    return key_of(arg.args[0]) or ""
        return ""

    def release(self, event: CallEvent, name: str) -> None:
        expr = event.call.args[0]
        key = key_of(expr)
        value = event.args[0]
        if key is None or self.flow is None or isinstance(expr, ir.Op):
            return
        start = expr.node.range().start.index
        uaf = self.rules.detectors.get("use-after-free")
        if value.memory is not None and self.freed(value.memory.block):
            if uaf is not None:
                self.matches.pop((uaf[0].id, start), None)
            self.detected("double-free", event.call.node, subject=event.call)
            return
        memory = value.memory
        if memory is not None and memory.array and memory.kind in ("stack", "static"):
            self.detected("invalid-free", event.call.node, subject=event.call)
            return
        if (
            memory is not None
            and memory.kind in ("malloc", "new", "new[]")
            and memory.block
            and memory.kind != _FREE[name]
        ):
            self.detected("mismatched-free", event.call.node, subject=event.call)
        if memory is None or not memory.block:
            if memory is not None and memory.capacity is not None:
                return
            self.blocks += 1
            memory = Memory(block=self.blocks)
            self.flow.env[key] = replace(value, memory=memory)
        self.flow.env[f"#{memory.block}"] = Value(level=LOCAL)

    def freed(self, block: int) -> bool:
        if not block or self.flow is None:
            return False
        state = self.flow.held(f"#{block}")
        return state is not None and state.level > 0

    def used(self, name: str, value: Value, node: ir.Syntax) -> None:
        if value.memory is not None and self.freed(value.memory.block):
            parent = node.parent()
            kind = parent.kind() if parent is not None else ""
            if (
                kind == "assignment_expression"
                and parent.field("left").range().start.index == node.range().start.index
                and parent.field("left").kind() == "identifier"
            ):
                return
            if kind == "binary_expression" and parent.field("operator").text() in ("==", "!="):
                return
            self.detected("use-after-free", node)

    # Places

    def index(self, base: Value, key: Value, node: ir.Syntax, expr: ir.Index) -> None:
        self.dereferenced(base, node, expr.base)
        memory = base.memory
        if memory is None or memory.capacity is None or not memory.unit:
            return
        count = memory.capacity // memory.unit
        parent = node.parent()
        if parent is not None and (
            parent.kind() == "sizeof_expression"
            or (parent.kind() == "pointer_expression" and parent.text().startswith("&"))
        ):
            return
        writes = (
            parent is not None
            and parent.kind() == "assignment_expression"
            and parent.field("left").range().start.index == node.range().start.index
        )
        place = key.const if isinstance(key.const, int) else key.high
        if isinstance(place, int) and place >= count:
            if key.known or key.low is not None or key.level >= REMOTE:
                self.detected(
                    "overflow" if writes else "over-read",
                    node,
                    f"index {place} is past the end of a buffer of {count} elements",
                )
            return
        lowest = key.const if isinstance(key.const, int) else key.low
        if isinstance(lowest, int) and lowest < 0 and (key.known or key.level >= REMOTE):
            self.detected(
                "overflow" if writes else "over-read",
                node,
                f"index {lowest} is before the start of the buffer",
            )
            return
        if key.level >= REMOTE and key.numeric:
            if place is None and not key.bounded:
                self.detected("unchecked-index", node, origin=key.origin)
            elif key.low is None:
                self.detected(
                    "unchecked-index",
                    node,
                    "the index is checked from above only; a negative one reaches memory before the buffer",
                    key.origin,
                )

    def arithmetic(self, op: str, args: list[Value], node: ir.Syntax) -> None:
        left, right = args
        if op == ">>" and left.path.endswith("cin") and right.memory is not None and right.memory.array:
            self.detected("unbounded-scan", node)
            return
        if op in ("/", "%"):
            if right.const == 0 and isinstance(right.const, int) and not isinstance(right.const, bool):
                self.detected("zero-division", node)
            elif (
                right.level >= REMOTE
                and right.numeric
                and "zero" not in right.clean
                and not (right.low is not None and right.low > 0)
            ):
                self.detected("zero-division", node, origin=right.origin)
            return
        if op not in ("+", "-", "*"):
            return
        for arg, other in ((left, right), (right, left)):
            if arg.level < REMOTE or not arg.numeric or arg.memory is not None:
                continue
            if (op == "-" and (arg is not left or arg.low is not None)) or (
                op != "-" and (arg.bounded or arg.high is not None)
            ):
                continue
            if op == "-" and not other.known:
                continue
            if not _number_source(arg.origin):
                continue
            self.detected("integer-overflow", node, origin=arg.origin)
            return

    def returned(self, value: Value, node: ir.Syntax, function: ir.Function | None) -> None:
        super().returned(value, node, function)
        if (
            value.memory is not None
            and value.memory.array
            and value.memory.kind == "stack"
            and node.kind() == "identifier"
            and function is not None
            and "string" not in function.returns
        ):
            self.detected("stack-return", node)


def _number_source(origin: str) -> bool:
    return any(
        name in origin
        for name in (
            "scanf",
            "atoi",
            "atol",
            "strto",
            "rand",
            "recv",
            "fgets",
            "read",
            "RAND",
            "argv",
            "getenv",
            "sto",
        )
    )

"""C's and C++'s memory: capacities, string lengths, allocations and the bounds that tests give to numbers.

Law: hears the same walk as the rules do and says only what the numbers show: a copy that cannot fit, an index
past the end, a block used after it was freed. Unknown sizes stay silent unless data comes from outside.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from keystroke.assist.audit import ir
from keystroke.assist.audit.flow import CallEvent, Flow, key_of
from keystroke.assist.audit.match import Matcher
from keystroke.assist.audit.values import (
    LOCAL,
    NONE,
    PARAMETER,
    PLAIN,
    REMOTE,
    UNKNOWN,
    Memory,
    Value,
    constant,
)

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
# function: (destination, source, index of the byte or element count)
_COUNTED = {
    "memcpy": (0, 1, 2),
    "memmove": (0, 1, 2),
    "memset": (0, -1, 2),
    "strncpy": (0, 1, 2),
    "bcopy": (1, 0, 2),
    "wmemcpy": (0, 1, 2),
    "wmemset": (0, -1, 2),
    "wmemmove": (0, 1, 2),
    "wcsncpy": (0, 1, 2),
    "fgets": (0, -1, 1),
    "fgetws": (0, -1, 1),
    "read": (1, -1, 2),
    "recv": (1, -1, 2),
    "recvfrom": (1, -1, 2),
    "snprintf": (0, -1, 1),
    "vsnprintf": (0, -1, 1),
    "strlcpy": (0, -1, 2),
    "CopyMemory": (0, 1, 2),
}
_STRING = {
    "strcpy": 0,
    "wcscpy": 0,
    "stpcpy": 0,
    "lstrcpy": 0,
    "strcat": 1,
    "wcscat": 1,
    "lstrcat": 1,
    "_mbscpy": 0,
    "_tcscpy": 0,
}
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
_LENGTHS = ("strlen", "wcslen", "strnlen", "size", "length", "sizeof")
_SCANS = {
    "scanf": 0,
    "fscanf": 1,
    "sscanf": 1,
    "vscanf": 0,
    "wscanf": 0,
    "fwscanf": 1,
    "swscanf": 1,
    "__isoc99_scanf": 0,
}
_WIDTH = re.compile(r"%(\*?)(\d*)(?:l|h|hh|ll)?(m?)([a-zA-Z\[%])")


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


class MemoryMatcher(Matcher):
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
        elif name in _COUNTED:
            self.counted(event, name)
        elif name in _STRING and len(args) > 1:
            self.copied(event, name)
        elif name in ("sprintf", "vsprintf", "swprintf", "wsprintf") and len(args) > 1 and name != "swprintf":
            self.printed(event)
        elif name in ("strncat", "wcsncat") and len(args) > 2:
            self.appended(event)
        elif name in _SCANS:
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
            and any(isinstance(arg, ir.Call) and _named(arg, "sizeof") for arg in bare.args)
        ):
            bare = next(arg for arg in bare.args if not (isinstance(arg, ir.Call) and _named(arg, "sizeof")))
        if isinstance(bare, ir.Call) and _named(bare, "strlen", "wcslen"):
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
                if isinstance(arg, ir.Call) and _named(arg, "strlen", "wcslen") and arg.args:
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

    # Copies

    def counted(self, event: CallEvent, name: str) -> None:
        to, source, at = _COUNTED[name]
        args, exprs = event.args, event.call.args
        if max(to, at) >= len(args):
            return
        target, count = args[to], args[at]
        unit = 4 if name.startswith(("w", "fgetws")) else 1
        memory = target.memory
        self.dereferenced(target, event.call.node, exprs[to])
        whole = exprs[at]
        if (
            isinstance(whole, ir.Call)
            and _named(whole, "sizeof")
            and whole.args
            and isinstance(exprs[to], ir.Attr)
        ):
            owner = key_of(exprs[to].base)  # type: ignore[attr-defined]
            if owner is not None and key_of(whole.args[0]) == owner:
                self.detected(
                    "overflow",
                    event.call.node,
                    "the size of the whole structure is copied into one of its fields",
                    subject=event.call,
                )
                return
        if (
            count.level >= REMOTE
            and count.numeric
            and count.high is not None
            and count.low is None
            and name in ("memcpy", "memmove", "strncpy", "memset", "wcsncpy")
        ):
            self.detected("signed-length", event.call.node, origin=count.origin, subject=event.call)
            return
        if memory is not None and memory.capacity is not None:
            size = count.const if isinstance(count.const, int) else count.high
            if isinstance(size, int):
                if size * unit > memory.capacity:
                    self.detected(
                        "overflow",
                        event.call.node,
                        f"{size * unit} bytes are written into a buffer of {memory.capacity}",
                        subject=event.call,
                        args=args,
                    )
                    return
            elif (
                not count.bounded
                and "length" not in count.clean
                and count.level >= PARAMETER
                and not self.limited(whole, memory)
            ):
                own = isinstance(whole, ir.Call) and _named(whole, "sizeof")
                if not own and (count.level >= REMOTE or "strlen" in whole.node.text() or memory.array):
                    self.detected(
                        "unchecked-length",
                        event.call.node,
                        origin=count.origin,
                        subject=event.call,
                        args=args,
                    )
                    return
        elif (
            count.level >= REMOTE
            and count.numeric
            and not count.bounded
            and count.high is None
            and name in ("memcpy", "memmove", "read", "recv")
            and memory is None
        ):
            self.detected(
                "unchecked-length", event.call.node, origin=count.origin, subject=event.call, args=args
            )
        if 0 <= source < len(args) and name in ("memcpy", "memmove", "wmemcpy", "wmemmove"):
            origin = args[source].memory
            if (
                origin is not None
                and origin.capacity is not None
                and isinstance(count.const, int)
                and count.const * unit > origin.capacity
            ):
                self.detected(
                    "over-read",
                    event.call.node,
                    f"{count.const * unit} bytes are read from a buffer of {origin.capacity}",
                    subject=event.call,
                )
        self.set_length(exprs[to], self.filled(name, args, count, unit))

    def limited(self, expr: ir.Expr, memory: Memory) -> bool:
        text = str(expr.node.text())
        return "sizeof" in text or "min" in text.lower() or (bool(memory.fits) and memory.fits in text)

    def filled(self, name: str, args: list[Value], count: Value, unit: int) -> int | None:
        size = count.const if isinstance(count.const, int) else None
        if name in ("memset", "wmemset"):
            return (
                size * unit
                if size is not None and len(args) > 1 and args[1].const not in (0, UNKNOWN)
                else (0 if size else None)
            )
        if name in ("fgets", "snprintf", "vsnprintf", "strlcpy", "fgetws") and size:
            return (size - 1) * unit
        if name in ("memcpy", "strncpy", "memmove") and len(args) > 1:
            memory = args[1].memory
            if isinstance(args[1].const, str):
                return len(args[1].const)
            return memory.length if memory is not None else None
        return None

    def set_length(self, expr: ir.Expr, length: int | None) -> None:
        key = key_of(expr)
        if key is None or self.flow is None:
            return
        known = self.flow.held(key)
        if known is not None and known.memory is not None:
            self.flow.env[key] = replace(known, memory=replace(known.memory, length=length))

    def length_of(self, value: Value) -> int | None:
        if isinstance(value.const, str):
            return len(value.const)
        if value.memory is not None and value.memory.length is not None:
            return value.memory.length
        return None

    def copied(self, event: CallEvent, name: str) -> None:
        target, source = event.args[0], event.args[1]
        exprs = event.call.args
        unit = 4 if name.startswith("w") else 1
        self.dereferenced(target, event.call.node, exprs[0])
        length = self.length_of(source)
        if isinstance(source.const, str) and unit == 4:
            length = len(source.const) * 4
        memory = target.memory
        start = (memory.length or 0) if memory is not None and _STRING[name] else 0
        capacity = memory.capacity if memory is not None else None
        total = start + length if length is not None else None
        self.set_length(exprs[0], total)
        if length is not None:
            if capacity is not None and start + length + unit > capacity:
                self.detected(
                    "overflow",
                    event.call.node,
                    f"{start + length + unit} bytes are copied into a buffer of {capacity}",
                    subject=event.call,
                    args=event.args,
                )
            return
        if (
            "length" in source.clean
            or "*" in source.clean
            or (memory is not None and memory.fits and memory.fits in (key_of(exprs[1]), ""))
        ):
            return
        if memory is not None and memory.fits and memory.fits == key_of(exprs[1]):
            return
        if (
            capacity is not None
            and source.memory is not None
            and source.memory.capacity is not None
            and source.memory.capacity <= capacity
            and not _STRING[name]
        ):
            return
        if source.level == 0 and source.memory is None:
            return
        if (
            memory is not None
            and memory.kind == "malloc"
            and capacity is None
            and not memory.fits
            and source.level < REMOTE
        ):
            return
        self.detected(
            "unbounded-copy", event.call.node, origin=source.origin, subject=event.call, args=event.args
        )

    def appended(self, event: CallEvent) -> None:
        memory, count = event.args[0].memory, event.args[2]
        if memory is None or memory.capacity is None:
            return
        size = count.const
        used = memory.length or 0
        if isinstance(size, int) and size + used + 1 > memory.capacity and size >= memory.capacity:
            self.detected(
                "overflow",
                event.call.node,
                "the bound of strncat is what may be appended, not the size of the buffer",
                subject=event.call,
                args=event.args,
            )
        self.set_length(event.call.args[0], used + size if isinstance(size, int) else None)

    def printed(self, event: CallEvent) -> None:
        memory = event.args[0].memory
        template = event.args[1].text
        rest = event.args[2:]
        exprs = event.call.args
        if template is None or not isinstance(event.args[1].const, str):
            if event.args[1].level >= PARAMETER or event.path.endswith("vsprintf"):
                self.detected(
                    "unbounded-print",
                    event.call.node,
                    origin=event.args[1].origin,
                    subject=event.call,
                    args=event.args,
                )
            return
        total = len(template)
        used = 0
        unknown = False
        foreign = ""
        for found in _WIDTH.finditer(re.sub(r"%\.(\d+|\*)s", "", template)):
            if found[4] == "%":
                continue
            arg = rest[used] if used < len(rest) else PLAIN
            used += 1
            if found[4] in "sS[":
                length = self.length_of(arg)
                if length is not None:
                    total += length
                elif arg.memory is not None and arg.memory.capacity is not None:
                    total += arg.memory.capacity - 1
                elif "length" not in arg.clean and (arg.level or arg.memory is not None):
                    unknown = True
                    foreign = foreign or arg.origin
        capacity = memory.capacity if memory is not None else None
        self.set_length(exprs[0], None if unknown else total)
        if unknown and (capacity is not None or memory is None):
            self.detected(
                "unbounded-print", event.call.node, origin=foreign, subject=event.call, args=event.args
            )
        elif capacity is not None and total - 2 * used + 1 > capacity:
            self.detected(
                "overflow",
                event.call.node,
                f"up to {total - 2 * used + 1} bytes are printed into a buffer of {capacity}",
                subject=event.call,
                args=event.args,
            )

    def scanned(self, event: CallEvent, name: str) -> None:
        at = _SCANS[name]
        if at >= len(event.args) or not isinstance(event.args[at].const, str):
            return
        used = at + 1
        for found in _WIDTH.finditer(event.args[at].const):
            if found[4] == "%" or found[1]:
                continue
            arg = event.args[used] if used < len(event.args) else PLAIN
            used += 1
            if found[4] not in "s[" or found[3]:
                continue
            capacity = arg.memory.capacity if arg.memory is not None else None
            if not found[2]:
                self.detected("unbounded-scan", event.call.node, subject=event.call, args=event.args)
                return
            if capacity is not None and int(found[2]) >= capacity:
                self.detected(
                    "overflow",
                    event.call.node,
                    f"{found[2]} characters and a terminator are read into a buffer of {capacity}",
                    subject=event.call,
                )
                return

    # Places

    def dereferenced(self, value: Value, node: ir.Syntax, expr: ir.Expr) -> None:
        memory = value.memory
        if memory is None or not memory.nullable or self.flow is None:
            return
        key = key_of(expr)
        if key is None:
            return
        self.detected("null-dereference", node)
        self.assume(key, present=True)

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

    # Tests

    def narrowed(self, flow: Flow, test: ir.Op, truth: bool) -> None:
        left, right = test.args
        op = test.op
        for side, other, turned in ((left, right, op), (right, left, _FLIP.get(op, op))):
            effective = turned if truth else _NEGATED.get(turned)
            if effective is None:
                continue
            bound = flow.eval_quiet(other)
            if isinstance(side, ir.Call) and isinstance(side.func, ir.Name | ir.Attr):
                name = side.func.id if isinstance(side.func, ir.Name) else side.func.name
                if name in _LENGTHS and effective in ("<", "<=", "=="):
                    inner = (
                        side.args[0]
                        if side.args
                        else (side.func.base if isinstance(side.func, ir.Attr) else None)
                    )
                    if inner is not None:
                        self.length_known(flow, inner, bound.const, effective)
                    continue
                if effective in ("<", "<="):  # abs(x) < bound and the like
                    for arg in side.args:
                        self.bound(flow, arg, effective, bound)
                continue
            if isinstance(side, ir.Op) and effective in ("<", "<=", ">", ">="):
                for arg in side.args:
                    self.bound(flow, arg, "<", Value(numeric=True))
                continue
            if isinstance(side, ir.Bind):
                side = side.target
            key = key_of(side)
            if key is None:
                continue
            if bound.known and (bound.const is None or bound.const == 0) and effective in ("==", "!="):
                self.assume(key, present=effective == "!=")
                if effective == "!=":
                    self.mark(flow, key, "zero")
            self.bound(flow, side, effective, bound)

    def length_known(self, flow: Flow, expr: ir.Expr, bound: Any, op: str) -> None:
        key = key_of(expr)
        known = flow.held(key) if key is not None else None
        if key is None:
            return
        if known is None:
            known = flow.eval_quiet(expr)
        memory = known.memory or Memory()
        if isinstance(bound, int):
            memory = replace(memory, length=bound - 1 if op == "<" else bound)
        flow.env[key] = replace(
            known.cleaned(frozenset({"length"})),
            memory=memory if known.memory or isinstance(bound, int) else None,
        )

    def bound(self, flow: Flow, expr: ir.Expr, op: str, limit: Value) -> None:
        key = key_of(expr)
        if key is None:
            return
        known = flow.held(key)
        if known is None:
            known = flow.eval_quiet(expr)
        if known.memory is not None:
            return
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
                known = known.cleaned(frozenset({"zero"}))
        elif op == "==":
            known = replace(known, low=number, high=number, bounded=True)
        flow.env[key] = known

    def mark(self, flow: Flow, key: str, use: str) -> None:
        known = flow.held(key)
        if known is not None:
            flow.env[key] = known.cleaned(frozenset({use}))

    def assume(self, key: str, present: bool) -> None:
        if self.flow is None or not present:
            return
        known = self.flow.held(key)
        if known is not None and known.memory is not None and known.memory.nullable:
            self.flow.env[key] = replace(known, memory=replace(known.memory, nullable=False))


_FLIP = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
_NEGATED = {"<": ">=", ">": "<=", "<=": ">", ">=": "<", "==": "!=", "!=": "=="}


def _named(call: ir.Call, *names: str) -> bool:
    return isinstance(call.func, ir.Name) and call.func.id in names


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

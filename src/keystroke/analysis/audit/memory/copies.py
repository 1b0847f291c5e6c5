"""C: checks copies, prints and scans against the memory they write to.

A copy that does not fit is reported with its sizes; one of unknown length only if its data is foreign.
"""

from __future__ import annotations

import re
from dataclasses import replace

from keystroke.analysis.audit.flow.base import CallEvent
from keystroke.analysis.audit.flow.folding import key_of
from keystroke.analysis.audit.flow.values import PARAMETER, PLAIN, REMOTE, UNKNOWN, Memory, Value
from keystroke.analysis.audit.memory.bounds import BoundsMatcher
from keystroke.analysis.audit.memory.library import LIBRARY
from keystroke.analysis.audit.source import ir

_DIRECTIVE = re.compile(
    r"%(?P<literal>%)|%(?P<skip>\*)?(?P<flags>[-+ #0']*)(?P<width>\*|\d+)?(?:\.(?P<precision>\*|\d+)?)?"
    r"(?:hh|h|ll|l|z|j|t|L|q|I64)?(?P<kind>[a-zA-LN-Z\[])"
)
_CHECKED_COUNTS = ("memcpy", "memmove", "strncpy", "memset", "wcsncpy")
_WIDTH = re.compile(r"%(\*?)(\d*)(?:l|h|hh|ll)?(m?)([a-zA-Z\[%])")


class CopyMatcher(BoundsMatcher):
    def check_counted_copy(self, event: CallEvent, name: str) -> None:
        to, source, at = LIBRARY.counted[name]
        args, exprs = event.args, event.call.args
        if max(to, at) >= len(args):
            return
        target, count = args[to], args[at]
        unit = 4 if name.startswith(("w", "fgetws", "swprintf")) else 1
        memory = target.memory
        self.check_dereference(target, event.call.node, exprs[to])
        whole = exprs[at]
        if self.check_before_start(event, to, source):
            return
        if (
            isinstance(whole, ir.CallExpr)
            and is_call_of(whole, "sizeof")
            and whole.args
            and isinstance(exprs[to], ir.AttrExpr)
        ):
            owner = key_of(exprs[to].base)  # type: ignore[attr-defined]
            if owner is not None and key_of(whole.args[0]) == owner:
                self.report_call(
                    "overflow",
                    event,
                    "the size of the whole structure is copied into one of its fields",
                    with_args=False,
                )
                return
        if self.may_be_negative(count, name, memory, unit):
            self.report_call("signed-length", event, origin=count.origin, with_args=False)
            return
        if memory is not None and memory.capacity is not None:
            size = count.const if isinstance(count.const, int) else count.high
            if isinstance(size, int):
                if size * unit > memory.capacity:
                    self.report_call(
                        "overflow",
                        event,
                        f"{size * unit} bytes are written into a buffer of {memory.capacity}",
                    )
                    return
            elif (
                not count.bounded
                and "length" not in count.clean
                and count.level >= PARAMETER
                and not self.is_limited(whole, memory)
            ):
                own = isinstance(whole, ir.CallExpr) and is_call_of(whole, "sizeof")
                if not own and (count.level >= REMOTE or "strlen" in whole.node.text() or memory.array):
                    self.report_call("unchecked-length", event, origin=count.origin)
                    return
        elif (
            count.level >= REMOTE
            and count.numeric
            and not count.bounded
            and count.high is None
            and name in ("memcpy", "memmove", "read", "recv")
            and memory is None
        ):
            self.report_call("unchecked-length", event, origin=count.origin)
        if 0 <= source < len(args) and name in ("memcpy", "memmove", "wmemcpy", "wmemmove"):
            origin = args[source].memory
            if (
                origin is not None
                and origin.capacity is not None
                and isinstance(most := count.const if count.known else count.high, int)
                and most * unit > origin.capacity
            ):
                self.report_call(
                    "over-read",
                    event,
                    f"{most * unit} bytes are read from a buffer of {origin.capacity}",
                    with_args=False,
                )
        if (
            name == "strncpy"
            and memory is not None
            and memory.array
            and count.const == memory.capacity
            and not isinstance(args[source].const, str)
        ):
            self.report("missing-terminator", event.call.node)
        self.set_length(exprs[to], self.written_length(name, args, count, unit))

    def may_be_negative(self, count: Value, name: str, memory: Memory | None, unit: int) -> bool:
        if isinstance(count.const, int):
            return count.const < 0
        if count.low is not None or count.high is None:
            return False
        if count.level >= REMOTE and count.numeric and name in _CHECKED_COUNTS:
            return True
        # A signed parameter that is compared with the size of the buffer from above only.
        return (
            count.level == PARAMETER
            and count.path in LIBRARY.signed_types
            and memory is not None
            and memory.array
            and memory.capacity is not None
            and count.high * unit in (memory.capacity, memory.capacity - 1)
        )

    def check_before_start(self, event: CallEvent, to: int, source: int) -> bool:
        """Reports a copy to or from before the start of a buffer; returns whether it did."""
        for at in (to, source):
            memory = event.args[at].memory if 0 <= at < len(event.args) else None
            if memory is not None and memory.start is not None and memory.start < 0:
                self.report_before_start(event.call.node, writes=at == to)
                return True
        return False

    def is_limited(self, expr: ir.Expr, memory: Memory) -> bool:
        text = str(expr.node.text())
        return "sizeof" in text or "min" in text.lower() or (bool(memory.fits) and memory.fits in text)

    def written_length(self, name: str, args: list[Value], count: Value, unit: int) -> int | None:
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
        if key is None:
            key, length = self.flow.pointed_variable(expr), None
        known = self.flow.lookup(key) if key is not None else None
        if key is None or known is None or known.memory is None:
            return
        self.flow.env[key] = replace(known, memory=replace(known.memory, length=length, fresh=False))
        for name in self.flow.aliases_of(known.memory.block):
            other = self.flow.env[name]
            if name != key and other.memory is not None:
                here = length if other.memory.start == known.memory.start else None
                self.flow.env[name] = replace(other, memory=replace(other.memory, length=here, fresh=False))

    def text_length(self, value: Value) -> int | None:
        if isinstance(value.const, str):
            return len(value.const)
        if value.memory is not None and value.memory.length is not None:
            return value.memory.length
        return None

    def is_measured_before(self, event: CallEvent) -> bool:
        """Whether the length of a source that is no variable was compared with the size of the target."""
        target, source = (str(expr.node.text()) for expr in event.call.args[:2])
        if source.isidentifier() or self.function is None:
            return False
        tested = (
            rf"strlen\(\s*{re.escape(source)}\s*\)[^;]{{0,8}}[<>]=?\s*sizeof\s*\(?\s*{re.escape(target)}\b"
        )
        text = str(self.function.node.text())
        found = re.search(tested, text)
        return found is not None and found.start() < text.find(str(event.call.node.text()))

    def check_string_copy(self, event: CallEvent, name: str) -> None:
        target, source = event.args[0], event.args[1]
        exprs = event.call.args
        unit = 4 if name.startswith("w") else 1
        self.check_dereference(target, event.call.node, exprs[0])
        if self.check_before_start(event, 0, 1):
            return
        if self.is_measured_before(event):
            return
        length = self.text_length(source)
        if isinstance(source.const, str) and unit == 4:
            length = len(source.const) * 4
        memory = target.memory
        start = (memory.length or 0) if memory is not None and LIBRARY.string_copies[name] else 0
        capacity = memory.capacity if memory is not None else None
        total = start + length if length is not None else None
        self.set_length(exprs[0], total)
        if length is not None:
            if capacity is not None and start + length + unit > capacity:
                self.report_call(
                    "overflow", event, f"{start + length + unit} bytes are copied into a buffer of {capacity}"
                )
            return
        if (
            "length" in source.clean
            or "*" in source.clean
            or (memory is not None and memory.fits and memory.fits == exprs[1].node.text())
        ):
            return
        if (
            capacity is not None
            and source.memory is not None
            and source.memory.capacity is not None
            and source.memory.capacity <= capacity
            and not LIBRARY.string_copies[name]
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
        self.report_call("unbounded-copy", event, origin=source.origin)

    def check_bounded_append(self, event: CallEvent) -> None:
        memory, count = event.args[0].memory, event.args[2]
        if memory is None or memory.capacity is None:
            return
        size = count.const
        used = memory.length or 0
        if isinstance(size, int) and size + used + 1 > memory.capacity and size >= memory.capacity:
            self.report_call(
                "overflow", event, "the bound of strncat is what may be appended, not the size of the buffer"
            )
        self.set_length(event.call.args[0], used + size if isinstance(size, int) else None)

    def check_print(self, event: CallEvent) -> None:
        memory = event.args[0].memory
        template = event.args[1].text
        rest = event.args[2:]
        exprs = event.call.args
        if template is None or not isinstance(event.args[1].const, str):
            if event.args[1].level >= PARAMETER or event.path.endswith("vsprintf"):
                self.report_call("unbounded-print", event, origin=event.args[1].origin)
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
                length = self.text_length(arg)
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
            self.report_call("unbounded-print", event, origin=foreign)
        elif capacity is not None and total - 2 * used + 1 > capacity:
            self.report_call(
                "overflow",
                event,
                f"up to {total - 2 * used + 1} bytes are printed into a buffer of {capacity}",
            )

    def check_format_arguments(self, event: CallEvent, at: int) -> None:
        """Reports a format with more directives than arguments."""
        if at >= len(event.call.args) or not isinstance(event.call.args[at], ir.ConstExpr):
            return
        template = event.call.args[at].node
        if template.kind() != "string_literal" or any("..." in arg.node.text() for arg in event.call.args):
            return
        scans = "scanf" in event.path
        wanted = 0
        for found in _DIRECTIVE.finditer(template.text()):
            if found["literal"] or (scans and (found["skip"] or found["width"] == "*")):
                continue
            if found["kind"] == "m" and not scans:
                continue
            wanted += 1 + (
                not scans and ((found["width"] == "*") + (found["precision"] == "*") + bool(found["skip"]))
            )
        if wanted > len(event.call.args) - at - 1 and "$" not in template.text():
            self.report("format-arguments", event.call.node)

    def check_scan(self, event: CallEvent, name: str) -> None:
        at = LIBRARY.scans[name]
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
                self.report_call("unbounded-scan", event)
                return
            if capacity is not None and int(found[2]) >= capacity:
                self.report_call(
                    "overflow",
                    event,
                    f"{found[2]} characters and a terminator are read into a buffer of {capacity}",
                    with_args=False,
                )
                return


def is_call_of(call: ir.CallExpr, *names: str) -> bool:
    return isinstance(call.func, ir.NameExpr) and call.func.id in names

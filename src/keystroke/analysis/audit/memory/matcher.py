"""C and C++: checks declarations, calls, indexing and arithmetic against capacities and bounds.

Reports what the numbers show: a copy that does not fit, an index past the end, a block used after release.
Unknown sizes are reported only for foreign data.
"""

from __future__ import annotations

import re
from dataclasses import replace

from keystroke.analysis.audit.flow.base import CallEvent
from keystroke.analysis.audit.flow.values import (
    LOCAL,
    NONE,
    PARAMETER,
    REMOTE,
    UNKNOWN,
    Memory,
    Value,
    constant,
)
from keystroke.analysis.audit.memory.library import LIBRARY
from keystroke.analysis.audit.memory.lifetimes import LifetimeMatcher
from keystroke.analysis.audit.memory.pointers import FORGED, PARSED
from keystroke.analysis.audit.memory.sizes import size_of
from keystroke.analysis.audit.source import ir

_ABOVE = "the index is checked from above only; a negative one reaches memory before the buffer"
_WIDTH = re.compile(r"\bcin\.width\(|\bsetw\(")  # bounds what the next >> reads
_LENGTH = "the length of "  # sums with the length of a text do not overflow


class MemoryMatcher(LifetimeMatcher):
    # Declarations

    def on_declare(self, stmt: ir.DeclareStmt, value: Value) -> Value:
        self.declared.add(stmt.name)
        unit = size_of(stmt.type) or 1
        if stmt.size is not None:
            if stmt.pointer:
                unit = 8
            asked = self.flow.eval_silently(stmt.size)
            count = asked.const
            if asked.level >= REMOTE and asked.numeric and not asked.bounded and asked.high is None:
                self.report("allocation-size", stmt.node, origin=asked.origin)
            capacity: int | None = count * unit if isinstance(count, int) else None
            length: int | None = None
            counted = isinstance(stmt.size, ir.UnknownExpr)  # `[]`: as many as the initial value has
            if isinstance(value.const, str):
                length = len(value.const) * unit
                capacity = length + unit if counted else capacity
            elif value.items is not None and counted:
                capacity = len(value.items) * unit or None
            if size_of(stmt.type) is None and not stmt.pointer:
                capacity = None
            kind = "static" if stmt.static or not self.flow.functions else "stack"
            fresh = kind == "stack" and stmt.value is None and size_of(stmt.type) is not None
            memory = Memory(capacity, unit, length, self.new_block(), array=True, kind=kind, fresh=fresh)
            return replace(value, memory=memory, const=UNKNOWN, items=None, numeric=False, level=value.level)
        if self.is_unwritten(stmt):
            return replace(value, memory=Memory(kind="unset"))
        if value.memory is not None and value.memory.kind == "unset":
            return replace(value, memory=None)  # the copy is set
        if value.memory is not None:
            if stmt.pointer:
                return replace(
                    value, memory=replace(value.memory, unit=size_of(stmt.type) or 0), numeric=False
                )
            return value
        if stmt.pointer and isinstance(value.const, str):
            size = len(value.const)
            return replace(value, memory=Memory(size * unit + unit, unit, size * unit))
        self.check_constant_range(stmt, value)
        wide = value.numeric and not value.known and not value.bounded and value.high is None
        if (
            wide
            and stmt.type in LIBRARY.narrow_types
            and (value.origin.startswith(_LENGTH) or _foreign(value))
        ):
            self.report("truncation", stmt.node, origin=value.origin)
        if value.numeric and (
            "unsigned" in stmt.type or "size_t" in stmt.type or stmt.type.startswith("uint")
        ):
            return replace(value, low=max(value.low or 0, 0))
        return value

    def check_constant_range(self, stmt: ir.DeclareStmt, value: Value) -> None:
        """Reports constant arithmetic whose result does not fit the type."""
        size = size_of(stmt.type)
        if size is None or stmt.pointer or not isinstance(value.const, int) or isinstance(value.const, bool):
            return
        if (
            not isinstance(stmt.value, ir.OpExpr)
            or stmt.value.op not in ("+", "-", "*")
            or "double" in stmt.type
        ):
            return
        free = "unsigned" in stmt.type or stmt.type.startswith(("uint", "size_t"))
        top = 1 << (8 * size - (not free))
        if not (0 if free else -top) <= value.const < top:
            self.report("integer-overflow", stmt.node)

    # Calls

    def on_call(self, event: CallEvent) -> Value | None:
        super().on_call(event)
        if isinstance(event.call.func, ir.AttrExpr):  # a method or a function pointer
            self.pass_pointers(event, "")
            return None
        name = event.path.rsplit(".", 1)[-1]
        args = event.args
        if name == "sizeof":
            return self.sizeof_value(event)
        if name == "new":
            self.pass_pointers(event, name)
            if event.kwargs.get("place") is not None:
                return event.kwargs["place"]
        if name in LIBRARY.allocators or name in LIBRARY.duplicators or name == "new":
            return self.allocate(event, name)
        self.check_race(event, name)
        if name in LIBRARY.openers:
            return self.open_file(event)
        self.pass_pointers(event, name)
        if name in LIBRARY.formats:
            self.check_format_arguments(event, LIBRARY.formats[name])
        if name in LIBRARY.releases and args:
            self.release(event, name)
        elif name in LIBRARY.counted:
            self.check_counted_copy(event, name)
        elif name in LIBRARY.string_copies and len(args) > 1:
            self.check_string_copy(event, name)
        elif name in ("sprintf", "vsprintf", "swprintf", "wsprintf") and len(args) > 1 and name != "swprintf":
            self.check_print(event)
        elif name in ("strncat", "wcsncat") and len(args) > 2:
            self.check_bounded_append(event)
        elif name in LIBRARY.scans:
            self.check_scan(event, name)
        if name in LIBRARY.finders:
            return self.find_result(event, name)
        if name in LIBRARY.counted_reads and len(args) > LIBRARY.counted_reads[name]:
            count = args[LIBRARY.counted_reads[name]]
            top = count.const if isinstance(count.const, int) else count.high
            if top is not None:  # at most the requested count
                return Value(
                    level=REMOTE,
                    numeric=True,
                    path=f"{name}()",
                    origin=f"{name}()",
                    low=0,
                    high=top,
                    bounded=True,
                )
        if name in ("strlen", "wcslen") and args:
            memory = args[0].memory
            high = (
                memory.length // (memory.unit or 1)
                if memory is not None and memory.length is not None
                else None
            )
            return Value(
                level=args[0].level,
                numeric=True,
                path=f"{event.path}()",
                origin=f"{_LENGTH}{args[0].origin}",
                roots=args[0].roots,
                low=0,
                high=high,
            )
        return None

    def find_result(self, event: CallEvent, name: str) -> Value:
        """The result of a search, which may be NULL."""
        level = event.args[0].level if event.args and name.startswith(("str", "mem", "wcs")) else LOCAL
        origin = event.args[0].origin if level > LOCAL else ""
        roots = event.args[0].roots if level > LOCAL else NONE
        memory = Memory(nullable=True, kind="found")
        return Value(level=level, path=f"{name}()", origin=origin, roots=roots, memory=memory)

    def sizeof_value(self, event: CallEvent) -> Value:
        if not event.args:
            return Value(numeric=True)
        arg = event.args[0]
        if "type" in event.kwargs:
            size = size_of(str(arg.const))
            return constant(size) if size is not None else Value(numeric=True)
        if arg.memory is not None and arg.memory.array:
            return constant(arg.memory.capacity) if arg.memory.capacity is not None else Value(numeric=True)
        if arg.memory is not None and arg.memory.kind != "unset":
            return constant(8)
        return Value(numeric=True)

    # Places

    def on_index(self, base: Value, key: Value, node: ir.Syntax, expr: ir.IndexExpr) -> None:
        if base.path == FORGED:
            self.report("foreign-pointer", node, origin=base.origin)
            return
        self.check_dereference(base, node, expr.base)
        memory = base.memory
        if memory is None:
            return
        parent = node.parent()
        if parent is not None and (
            parent.kind() == "sizeof_expression"
            or (parent.kind() == "pointer_expression" and parent.text().startswith("&"))
        ):
            return
        writes = stored(node)
        if memory.fresh and memory.block:
            if not writes and not self.may_be_written(node):
                self.report("uninitialised", node)
            self.mark_written(memory.block)
        if not memory.unit or (self.call_site is not None and not key.known):
            return  # an inlined function may check its index
        if memory.start is not None and memory.start < 0 and memory.kind != "unset":
            place = key.const if isinstance(key.const, int) else key.low
            if isinstance(place, int) and memory.start + place * memory.unit < 0:
                self.report_before_start(node, writes)
            return
        if memory.capacity is None:
            return
        count = memory.capacity // memory.unit
        place = key.const if isinstance(key.const, int) else key.high
        if isinstance(place, int) and place >= count:
            if key.known or key.low is not None or key.level >= REMOTE:
                self.report(
                    "overflow" if writes else "over-read",
                    node,
                    f"index {place} is past the end of a buffer of {count} elements",
                )
            return
        lowest = key.const if isinstance(key.const, int) else key.low
        if isinstance(lowest, int) and lowest < 0 and (key.known or key.level >= REMOTE):
            self.report(
                "overflow" if writes else "over-read",
                node,
                f"index {lowest} is before the start of the buffer",
            )
            return
        if key.level == PARAMETER and key.path in LIBRARY.signed_types and memory.array and key.low is None:
            if place == count - 1:
                self.report("unchecked-index", node, _ABOVE, key.origin)
            return
        if key.level >= REMOTE and key.numeric:
            if place is None and not key.bounded:
                self.report("unchecked-index", node, origin=key.origin)
            elif key.low is None:
                self.report("unchecked-index", node, _ABOVE, key.origin)

    def may_be_written(self, node: ir.Syntax) -> bool:
        """Whether an element may be written rather than read: its address is taken, or a call changes it."""
        whole = _base(node)
        parent = whole.parent()
        if parent is None or whole.text().startswith("&") or parent.kind() == "sizeof_expression":
            return True
        if parent.kind() != "argument_list":
            return False
        callee = parent.parent().field("function")
        return self.language == "cpp" or callee is None or callee.text().isupper()

    def on_arithmetic(self, op: str, args: list[Value], node: ir.Syntax) -> None:
        left, right = args
        if any(arg.path in ("double", "float") or isinstance(arg.const, float) for arg in args):
            return  # neither wraps around nor stops at zero
        if op == ">>" and left.path.endswith("cin") and right.memory is not None and right.memory.array:
            around = self.function.node.text() if self.function is not None else ""
            if not _WIDTH.search(around):
                self.report("unbounded-scan", node)
            return
        if op in ("/", "%"):
            if right.const == 0 and isinstance(right.const, int) and not isinstance(right.const, bool):
                self.report("zero-division", node)
            elif (
                right.level >= REMOTE
                and right.numeric
                and "zero" not in right.clean
                and not (right.low is not None and right.low > 0)
            ):
                self.report("zero-division", node, origin=right.origin)
            return
        if op in ("<<", ">>"):
            self.check_shift(left, right, node)
        if op not in ("+", "-", "*") or "LL" in node.text():
            return
        for arg, other in ((left, right), (right, left)):
            if arg.level < REMOTE or not arg.numeric or not (other.numeric or other.known):
                continue
            if (op == "-" and (arg is not left or arg.low is not None)) or (
                op != "-" and (arg.bounded or arg.high is not None)
            ):
                continue
            if op == "-" and not other.known:
                continue
            if not _number_source(arg.origin) or _tested_above(node):
                continue
            self.report("integer-overflow", node, origin=arg.origin)
            return

    def check_shift(self, left: Value, right: Value, node: ir.Syntax) -> None:
        """Reports a count from outside that nothing limits, and one that is too large for the type."""
        if not isinstance(left.const, int) and not (self.language == "c" and left.numeric):
            return  # << may write to a stream
        own = left.roots == {_first_operand(node)}  # a parameter itself, of its declared type
        size = size_of(left.path) or 8
        width = max(8 * (size if own or size > 8 else 8), 32)
        if isinstance(right.const, int):
            if right.const >= width:
                self.report("shift-width", node)
        elif _foreign(right) and right.numeric and not right.bounded and right.high is None:
            self.report("shift-width", node, origin=right.origin)

    def on_return(self, value: Value, node: ir.Syntax, function: ir.Function | None) -> None:
        super().on_return(value, node, function)
        if (
            value.memory is not None
            and value.memory.array
            and value.memory.kind == "stack"
            and node.kind() == "identifier"
            and function is not None
            and "string" not in function.returns
        ):
            self.report("stack-return", node)


def _first_operand(node: ir.Syntax) -> str:
    """The text of the left side, or of what `++` and `--` change."""
    operand = node.field("left") or node.field("argument")
    return str(operand.text()) if operand is not None else ""


def _tested_above(node: ir.Syntax) -> bool:
    """Whether the condition of the expression compares the number of a difference: x > 0 ? x - 1 : 0."""
    left, parent = _first_operand(node), node.parent()
    while parent is not None and parent.kind() in ("parenthesized_expression", "cast_expression"):
        parent = parent.parent()
    if parent is None or parent.kind() != "conditional_expression" or "-" not in node.text():
        return False
    return re.match(rf"\(?{re.escape(left)}\s*>", str(parent.field("condition").text())) is not None


def _foreign(value: Value) -> bool:
    return value.level >= REMOTE and PARSED.search(value.origin) is not None


def _number_source(origin: str) -> bool:
    return not origin.startswith(_LENGTH) and any(
        name in origin for name in ("scanf", "atoi", "atol", "strto", "rand", "getenv", "sto")
    )


def _base(node: ir.Syntax) -> ir.Syntax:
    """The whole access that an indexed buffer is part of: `a[i].x` for `a[i]`."""
    parent = node.parent()
    while parent is not None and parent.kind() in (
        "field_expression",
        "subscript_expression",
        "parenthesized_expression",
        "pointer_expression",
    ):
        inside = parent.field("argument")
        if inside is not None and inside.range().start.index != node.range().start.index:
            break
        node, parent = parent, parent.parent()
    return node


def stored(node: ir.Syntax) -> bool:
    """Whether a plain assignment writes an element."""
    whole = _base(node)
    parent = whole.parent()
    return (
        parent is not None
        and parent.kind() == "assignment_expression"
        and parent.field("left").range().start.index == whole.range().start.index
        and parent.field("operator").text() == "="
    )

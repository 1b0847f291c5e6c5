"""Abstract values of the data flow analysis.

A value is immutable. It records the constant if known, how foreign its data is, the uses it is safe for, and
what is known of its text or memory. A join keeps what holds for both values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# How foreign data is: written in the source, unknown, a caller's, from outside the program.
CONSTANT, LOCAL, PARAMETER, REMOTE = range(4)
HOLE = "\0"  # an unknown part of a text skeleton
ALL = frozenset({"*"})
NONE: frozenset[str] = frozenset()
HTML = frozenset({"html"})
MAX_TEXT = 2000  # longer skeletons are cut


class _Unknown:
    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN: Any = _Unknown()


@dataclass(frozen=True, slots=True)
class Memory:
    """A block of memory: capacity and string length in bytes where known."""

    capacity: int | None = None
    unit: int = 1  # bytes per element
    length: int | None = None  # length of the string in it, without the terminator
    block: int = 0  # number of the allocation, 0 if unknown
    nullable: bool = False
    fits: str = ""  # the variable whose string it was allocated for
    array: bool = False  # sizeof gives its capacity
    kind: str = ""  # malloc, new, new[], file, stack, static; unset: an uninitialised variable
    start: int | None = 0  # offset of the pointer in the block, in bytes
    fresh: bool = False  # not written yet


@dataclass(slots=True)  # treated as immutable; not frozen, because that doubles the time to create one
class Value:
    const: Any = UNKNOWN
    level: int = CONSTANT
    clean: frozenset[str] = NONE
    skeleton: str | None = None  # its text with HOLEs
    path: str = ""  # dotted name of what it refers to, "()" for results of calls
    numeric: bool = False
    items: tuple[tuple[Any, Value], ...] | None = None  # contents by constant key
    origin: str = ""  # path of the source
    roots: frozenset[str] = NONE  # the variables that flowed into it
    low: int | None = None
    high: int | None = None
    bounded: bool = False  # compared with an upper bound that is not constant
    memory: Memory | None = None
    target: str = ""  # the variable whose address this is
    function: Any = field(default=None, compare=False)

    @property
    def known(self) -> bool:
        return self.const is not UNKNOWN

    @property
    def built(self) -> bool:
        """Whether it is text built from constant and other parts."""
        return self.skeleton is not None and HOLE in self.skeleton

    @property
    def text(self) -> str | None:
        if isinstance(self.const, str):
            return self.const
        if isinstance(self.const, bytes):
            return self.const.decode("latin-1")
        return self.skeleton

    def is_safe_for(self, use: str) -> bool:
        return self.level == CONSTANT or (bool(self.clean) and (use in self.clean or "*" in self.clean))

    def as_safe_for(self, uses: frozenset[str]) -> Value:
        return replace(self, clean=self.clean | uses)

    def item(self, key: Any) -> Value | None:
        if self.items is not None and key is not UNKNOWN:
            for name, value in self.items:
                if name == key and type(name) is type(key):
                    return value
        return None


PLAIN = Value()


def replace(value: Value, **changes: Any) -> Value:
    """A copy with some fields changed; four times as fast as `dataclasses.replace`."""
    out = Value(
        value.const,
        value.level,
        value.clean,
        value.skeleton,
        value.path,
        value.numeric,
        value.items,
        value.origin,
        value.roots,
        value.low,
        value.high,
        value.bounded,
        value.memory,
        value.target,
        value.function,
    )
    for name, content in changes.items():
        setattr(out, name, content)
    return out


def constant(value: Any) -> Value:
    if isinstance(value, bool) or not isinstance(value, int):
        return Value(value)
    return Value(value, numeric=True, low=value, high=value)


def join(a: Value, b: Value) -> Value:
    """The value that is either `a` or `b`."""
    if a is b or a == b:
        return a
    # A number injects nothing: it is text only if the other value is.
    mine = ALL if a.numeric and not b.numeric else a.clean
    other = ALL if b.numeric and not a.numeric else b.clean
    if a.level == CONSTANT and b.level > CONSTANT:
        clean = other
    elif b.level == CONSTANT and a.level > CONSTANT:
        clean = mine
    elif "*" in mine:
        clean = other
    elif "*" in other:
        clean = mine
    else:
        clean = mine & other
    same = a.known and b.known and type(a.const) is type(b.const) and a.const == b.const
    worse = a if a.level >= b.level else b
    built = a if a.built else b
    return Value(
        a.const if same else UNKNOWN,
        worse.level,
        clean,
        built.skeleton if built.built else (a.skeleton if a.skeleton == b.skeleton else None),
        a.path if a.path == b.path or not b.path else (b.path if not a.path else worse.path),
        a.numeric and b.numeric,
        a.items if a.items == b.items else None,
        worse.origin,
        a.roots | b.roots,
        min(a.low, b.low) if a.low is not None and b.low is not None else None,
        max(a.high, b.high) if a.high is not None and b.high is not None else None,
        (a.bounded or a.high is not None) and (b.bounded or b.high is not None) and (a.bounded or b.bounded),
        _join_memory(a.memory, b.memory),
        a.target if a.target == b.target else "",
        a.function or b.function,
    )


def _join_memory(a: Memory | None, b: Memory | None) -> Memory | None:
    if a is None or b is None:
        known = a or b
        return None if known is not None and known.kind == "unset" else known
    if a == b:
        return a
    if "unset" in (a.kind, b.kind):  # written in one branch: the written value
        return a if b.kind == "unset" else b
    capacity = min(a.capacity, b.capacity) if a.capacity is not None and b.capacity is not None else None
    length = max(a.length, b.length) if a.length is not None and b.length is not None else None
    return Memory(
        capacity,
        max(a.unit, b.unit),
        length,
        a.block if a.block == b.block else 0,
        a.nullable or b.nullable,
        a.fits if a.fits == b.fits else "",
        a.array and b.array,
        a.kind if a.kind == b.kind else "",
        a.start if a.start == b.start else None,
        a.fresh and b.fresh,
    )


def text_of(parts: list[Value]) -> Value:
    """The concatenation of parts as text."""
    if parts and all(
        isinstance(part.const, str | int | float) and not isinstance(part.const, bool) for part in parts
    ):
        whole = "".join(str(part.const) for part in parts)
        if len(whole) <= 1_000_000:
            return Value(whole)
    mixed = mix(parts)
    pieces: list[str] = []
    size = 0
    for part in parts:
        known = part.text
        if known is None and isinstance(part.const, int | float):
            known = str(part.const)
        piece = (
            known
            if known is not None
            else ("" if part.level == CONSTANT and part.path == "" and part.known else HOLE)
        )
        pieces.append(piece)
        size += len(piece)
        if size > MAX_TEXT:
            break
    skeleton = "".join(pieces)
    if mixed.level == CONSTANT:
        skeleton = skeleton.replace(HOLE, "")  # the unknown parts are not foreign
    return replace(mixed, skeleton=skeleton, numeric=False, path="", const=UNKNOWN, items=None)


def mix(parts: list[Value]) -> Value:
    """The combination of all parts: as foreign as the most foreign, as safe as the least safe.

    Parts that are safe for everything count only if there are no others; unknown local parts do not reduce
    what foreign parts are safe for.
    """
    worst: Value | None = None
    spare: Value | None = None  # the most foreign of the parts that are safe for everything
    sent: frozenset[str] | None = None  # what the foreign parts are safe for
    own: frozenset[str] | None = None
    roots: frozenset[str] = NONE
    counted = ""  # the origin of a number: it cannot inject, but may be guessable
    for part in parts:
        if part.roots:
            roots = roots | part.roots
        level = part.level
        if not level or part.numeric:
            counted = counted or part.origin
            continue
        clean = part.clean
        if "*" in clean:
            spare = part if spare is None or level > spare.level else spare
            continue
        if level > LOCAL:
            sent = clean if sent is None else sent & clean
        else:
            own = clean if own is None else own & clean
        if worst is None or level > worst.level:
            worst = part
    if worst is not None:
        uses = sent if sent is not None else own
        return Value(level=worst.level, clean=uses or NONE, origin=worst.origin, roots=roots)
    if spare is not None:
        return Value(level=spare.level, clean=ALL, origin=spare.origin, roots=roots)
    return Value(roots=roots, origin=counted) if roots or counted else PLAIN

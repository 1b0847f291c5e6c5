"""A burst: everything typed at one place, as the smallest single replacement between two texts."""

from __future__ import annotations

import re
from dataclasses import dataclass

from keystroke.text.diff import common_prefix, common_suffix

IDENTIFIER = re.compile(r"[^\W\d]\w*")
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Burst:
    """`before[start:old_end]` became `after[start:new_end]`."""

    before: str
    after: str
    start: int
    old_end: int
    new_end: int

    @property
    def old(self) -> str:
        return self.before[self.start : self.old_end]

    @property
    def new(self) -> str:
        return self.after[self.start : self.new_end]

    @property
    def delta(self) -> int:
        return self.new_end - self.old_end

    def shift_offset(self, offset: int) -> int:
        """The offset in `after` that corresponds to one in `before`, outside the burst."""
        return offset if offset <= self.start else offset + self.delta

    def words(self) -> Burst:
        """The same change grown to whole words."""
        start, old_end, new_end = self.start, self.old_end, self.new_end
        while start and _is_word(self.before[start - 1]):
            start -= 1
        while old_end < len(self.before) and _is_word(self.before[old_end]):
            old_end += 1
            new_end += 1
        return Burst(self.before, self.after, start, old_end, new_end)

    def with_neighbours(self) -> Burst:
        """Whole words, and for a pure insertion or deletion also the words around it."""
        burst = self.words()
        if burst.old.strip() and burst.new.strip():
            return burst
        start, old_end, new_end = burst.start, burst.old_end, burst.new_end
        left = re.search(r"[\w.]+\W{0,2}$", burst.before[max(0, start - 60) : start])
        if left and "\n" not in left[0]:
            start -= len(left[0])
        right = re.match(r"\W{0,2}\w+", burst.before[old_end : old_end + 60])
        if right and "\n" not in right[0]:
            old_end += len(right[0])
            new_end += len(right[0])
        return Burst(burst.before, burst.after, start, old_end, new_end)


def burst_between(before: str, after: str) -> Burst | None:
    if before == after:
        return None
    start = common_prefix(before, after)
    same = min(common_suffix(before, after), min(len(before), len(after)) - start)
    return Burst(before, after, start, len(before) - same, len(after) - same)


def _is_word(sign: str) -> bool:
    return _WORD.fullmatch(sign) is not None

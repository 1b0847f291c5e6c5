"""Compute at once, show calmly: whether a suggestion that was made may be seen.

Pure. It looks at how sure the model was, how fast the user types, where the cursor stands, how long the
line gets and what was turned down before; the answer is None (show it) or a named reason.
"""

from __future__ import annotations

import math
import re
from collections import deque
from dataclasses import dataclass

from keystroke.assist.completion.reasons import Hidden
from keystroke.assist.completion.tuning import moved
from keystroke.text.repetition import loop_start

# Geometric mean probability of the tokens that is sure enough, and how much surer in a burst of keys. Of the
# shipped model's suggestions at 500 random places in late files those at 0.8 and above are a third, half of
# them right to the last letter, and hold four in five of all that are right; from 0.92 on one in seven is
# shown and four in five are right; from 0.6 on seven in ten are shown and three in ten are right.
THRESHOLDS = {"calm": 0.92, "balanced": 0.8, "eager": 0.6}
BURST = 0.1
FAST = 0.09  # seconds between keys: faster than anybody reads
_SEEN_MOST = 64
_LOOP = re.compile(r"(.{3,24}?[^\W_].{0,2}?)\1{3,}")  # four times the same, with a letter in it: no ruler


class Rhythm:
    """When keys came. The pace is the mean of the last few gaps that were no pauses."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._gaps: deque[float] = deque(maxlen=4)

    def key(self, now: float) -> None:
        if self._last is not None:
            gap = now - self._last
            if gap > 1.0:
                self._gaps.clear()
            else:
                self._gaps.append(gap)
        self._last = now

    def fast(self) -> bool:
        return len(self._gaps) >= 3 and sum(self._gaps) / len(self._gaps) < FAST


class Dismissed:
    """Suggestions that were turned down, by the line they stood on: not offered again there."""

    def __init__(self) -> None:
        self._seen: deque[tuple[str, str]] = deque(maxlen=_SEEN_MOST)

    def add(self, line: str, text: str) -> None:
        self._seen.append((line.lstrip(), text.rstrip()))

    def __contains__(self, place: tuple[str, str]) -> bool:
        """Also where the line grew by typing into the suggestion: what is left of it stays turned down."""
        line, text = place[0].lstrip(), place[1].rstrip()
        return any(text and line + text == old + said and text in said for old, said in self._seen)

    def may_become(self, line: str, text: str) -> bool:
        """Whether `text`, as more of it is said, may turn out to be one of them."""
        begun = line.lstrip() + text
        return any((old + said).startswith(begun) for old, said in self._seen)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A suggestion about to be shown: `inserted` at `cursor` of `text`."""

    text: str
    cursor: int
    inserted: str
    confidence: float
    invoked: bool = False
    fast: bool = False
    followed: bool = False  # it is on the screen already, and what it says is being typed
    max_line: int | None = None
    indented: bool = False  # a blank line that needs no Tab


def before_computing(text: str, cursor: int, *, invoked: bool) -> Hidden | None:
    """Places where nothing is worth computing."""
    if not text.strip():
        return Hidden.NOTHING_WRITTEN
    right = text[cursor : cursor + 1]
    if not invoked and (right.isalnum() or right == "_"):
        return Hidden.MID_WORD
    return None


def judge(candidate: Candidate, eagerness: str, dismissed: Dismissed, shift: float = 0.0) -> Hidden | None:
    """None: show it. `shift`: how much stricter than usual to be (`tuning.moved`)."""
    c = candidate
    if not c.inserted.strip():
        return Hidden.EMPTY
    if loops_from(c.inserted) is not None:
        return Hidden.LOOPS
    start = c.text.rfind("\n", 0, c.cursor) + 1
    line = c.text[start : c.cursor]
    if c.max_line is not None and _longest(line, c.inserted) > c.max_line >= len(line):
        return Hidden.LINE_TOO_LONG
    if not c.invoked:
        if not line.strip() and not c.indented:
            return Hidden.WOULD_INDENT
        if (line, c.inserted) in dismissed:
            return Hidden.DISMISSED
        least = 0.0 if c.followed else moved(THRESHOLDS[eagerness], shift)
        if c.confidence < least:
            return Hidden.LOW_CONFIDENCE
        if c.fast and not c.followed and c.confidence < min(least + BURST, 0.95):
            return Hidden.TYPING_FAST
    return None


def loops_from(text: str) -> int | None:
    """Where a completion begins to go in circles: what comes before is worth keeping; None if nowhere."""
    if (found := _LOOP.search(text)) is not None:
        return found.start() + len(found[1])
    return loop_start(text)


def confidence(logprobs: list[float]) -> float:
    """Geometric mean of the probabilities; 1 where none were given (an engine that tells none)."""
    return math.exp(sum(logprobs) / len(logprobs)) if logprobs else 1.0


def _longest(line: str, inserted: str) -> int:
    first, *others = inserted.split("\n")
    return max([len(line) + len(first), *map(len, others)])

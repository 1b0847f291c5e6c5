"""Decides whether a computed suggestion is shown.

The decision depends on the model's confidence, the typing speed, the cursor's position, the length of the
line and the suggestions that were dismissed before. Every suggestion that is not shown has a named reason.
"""

from __future__ import annotations

import math
import re
from collections import deque
from dataclasses import dataclass

from keystroke.assist.completion.reasons import WithheldReason
from keystroke.assist.completion.tuning import shift_threshold
from keystroke.text.repetition import loop_start

# The geometric mean probability of the tokens that is high enough, and how much higher it must be in a burst
# of keys. Measured with the shipped model at 500 random places in recent files: at 0.8 a third of the
# suggestions is shown and half of those are exactly right; at 0.92 one in seven is shown and four in five are
# right; at 0.6 seven in ten are shown and three in ten are right.
THRESHOLDS = {"calm": 0.92, "balanced": 0.8, "eager": 0.6}
BURST = 0.1
FAST = 0.09  # seconds between keys: too fast to read a suggestion
_MAX_DISMISSED = 64
_LOOP = re.compile(
    r"(.{3,24}?[^\W_].{0,2}?)\1{3,}"
)  # four repetitions that contain a letter (a ruler does not)


class TypingRhythm:
    """Typing speed: the mean of the last few gaps between keys, pauses excluded."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._gaps: deque[float] = deque(maxlen=4)

    def record_key(self, now: float) -> None:
        if self._last is not None:
            gap = now - self._last
            if gap > 1.0:
                self._gaps.clear()
            else:
                self._gaps.append(gap)
        self._last = now

    def is_fast(self) -> bool:
        return len(self._gaps) >= 3 and sum(self._gaps) / len(self._gaps) < FAST


class DismissedSuggestions:
    """Suggestions the user dismissed, by the line they were on; they are not shown there again."""

    def __init__(self) -> None:
        self._entries: deque[tuple[str, str]] = deque(maxlen=_MAX_DISMISSED)

    def add(self, line: str, text: str) -> None:
        self._entries.append((line.lstrip(), text.rstrip()))

    def __contains__(self, entry: tuple[str, str]) -> bool:
        """Also true where some of the suggestion has been typed: the rest of it stays dismissed."""
        line, text = entry[0].lstrip(), entry[1].rstrip()
        return any(
            text and line + text == old + dismissed and text in dismissed for old, dismissed in self._entries
        )

    def may_become(self, line: str, text: str) -> bool:
        """Whether a longer `text` may turn out to be one of them."""
        start = line.lstrip() + text
        return any((old + dismissed).startswith(start) for old, dismissed in self._entries)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A suggestion about to be shown: `inserted` at `cursor` of `text`."""

    text: str
    cursor: int
    inserted: str
    confidence: float
    invoked: bool = False
    fast: bool = False
    being_typed: bool = False  # it is on the screen already, and the user is typing it
    max_line: int | None = None
    indented: bool = False  # a blank line that is indented far enough already


def reason_not_to_compute(text: str, cursor: int, *, invoked: bool) -> WithheldReason | None:
    """Why nothing should be computed at this cursor, or None."""
    if not text.strip():
        return WithheldReason.NOTHING_WRITTEN
    right = text[cursor : cursor + 1]
    if not invoked and (right.isalnum() or right == "_"):
        return WithheldReason.MID_WORD
    return None


def find_reason(
    candidate: Candidate, eagerness: str, dismissed: DismissedSuggestions, shift: float = 0.0
) -> WithheldReason | None:
    """Why the candidate is not shown, or None. `shift` moves the thresholds (`tuning.shift_threshold`)."""
    c = candidate
    if not c.inserted.strip():
        return WithheldReason.EMPTY
    if find_loop(c.inserted) is not None:
        return WithheldReason.LOOPS
    start = c.text.rfind("\n", 0, c.cursor) + 1
    line = c.text[start : c.cursor]
    if c.max_line is not None and _longest_line(line, c.inserted) > c.max_line >= len(line):
        return WithheldReason.LINE_TOO_LONG
    if not c.invoked:
        if not line.strip() and not c.indented:
            return WithheldReason.WOULD_INDENT
        if (line, c.inserted) in dismissed:
            return WithheldReason.DISMISSED
        least = 0.0 if c.being_typed else shift_threshold(THRESHOLDS[eagerness], shift)
        if c.confidence < least:
            return WithheldReason.LOW_CONFIDENCE
        if c.fast and not c.being_typed and c.confidence < min(least + BURST, 0.95):
            return WithheldReason.TYPING_FAST
    return None


def find_loop(text: str) -> int | None:
    """Where the text begins to repeat itself, or None. The text before that position is usable."""
    if (found := _LOOP.search(text)) is not None:
        return found.start() + len(found[1])
    return loop_start(text)


def confidence(logprobs: list[float]) -> float:
    """The geometric mean of the probabilities; 1 for an engine that reports none."""
    return math.exp(sum(logprobs) / len(logprobs)) if logprobs else 1.0


def _longest_line(line: str, inserted: str) -> int:
    first, *others = inserted.split("\n")
    return max([len(line) + len(first), *map(len, others)])

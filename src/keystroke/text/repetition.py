"""Detects text that repeats itself, as small models sometimes write.

Only the end of a text is inspected, so a growing stream can be checked. Rulers, blank lines and rows of
digits are not loops.
"""

from __future__ import annotations

import re

_LOOK = 2400  # characters at the end that are inspected
_LONGEST = 600  # characters of one round
_LEAST = 160  # characters that all rounds together have
_ROUNDS = 4
_INTERVAL = 80  # characters of a stream between two checks
_SHORT = 12  # a round shorter than this must repeat more often
_SHORT_ROUNDS = 12
_WORD = re.compile(r"[^\W\d_]")


def loop_start(text: str) -> int | None:
    """The offset at which the text starts to repeat itself (the end of the first round), or None."""
    tail = text[-_LOOK:]
    size = len(tail)
    for period in range(1, min(_LONGEST, size // _ROUNDS) + 1):
        if tail[-1] != tail[-1 - period]:
            continue
        equal = _equal_end(tail, period)
        least = max(_LEAST, period * ((_SHORT_ROUNDS if period < _SHORT else _ROUNDS) - 1))
        if equal < least or not _WORD.search(tail[size - period :]):
            continue
        return len(text) - equal
    return None


def _equal_end(tail: str, period: int) -> int:
    """The number of characters at the end that are equal to those one period before."""
    high = len(tail) - period
    count = 0
    while count < high and tail[-1 - count] == tail[-1 - count - period]:
        count += 1
    return count


class LoopDetector:
    """Checks a streamed text for repetition at intervals."""

    def __init__(self) -> None:
        self._text, self._unchecked = "", 0

    def feed(self, piece: str) -> bool:
        """Add a piece of the stream; True if the text repeats itself."""
        self._text = (self._text + piece)[-2 * _LOOK :]
        self._unchecked += len(piece)
        if self._unchecked < _INTERVAL:
            return False
        self._unchecked = 0
        return loop_start(self._text) is not None

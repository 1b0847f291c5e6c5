"""Text that goes round in circles: the same piece again and again, as small models write when they are lost.

Pure. Only the end of a text is looked at, so a stream can be asked as it grows. Rulers, blank lines
and rows of zeros are no loop until they are long; what is reported is where the second round begins.
"""

from __future__ import annotations

import re

_LOOK = 2400  # characters at the end that are looked at
_LONGEST = 600  # characters of one round
_LEAST = 160  # characters that all rounds together have
_ROUNDS = 4
_SHORT = 12  # a round shorter than this must come more often
_SHORT_ROUNDS = 12
_WORD = re.compile(r"[^\W\d_]")


def loop_start(text: str) -> int | None:
    """Where the text begins to repeat itself: the end of the first round; None where it does not."""
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
    """How many characters at the end are the same as those one period before."""
    high = len(tail) - period
    count = 0
    while count < high and tail[-1 - count] == tail[-1 - count - period]:
        count += 1
    return count


class LoopDetector:
    """Asks now and then, while a text streams in pieces."""

    def __init__(self, every: int = 80) -> None:
        self._text, self._every, self._asked = "", every, 0

    def feed(self, piece: str) -> bool:
        """True once the text so far repeats itself."""
        self._text = (self._text + piece)[-2 * _LOOK :]
        self._asked += len(piece)
        if self._asked < self._every:
            return False
        self._asked = 0
        return loop_start(self._text) is not None

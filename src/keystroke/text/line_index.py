"""Line starts and character widths as numpy arrays. Imported on demand, because numpy is slow to import."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from keystroke.text.edit import Edit
from keystroke.text.position import Encoding

_LINE_END = re.compile(r"\r\n|\r|\n")
_SMALL = 4096  # below this a regular expression beats the set-up cost of an array
Offsets = NDArray[np.int64]


def line_starts(text: str) -> Offsets:
    """The offset at which each line starts. The first is 0; a final line end starts one more line."""
    return np.concatenate((np.zeros(1, np.int64), _starts_within(text, 1, len(text))))


def update_line_starts(starts: Offsets, edits: tuple[Edit, ...], text: str) -> Offsets:
    """Line starts of the new text. Whether a line starts at p depends only on the characters at p - 1 and
    p, so only the edited spans are scanned again; the other starts are shifted."""
    pieces: list[Offsets] = []
    kept = 0  # index of the first old start not yet processed
    moved = 0
    seen = 0  # first new offset not yet processed; 0 is always a start
    for edit in edits:
        upto = int(np.searchsorted(starts, edit.start, side="left")) if edit.start else 1
        if upto > kept:
            pieces.append(starts[kept:upto] + moved)
        first = edit.start + moved
        last = first + len(edit.text)
        pieces.append(_starts_within(text, max(first, seen, 1), last))
        seen = last + 1
        kept = max(kept, int(np.searchsorted(starts, edit.end, side="right")))
        moved += edit.delta
    pieces.append(starts[kept:] + moved)
    return np.concatenate(pieces)


def _starts_within(text: str, first: int, last: int) -> Offsets:
    """Offsets p with first <= p <= last, first > 0, at which a line starts."""
    if last < first:
        return np.empty(0, np.int64)
    window = text[first - 1 : last + 1]
    if len(window) < _SMALL:
        found = [first - 1 + match.end() for match in _LINE_END.finditer(window)]
        if found and found[-1] > last:
            found.pop()
        return np.array(found, np.int64)
    units = _code_units(window)
    ends = units == 10
    returns = units == 13
    if returns.any():
        returns[:-1] &= ~ends[1:]
        ends |= returns
    result: Offsets = np.flatnonzero(ends) + first
    return result[:-1] if len(result) and result[-1] > last else result


def _code_units(text: str) -> NDArray[np.uint8] | NDArray[np.uint32]:
    if text.isascii():
        return np.frombuffer(text.encode("ascii"), np.uint8)
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def boundaries(text: str, encoding: Encoding) -> Offsets:
    """For i = 0 to len(text): how many units of the encoding the first i characters take. A lone surrogate
    takes one UTF-16 unit and three UTF-8 bytes."""
    points = _code_units(text)
    result = np.zeros(len(points) + 1, np.int64)
    widths = np.ones(len(points), np.int64)
    if encoding == "utf-8":
        widths += points > 0x7F
        widths += points > 0x7FF
    widths += points > 0xFFFF
    np.cumsum(widths, out=result[1:])
    return result

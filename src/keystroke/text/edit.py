"""Edits: immutable replacements of spans of a text.

Offsets are code points of the text before the edits. A set of edits applies at once: its edits never overlap,
and insertions at the same offset keep their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from keystroke.errors import InputError


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace `[start, end)` by `text`."""

    start: int
    end: int
    text: str

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise InputError(
                f"an edit must not start before 0 or after its end, not at {self.start} to {self.end}"
            )

    @property
    def delta(self) -> int:
        """How much longer the text becomes."""
        return len(self.text) - (self.end - self.start)

    @property
    def is_insertion(self) -> bool:
        return self.start == self.end

    @property
    def is_empty(self) -> bool:
        return self.start == self.end and not self.text


def shift(edit: Edit, by: int) -> Edit:
    """The same edit `by` characters further on."""
    return Edit(edit.start + by, edit.end + by, edit.text)


def sorted_edits(edits: Iterable[Edit], length: int) -> tuple[Edit, ...]:
    """The edits in order. Raises InputError if two overlap or one exceeds a text of `length`."""
    result = tuple(sorted(edits, key=lambda edit: (edit.start, edit.end)))
    reached = 0
    for edit in result:
        if edit.start < reached:
            raise InputError(
                f"two edits overlap at offset {edit.start}; send edits that do not touch the same text"
            )
        if edit.end > length:
            raise InputError(f"an edit ends at offset {edit.end}, but the text has {length} characters")
        reached = edit.end
    return result


def apply_edits(text: str, edits: Iterable[Edit]) -> str:
    """`text` with all edits applied at once."""
    pieces: list[str] = []
    reached = 0
    for edit in sorted_edits(edits, len(text)):
        pieces += (text[reached : edit.start], edit.text)
        reached = edit.end
    pieces.append(text[reached:])
    return "".join(pieces)


def invert(text: str, edits: Iterable[Edit]) -> tuple[Edit, ...]:
    """The edits that take `apply_edits(text, edits)` back to `text`."""
    result: list[Edit] = []
    moved = 0
    for edit in sorted_edits(edits, len(text)):
        start = edit.start + moved
        result.append(Edit(start, start + len(edit.text), text[edit.start : edit.end]))
        moved += edit.delta
    return tuple(result)


def compose(first: Iterable[Edit], second: Iterable[Edit]) -> tuple[Edit, ...]:
    """One set of edits that is equal to `first` and then `second`. Edits that touch are merged, so
    consecutive keystrokes become one insertion."""
    between = deque(_pieces(deque([(0, _OPEN)]), first))
    result: list[Edit] = []
    reached, text = 0, ""
    for piece in _pieces(between, second):
        if isinstance(piece, str):
            text += piece
            continue
        start, end = piece
        if start > reached or text:
            result.append(Edit(reached, start, text))
        reached, text = end, ""
    return tuple(result)


_OPEN = 1 << 62  # longer than any text
_Piece = tuple[int, int] | str  # a span of the original that is kept, or new text


def _pieces(base: deque[_Piece], edits: Iterable[Edit]) -> Iterator[_Piece]:
    """The pieces of `base` after the edits."""
    reached = 0
    for edit in sorted_edits(edits, _OPEN):
        yield from _take(base, edit.start - reached)
        yield edit.text
        for _ in _take(base, edit.end - edit.start):
            pass
        reached = edit.end
    yield from base


def _take(base: deque[_Piece], length: int) -> Iterator[_Piece]:
    while length > 0:
        piece = base.popleft()
        size = len(piece) if isinstance(piece, str) else piece[1] - piece[0]
        if size > length:
            if isinstance(piece, str):
                piece, rest = piece[:length], piece[length:]
                base.appendleft(rest)
            else:
                middle = piece[0] + length
                base.appendleft((middle, piece[1]))
                piece = (piece[0], middle)
        yield piece
        length -= size

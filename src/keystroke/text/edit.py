"""Edits: immutable replacements of spans of a text.

Offsets are code points of the text before the edits. A set of edits applies at once: its edits never overlap,
and insertions at the same offset keep their order.
"""

from __future__ import annotations

from collections.abc import Iterable
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

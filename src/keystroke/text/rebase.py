"""Rebases a suggestion onto the edits that were typed while it was computed.

What was typed lies elsewhere (the suggestion is shifted), agrees with the suggestion (it is shortened) or
contradicts it (it is dropped, with a reason).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from keystroke.text.edit import Edit, shift, sorted_edits

_CLOSERS = frozenset(")]}>\"'`")  # what editors insert automatically after the cursor


class DropReason(StrEnum):
    DIVERGED = "diverged"  # other text was typed where the suggestion goes
    OVERLAPPED = "overlapped"  # text that the suggestion would replace was changed
    OUTSIDE = "outside"  # the text around the suggestion was deleted
    FULFILLED = "fulfilled"  # all of it has been typed


@dataclass(frozen=True, slots=True)
class Dropped:
    reason: DropReason


def rebase(edit: Edit, typed: Iterable[Edit]) -> Edit | Dropped:
    """`edit`, computed before `typed`, as an edit of the text after it. The typed edits apply one after
    another: each counts in the text that the previous one left."""
    for change in typed:
        result = _rebase_over(edit, change)
        if isinstance(result, Dropped):
            return result
        edit = result
    return Dropped(DropReason.FULFILLED) if edit.is_empty else edit


def rebase_all(edits: Sequence[Edit], typed: Sequence[Edit]) -> tuple[Edit, ...] | Dropped:
    """Rebase several edits: those already typed are removed; if one is contradicted, all are dropped."""
    result: list[Edit] = []
    for edit in edits:
        moved = rebase(edit, typed)
        if isinstance(moved, Edit):
            result.append(moved)
        elif moved.reason is not DropReason.FULFILLED:
            return moved
    return (
        sorted_edits(result, max((edit.end for edit in result), default=0))
        if result
        else Dropped(DropReason.FULFILLED)
    )


def _rebase_over(edit: Edit, change: Edit) -> Edit | Dropped:
    if change.is_empty:
        return edit
    if change.is_insertion and change.start == edit.start and edit.text:
        return _rebase_over_typing(edit, change.text)
    if change.end <= edit.start:
        return shift(edit, change.delta)
    if change.start >= edit.end:
        return edit
    return Dropped(DropReason.OUTSIDE if edit.is_insertion else DropReason.OVERLAPPED)


def _rebase_over_typing(edit: Edit, typed: str) -> Edit | Dropped:
    """The rest of the suggestion after `typed` was inserted exactly at its start."""
    head, tail = typed, ""
    while not edit.text.startswith(head):
        # An editor may insert "()" for "(": the automatic closers must then end the suggestion.
        if not edit.is_insertion or not head or head[-1] not in _CLOSERS:
            return Dropped(DropReason.DIVERGED)
        head, tail = head[:-1], head[-1] + tail
    rest = edit.text[len(head) :]
    if not head or not rest.endswith(tail):
        return Dropped(DropReason.DIVERGED)
    return Edit(edit.start + len(head), edit.end + len(head), rest[: len(rest) - len(tail)])

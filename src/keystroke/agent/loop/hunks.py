"""Splits a change into hunks that can be applied one by one.

A hunk is whole lines; edits that touch the same line belong to one hunk. An added or removed file is one
hunk.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import groupby

from keystroke.assist.edit import EditPlan, FileChange
from keystroke.errors import InputError
from keystroke.text import Edit, apply_edits, minimal_diff


@dataclass(frozen=True, slots=True)
class ChangeHunk:
    """Lines `first` to `last` (from 1; `last` is below `first` where nothing is removed) of a file become
    `after`. `number` counts through the whole change."""

    number: int
    path: str
    first: int
    last: int
    before: str
    after: str
    whole: str = ""  # "added" or "removed" where the hunk is a whole file


def split_hunks(plan: EditPlan) -> list[ChangeHunk]:
    """The hunks of a change, in order."""
    found: list[ChangeHunk] = []
    for change in plan.changes:
        for lines in _split_change(change):
            found.append(replace(lines, number=len(found)))
    return found


def select_hunks(plan: EditPlan, numbers: Collection[int]) -> EditPlan:
    """The change with only these hunks. InputError for an unknown number."""
    hunks = split_hunks(plan)
    unknown = sorted(set(numbers) - {hunk.number for hunk in hunks})
    if unknown:
        raise InputError(f"there is no hunk {unknown[0]}; the change has {len(hunks)}", param="hunks")
    wanted = [hunk for hunk in hunks if hunk.number in set(numbers)]
    changes = []
    for change in plan.changes:
        selected = [hunk for hunk in wanted if hunk.path == change.path]
        if not selected:
            continue
        if selected[0].whole or len(selected) == sum(hunk.path == change.path for hunk in hunks):
            changes.append(change)
            continue
        text = change.before.text if change.before is not None else ""
        at = _line_starts(text)
        after = apply_edits(
            text, [Edit(at[h.first - 1], at[h.first - 1] + len(h.before), h.after) for h in selected]
        )
        changes.append(replace(change, after=after, edits=minimal_diff(text, after)))
    return EditPlan(plan.workspace, plan.instruction, tuple(changes))


def _split_change(change: FileChange) -> list[ChangeHunk]:
    before = change.before.text if change.before is not None else ""
    if change.before is None or change.after is None:
        whole = "added" if change.before is None else "removed"
        last = len(before.splitlines())
        return [ChangeHunk(0, change.path, 1, last, before, change.after or "", whole)]
    at = _line_starts(before)
    spans = []
    for edit in change.edits:
        first, last = _line_of(at, edit.start), _line_of(at, edit.end)
        # Whole lines that are added or removed touch no other line.
        clean = (
            edit.start == at[first] and edit.end == at[last] and (not edit.text or edit.text.endswith("\n"))
        )
        spans.append((first, last if clean else min(last + 1, len(at) - 1), edit))
    parts = []
    for _, group in groupby(_number_spans(spans), key=lambda span: span[0]):
        members = list(group)
        first, last = members[0][1], max(span[2] for span in members)
        start, end = at[first], at[last]
        inside = [Edit(e.start - start, e.end - start, e.text) for *_, e in members]
        old = before[start:end]
        parts.append(ChangeHunk(0, change.path, first + 1, last, old, apply_edits(old, inside)))
    return parts


def _number_spans(spans: list[tuple[int, int, Edit]]) -> list[tuple[int, int, int, Edit]]:
    """Spans with the number of the hunk they belong to: those that share a line share a hunk."""
    numbered: list[tuple[int, int, int, Edit]] = []
    number, reach = -1, -1
    for first, last, edit in spans:
        if first >= reach or number < 0:
            number += 1
        reach = max(reach, last)
        numbered.append((number, first, last, edit))
    return numbered


def _line_starts(text: str) -> list[int]:
    """The offset of each line, and of the end."""
    starts = [0]
    for line in text.split("\n")[:-1]:
        starts.append(starts[-1] + len(line) + 1)
    if starts[-1] != len(text):
        starts.append(len(text))
    return starts


def _line_of(starts: list[int], offset: int) -> int:
    """The line that holds an offset."""
    return bisect_right(starts, offset) - 1

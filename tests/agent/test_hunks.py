"""A change in parts: any of them can be taken, all of them are the change."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keystroke.agent.loop.hunks import select_hunks, split_hunks
from keystroke.assist.edit import EditPlan, FileChange, Workspace
from keystroke.assist.edit.workspace import WorkspaceFile
from keystroke.errors import InputError
from keystroke.text import minimal_diff
from keystroke.text.encoding import Decoded

WORKSPACE = Workspace(Path(__file__).parent)
LINES = st.lists(st.sampled_from(["a\n", "bb\n", "    c d\n", "\n", "é ñ\n", "x = 1\r\n"]), max_size=12).map(
    "".join
)


def plan(before: str | None, after: str | None, path: str = "f.py") -> EditPlan:
    source = None if before is None else WorkspaceFile(path, Decoded(before), "digest", 0o644)
    edits = minimal_diff(before or "", after or "")
    return EditPlan(WORKSPACE, "", (FileChange(path, source, after, edits),))


@given(LINES, LINES, st.booleans(), st.data())
@settings(max_examples=150, deadline=None)
def test_any_hunks_can_be_taken_and_all_of_them_are_the_change(
    before: str, after: str, cut: bool, data: st.DataObject
) -> None:
    before, after = (before.removesuffix("\n"), after) if cut else (before, after)
    if before == after:
        return
    whole = plan(before, after)
    hunks = split_hunks(whole)
    assert [hunk.number for hunk in hunks] == list(range(len(hunks)))
    numbers = data.draw(st.sets(st.sampled_from([hunk.number for hunk in hunks])))
    taken = select_hunks(whole, numbers)
    lines = before.split("\n")
    for hunk in hunks:
        shown = "\n".join(lines[hunk.first - 1 : hunk.last])
        assert hunk.before.removesuffix("\n") == shown or not hunk.before
    expected, moved = before, 0
    at = [0]
    for line in lines[:-1]:
        at.append(at[-1] + len(line) + 1)
    at.append(len(before))
    for hunk in hunks:
        if hunk.number in numbers:
            start = at[hunk.first - 1] + moved
            assert expected[start : start + len(hunk.before)] == hunk.before
            expected = expected[:start] + hunk.after + expected[start + len(hunk.before) :]
            moved += len(hunk.after) - len(hunk.before)
    assert (taken.changes[0].after if taken.changes else before) == expected
    if len(numbers) == len(hunks):
        assert expected == after


def test_a_file_that_comes_or_goes_is_one_hunk() -> None:
    (added,) = split_hunks(plan(None, "a\nb\n"))
    assert (added.whole, added.after) == ("added", "a\nb\n")
    (removed,) = split_hunks(plan("a\nb\n", None))
    assert (removed.whole, removed.before, removed.last) == ("removed", "a\nb\n", 2)
    assert select_hunks(plan("a\n", None), [0]).changes[0].after is None


def test_a_hunk_that_is_not_there_is_named() -> None:
    with pytest.raises(InputError, match="no hunk 7; the change has 1"):
        select_hunks(plan("a\n", "b\n"), [0, 7])

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_strategies import edited

from keystroke.errors import InputError
from keystroke.text import Edit, apply_edits, invert, shift


@given(edited())
def test_edits_then_their_inverse_give_the_text_back(case: tuple[str, tuple[Edit, ...]]) -> None:
    text, edits = case
    assert apply_edits(apply_edits(text, edits), invert(text, edits)) == text


@given(edited(), st.randoms())
def test_the_order_in_which_edits_are_given_does_not_matter_unless_they_share_a_place(
    case: tuple[str, tuple[Edit, ...]], random: object
) -> None:
    text, edits = case
    if len({(edit.start, edit.end) for edit in edits}) == len(edits):
        assert apply_edits(text, reversed(edits)) == apply_edits(text, edits)


def test_insertions_at_one_point_keep_their_order() -> None:
    assert apply_edits("xy", [Edit(1, 1, "a"), Edit(1, 1, "b")]) == "xaby"


def test_overlapping_edits_are_refused() -> None:
    with pytest.raises(InputError, match="overlap at offset 2"):
        apply_edits("abcdef", [Edit(2, 5, ""), Edit(0, 3, "")])


def test_edits_outside_the_text_are_refused() -> None:
    with pytest.raises(InputError, match="ends at offset 4, but the text has 3 characters"):
        apply_edits("abc", [Edit(2, 4, "")])
    with pytest.raises(InputError, match="must not start before 0"):
        Edit(-1, 0, "")
    with pytest.raises(InputError, match="after its end"):
        Edit(2, 1, "")


def test_a_shifted_edit_changes_place_only() -> None:
    assert shift(Edit(1, 3, "x"), 4) == Edit(5, 7, "x")

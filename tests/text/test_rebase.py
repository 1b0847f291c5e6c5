from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_strategies import edits_of, texts

from keystroke.text import Dropped, DropReason, Edit, apply_edits, rebase, rebase_all


@st.composite
def spans(draw: st.DrawFn, length: int) -> tuple[int, int]:
    a, b = draw(st.integers(0, length)), draw(st.integers(0, length))
    return min(a, b), max(a, b)


@given(texts, st.data())
def test_rebase_commutes_with_typing_elsewhere(text: str, data: st.DataObject) -> None:
    text += "0123"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), min_size=4, max_size=4, unique=True)))
    edit, typed = Edit(cuts[0], cuts[1], data.draw(texts)), Edit(cuts[2], cuts[3], data.draw(texts))
    if data.draw(st.booleans()):
        edit, typed = typed, edit
    moved = rebase(edit, [typed])
    assert isinstance(moved, Edit)
    assert apply_edits(apply_edits(text, [typed]), [moved]) == apply_edits(text, [edit, typed])


@given(texts, st.data())
def test_typing_the_suggestion_letter_by_letter_reaches_the_same_text(text: str, data: st.DataObject) -> None:
    start, end = data.draw(spans(len(text)))
    edit = Edit(start, end, data.draw(texts.filter(bool)))
    wanted = apply_edits(text, [edit])
    count = data.draw(st.integers(0, len(edit.text)))
    typed = [Edit(start + i, start + i, c) for i, c in enumerate(edit.text[:count])]
    now = text
    for change in typed:
        now = apply_edits(now, [change])
    moved = rebase(edit, typed)
    if moved == Dropped(DropReason.FULFILLED):
        assert now == wanted
    else:
        assert isinstance(moved, Edit)
        assert apply_edits(now, [moved]) == wanted
        assert moved.text == edit.text[count:]


@given(texts, st.data())
def test_what_survives_always_fits_the_text_as_it_is_now(text: str, data: st.DataObject) -> None:
    edits = [edit for edit in data.draw(edits_of(len(text))) if not edit.is_empty]
    typed: list[Edit] = []
    now = text
    for _ in range(data.draw(st.integers(0, 4))):
        change = Edit(*data.draw(spans(len(now))), data.draw(texts))
        typed.append(change)
        now = apply_edits(now, [change])
    moved = rebase_all(edits, typed)
    if isinstance(moved, tuple):
        apply_edits(now, moved)


@pytest.mark.parametrize(
    ("edit", "typed", "result"),
    [
        (Edit(3, 3, "print"), [Edit(3, 3, "pr")], Edit(5, 5, "int")),
        (Edit(3, 3, "print"), [Edit(3, 3, "px")], Dropped(DropReason.DIVERGED)),
        (Edit(3, 3, "ab"), [Edit(3, 3, "a"), Edit(4, 4, "b")], Dropped(DropReason.FULFILLED)),
        (Edit(3, 3, "f(x)"), [Edit(3, 3, "f"), Edit(4, 4, "()")], Edit(5, 5, "x")),
        (Edit(3, 3, "f(x);"), [Edit(3, 3, "f()")], Dropped(DropReason.DIVERGED)),
        (Edit(3, 3, "x"), [Edit(3, 3, ")")], Dropped(DropReason.DIVERGED)),
        (Edit(3, 8, "x"), [Edit(4, 4, "y")], Dropped(DropReason.OVERLAPPED)),
        (Edit(3, 8, "x"), [Edit(0, 4, "")], Dropped(DropReason.OVERLAPPED)),
        (Edit(3, 3, "x"), [Edit(1, 5, "")], Dropped(DropReason.OUTSIDE)),
        (Edit(3, 3, "x"), [Edit(0, 0, "abc")], Edit(6, 6, "x")),
        (Edit(3, 3, "x"), [Edit(5, 5, "abc")], Edit(3, 3, "x")),
        (Edit(3, 8, "new"), [Edit(3, 3, "n")], Edit(4, 9, "ew")),
        (Edit(3, 8, ""), [Edit(3, 3, "kept")], Edit(7, 12, "")),
        (Edit(3, 8, "x"), [Edit(8, 8, "y")], Edit(3, 8, "x")),
    ],
)
def test_every_outcome_has_its_name(edit: Edit, typed: list[Edit], result: Edit | Dropped) -> None:
    assert rebase(edit, typed) == result


def test_one_contradicted_edit_drops_the_whole_suggestion() -> None:
    edits = [Edit(0, 0, "a"), Edit(5, 9, "b")]
    assert rebase_all(edits, [Edit(6, 7, "")]) == Dropped(DropReason.OVERLAPPED)


def test_an_edit_already_typed_falls_away_and_the_others_stay() -> None:
    edits = [Edit(0, 0, "a"), Edit(5, 9, "b")]
    assert rebase_all(edits, [Edit(0, 0, "a")]) == (Edit(6, 10, "b"),)

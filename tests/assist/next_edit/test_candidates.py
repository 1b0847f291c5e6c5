"""Where the model is asked: places that have to do with the change, few and far enough apart."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keystroke.assist.next_edit import burst_between
from keystroke.assist.next_edit.burst import Burst
from keystroke.assist.next_edit.candidates import MOST, changed_names, find_candidates


def change(before: str, old: str, new: str) -> Burst:
    burst = burst_between(before, before.replace(old, new, 1))
    assert burst is not None
    return burst


def padded(*blocks: str) -> str:
    """Blocks with so much between them that one question covers one of them."""
    return ("\n" + "".join(f"filler_{n} = {n}\n" for n in range(20))).join(f"{b}\n" for b in blocks)


def line_of(text: str, part: str) -> int:
    return text[: text.index(part)].count("\n")


def test_whoever_still_says_a_name_that_went_comes_first() -> None:
    burst = change(padded("x = order.price", "total = order.price * 2", "y = 1"), "price", "amount")
    assert find_candidates(burst)[0] == line_of(burst.after, "total")


def test_lines_made_of_the_same_words_are_asked_about() -> None:
    burst = change(
        padded('log.info("loaded", count)', 'log.info("stored", count)'), '("loaded", count)', '("loaded")'
    )
    assert line_of(burst.after, "stored") in find_candidates(burst)


def test_the_line_after_the_change_is_always_asked_about() -> None:
    burst = change("a = 1\nb = 2\nc = 3\n", "b = 2", "b = 4")
    assert find_candidates(burst) == [2]


def test_what_somebody_complains_about_is_asked_about() -> None:
    burst = change(padded("import os", "x = 1", "print(path)"), "import os", "import sys")
    at = burst.after.index("print(path)")
    assert line_of(burst.after, "print(path)") in find_candidates(burst, [at])
    assert line_of(burst.after, "print(path)") not in find_candidates(burst)


def test_callers_of_a_function_whose_lines_changed_are_asked_about() -> None:
    burst = change(padded("def area(width):", "x = area(2)"), "width", "width, height")
    assert line_of(burst.after, "x = area") in find_candidates(burst)


def test_keywords_and_short_names_are_no_mention() -> None:
    loop = change("for i in items:\n", "for i in items", "while items")
    assert changed_names(loop) == ([], [], ["items"])
    assert changed_names(change("size = 1\n", "size", "width")) == (["size"], ["width"], [])


@pytest.mark.parametrize("most", [1, 3])
def test_no_more_places_than_allowed(most: int) -> None:
    burst = change(padded(*[f"call(old_name, {n})" for n in range(9)]), "old_name", "new_name")
    assert len(find_candidates(burst, most=most)) == most


@given(
    before=st.text(alphabet="ab_ =\n", max_size=80),
    after=st.text(alphabet="ab_ =\n", max_size=80),
    problems=st.lists(st.integers(0, 80), max_size=3),
)
def test_every_place_is_a_line_of_the_text_outside_the_change(
    before: str, after: str, problems: list[int]
) -> None:
    burst = burst_between(before, after)
    if burst is None:
        return
    spots = find_candidates(burst, [p for p in problems if p <= len(after)], apart=2)
    assert len(spots) <= MOST
    first, last = after.count("\n", 0, burst.start), after.count("\n", 0, burst.new_end)
    for spot in spots:
        assert 0 <= spot < len(after.split("\n"))
        assert not first <= spot <= last
        assert after.split("\n")[spot].strip()
    assert all(b - a >= 2 for a, b in pairwise(sorted(spots)))

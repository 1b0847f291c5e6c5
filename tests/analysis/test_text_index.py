"""The longest context that stood before decides, whatever the spaces; what is passed over does not count."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keystroke.analysis.text_index import LONGEST, FollowingLines, Lexicon, TextContext, TextIndex


def index(*texts: str) -> TextIndex:
    lexicon = Lexicon()
    return TextIndex.build(lexicon, [(str(n), lexicon.lex(text)) for n, text in enumerate(texts)])


def after(before: str, *texts: str, without: str | None = None) -> FollowingLines | None:
    return index(*texts).find_continuations(TextContext.before(before), without)


def test_what_followed_is_the_rest_of_its_line() -> None:
    assert after("    total = fetch(", "x = 1\ntotal = fetch(url, 3)  \ny = 2\n") == FollowingLines(
        5, {"url, 3)": 1}
    )


def test_indentation_and_spaces_between_words_do_not_matter() -> None:
    assert after("if a:\n            b  = ", "if a:\n  b = call()\n") == FollowingLines(
        7, {"call()": 1}
    )  # a line's beginning is a word, too


@pytest.mark.parametrize(
    ("begun", "followed"),
    [("x.fra", {"me_width": 1}), ("x.frame_width", {"": 1}), ("x.frog", None), ("x.", {"frame_width": 1})],
)
def test_a_word_that_was_begun_has_to_be_gone_on_with(begun: str, followed: dict[str, int] | None) -> None:
    seen = after(f"a = {begun}", "b = x.frame_width\n")
    assert (dict(seen.followed) if seen is not None else None) == followed


def test_the_longest_context_counts_and_no_shorter_one() -> None:
    text = "close(door)\nopen(window)\nclose(window, slowly)\n"
    assert after("x\nclose(window", text) == FollowingLines(4, {", slowly)": 1})
    assert after("y = close(", text) == FollowingLines(2, {"door)": 1, "window, slowly)": 1})


def test_a_text_that_is_passed_over_is_no_evidence() -> None:
    texts = ("a = one(1)\n", "a = one(2)\n")
    assert after("a = one(", *texts) == FollowingLines(5, {"1)": 1, "2)": 1})
    assert after("a = one(", *texts, without="1") == FollowingLines(5, {"1)": 1})


def test_the_end_of_one_text_is_not_followed_by_the_beginning_of_the_next() -> None:
    assert after("alpha beta", "alpha beta", "gamma\n") == FollowingLines(3, {"": 1})
    seen = after("alpha beta\n", "alpha beta", "gamma\n")
    assert seen is None or "gamma" not in seen.followed


def test_nothing_is_found_where_the_last_words_are_new() -> None:
    assert after("unseen word ", "other words stand here\n") is None
    assert after("", "anything\n") is None
    assert after("alone", "alone again\n") is None


def test_texts_may_be_empty_and_hold_any_characters() -> None:
    assert after("é = ñ(", "", "\n\n  \n", "é = ñ(∞)\r\n") == FollowingLines(5, {"∞)": 1})


WORDS = st.sampled_from(["a", "b", "(", ".", "\n"])


@given(st.lists(WORDS, max_size=60), st.lists(WORDS, min_size=2, max_size=LONGEST - 4))
def test_an_index_finds_what_a_plain_search_finds(text: list[str], context: list[str]) -> None:
    """Against a search that compares every place word by word."""
    joined, before = " ".join(text), " ".join([*context, "("])
    seen = after(before, joined)
    expected = plain(joined, before)
    assert (None if seen is None else (seen.length, dict(seen.followed))) == expected


@given(
    st.lists(WORDS, max_size=60),
    st.lists(WORDS, min_size=2, max_size=12),
    st.sampled_from(["", "a", "b"]),
    st.integers(0, 14),
)
def test_asked_for_a_least_length_an_index_finds_the_same_or_nothing(
    text: list[str], context: list[str], begun: str, least: int
) -> None:
    known, before = index(" ".join(text)), TextContext.before(" ".join([*context, begun]))
    seen = known.find_continuations(before)
    expected = seen if seen is not None and seen.length >= least else None
    assert known.find_continuations(before, least=least) == expected


def plain(text: str, before: str) -> tuple[int, dict[str, int]] | None:
    def words(lines: list[str], first: bool) -> list[str]:
        found: list[str] = []
        for number, line in enumerate(lines):
            if line.strip() or (first and number == len(lines) - 1):
                found += ["\n", *re.findall(r"\w+|[^\w\s]", line)]
        return found

    lines = text.split("\n")
    context = words(before.split("\n"), True)[-LONGEST:]
    flat: list[tuple[str, str]] = []  # each word, and the rest of its line
    for line in lines:
        if line.strip():
            flat.append(("\n", line.strip()))
            flat += [(m[0], line[m.end() :].rstrip()) for m in re.finditer(r"\w+|[^\w\s]", line)]
    best: dict[int, Counter[str]] = {}
    for at in range(len(flat)):
        length = 0
        while length < min(at + 1, len(context)) and flat[at - length][0] == context[-1 - length]:
            length += 1
        if length >= 2:
            best.setdefault(length, Counter())[flat[at][1]] += 1
    return (max(best), dict(best[max(best)])) if best else None

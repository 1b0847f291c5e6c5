"""Taking a suggestion in parts comes to an end and loses nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keystroke.text.acceptance import next_line, next_word


@pytest.mark.parametrize(
    ("suggestion", "word", "line"),
    [
        ("foo(bar, baz)", "foo", "foo(bar, baz)"),
        (" + b\n    return c", " +", " + b\n"),
        ("(bar)", "(", "(bar)"),
        ("\n    return x\n    y", "\n    ", "\n    return x"),
        ("==1", "==", "==1"),
        ("", "", ""),
    ],
)
def test_a_word_and_a_line_are_what_an_eye_takes_them_for(suggestion: str, word: str, line: str) -> None:
    assert (next_word(suggestion), next_line(suggestion)) == (word, line)


@given(st.text(alphabet="ab_ ().=\n\t\ré", max_size=60), st.sampled_from([next_word, next_line]))
def test_parts_make_the_whole(suggestion: str, take: Callable[[str], str]) -> None:
    rest, parts = suggestion, []
    while rest:
        part = take(rest)
        assert part
        assert rest.startswith(part)
        parts.append(part)
        rest = rest[len(part) :]
    assert "".join(parts) == suggestion

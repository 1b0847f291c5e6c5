"""Texts and edits that go where bugs are: line ends, astral characters, combining marks, lone surrogates."""

from __future__ import annotations

from hypothesis import strategies as st

from keystroke.text import Edit

ALPHABET = "ab (){}\t\r\n\r\nxé☃漢😀👍🏽\u0301\u200d\ud800\udc00"
texts = st.text(st.sampled_from(ALPHABET), max_size=40)
ascii_texts = st.text(st.sampled_from("ab ()\t\r\n"), max_size=40)


@st.composite
def edits_of(draw: st.DrawFn, length: int, most: int = 5) -> tuple[Edit, ...]:
    """Up to `most` edits of a text of `length` that do not overlap."""
    count = draw(st.integers(0, most))
    cuts = sorted(draw(st.lists(st.integers(0, length), min_size=2 * count, max_size=2 * count)))
    return tuple(Edit(cuts[2 * i], cuts[2 * i + 1], draw(texts)) for i in range(count))


@st.composite
def edited(draw: st.DrawFn) -> tuple[str, tuple[Edit, ...]]:
    text = draw(texts)
    return text, draw(edits_of(len(text)))

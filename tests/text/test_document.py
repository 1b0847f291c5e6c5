from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_strategies import ascii_texts, edited, edits_of, texts

from keystroke.errors import InputError
from keystroke.text import Document, Edit, Encoding, Position
from keystroke.text.position import ENCODINGS

encodings = st.sampled_from(ENCODINGS)


def slow_line_starts(text: str) -> list[int]:
    """Line starts read off one character at a time."""
    return [0] + [
        p
        for p in range(1, len(text) + 1)
        if text[p - 1] == "\n" or (text[p - 1] == "\r" and text[p : p + 1] != "\n")
    ]


def units(text: str, encoding: Encoding) -> int:
    """How many units a text takes, one character at a time so that lone surrogates never pair up."""
    size = {"utf-8": 1, "utf-16": 2, "utf-32": 4}[encoding]
    name = encoding if encoding == "utf-8" else f"{encoding}-le"
    return sum(len(c.encode(name, "surrogatepass")) // size for c in text)


@given(texts | ascii_texts)
def test_lines_start_after_lf_crlf_and_cr(text: str) -> None:
    assert Document(text).line_starts.tolist() == slow_line_starts(text)


@given(texts | ascii_texts)
def test_a_large_text_has_the_same_lines_as_its_parts(text: str) -> None:
    large = (text + "|") * 400
    assert Document(large).line_starts.tolist() == slow_line_starts(large)


@given(texts | ascii_texts, encodings)
def test_every_offset_that_has_a_position_comes_back_from_it(text: str, encoding: Encoding) -> None:
    document = Document(text)
    for offset in range(len(text) + 1):
        if text[offset - 1 : offset + 1] == "\r\n" and offset:
            continue
        place = document.position(offset, encoding)
        assert document.offset(place.line, place.column, encoding) == offset
        start = document.line_span(place.line)[0]
        assert place.column == units(text[start:offset], encoding)


@given(texts, encodings, st.integers(0, 30), st.integers(0, 60))
def test_a_clamped_position_always_names_a_place_on_or_before_it(
    text: str, encoding: Encoding, line: int, column: int
) -> None:
    document = Document(text)
    offset = document.offset(line, column, encoding, clamp=True)
    place = document.position(offset, encoding)
    assert (place.line, place.column) <= (line, column)
    if line < document.line_count:
        assert place.line == line


@given(edited())
def test_the_line_index_carried_through_edits_equals_one_made_anew(
    case: tuple[str, tuple[Edit, ...]],
) -> None:
    text, edits = case
    document = Document(text)
    assert document.line_count >= 1  # makes the index
    after = document.apply(edits)
    assert after._starts is not None
    assert after.line_starts.tolist() == slow_line_starts(after.text)


@given(edited(), st.data())
def test_the_line_index_survives_many_versions(
    case: tuple[str, tuple[Edit, ...]], data: st.DataObject
) -> None:
    document = Document(case[0])
    assert document.line_count >= 1
    for version in range(1, 5):
        document = document.apply(data.draw(edits_of(len(document.text), most=3)))
        assert document.version == version
        assert document.line_starts.tolist() == slow_line_starts(document.text)


def test_an_index_nobody_asked_for_is_not_made() -> None:
    assert Document("a\nb").apply([Edit(0, 0, "x")])._starts is None


def test_the_old_version_is_untouched_by_apply() -> None:
    before = Document("a\r\nb", 3)
    starts = before.line_starts.copy()
    after = before.apply([Edit(2, 2, "\n")], time=1.5)
    assert (before.text, before.version) == ("a\r\nb", 3)
    assert np.array_equal(before.line_starts, starts)
    assert (after.text, after.version, after.time) == ("a\r\n\nb", 4, 1.5)


def test_columns_count_in_the_units_of_the_encoding() -> None:
    document = Document("x\né😀z")
    assert [document.position(5, e) for e in ENCODINGS] == [Position(1, 7), Position(1, 4), Position(1, 3)]
    assert document.position(5, "utf-32").column == 3
    assert document.offset(1, 3, "utf-16") == 4
    assert document.line(1) == "é😀z"


def test_a_column_inside_a_character_is_refused_or_clamped_to_its_start() -> None:
    document = Document("a😀b")
    with pytest.raises(InputError, match="inside a character that takes several utf-16 units"):
        document.offset(0, 2, "utf-16")
    assert document.offset(0, 2, "utf-16", clamp=True) == 1


@pytest.mark.parametrize(
    ("line", "column", "said"),
    [
        (0, 4, "column 4 is past the end of line 0, which has 3 utf-16 units"),
        (2, 0, "line 2 does not exist; the document has lines 0 to 1"),
        (-1, 0, "must be 0 or more"),
        (0, -1, "must be 0 or more"),
    ],
)
@pytest.mark.parametrize("text", ["abc\r\nd", "a☃c\r\nd"])
def test_a_position_outside_the_document_is_refused_in_words(
    text: str, line: int, column: int, said: str
) -> None:
    with pytest.raises(InputError, match=said):
        Document(text).offset(line, column)


def test_clamping_stops_before_the_line_end() -> None:
    document = Document("abc\r\nd")
    assert document.offset(0, 99, clamp=True) == 3
    assert document.offset(99, 0, clamp=True) == 6


def test_an_offset_outside_the_document_is_refused() -> None:
    with pytest.raises(InputError, match="offset 4 is outside the document, which has 3 characters"):
        Document("abc").position(4)


def test_an_editors_range_becomes_an_edit() -> None:
    document = Document("one\ntwo\n")
    assert document.edit(Position(0, 1), Position(1, 99), "x") == Edit(1, 7, "x")
    with pytest.raises(InputError, match="must not end"):
        document.edit(Position(1, 0), Position(0, 0), "")

from __future__ import annotations

import argparse
import inspect
import json.decoder
import textwrap
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keystroke.assist.edit.matching import MatchResult, apply_replacement
from keystroke.assist.edit.operations import EditFailure, EditFailureReason, Replacement, SearchReplace
from keystroke.assist.edit.splice import split_lines


def change(text: str, search: str, new: str, **more: object) -> str | EditFailureReason:
    """The text after one replacement, or the reason why there is none."""
    split = SearchReplace(tuple(search.split("\n")) if search else (), tuple(new.split("\n")) if new else ())
    result = apply_replacement(text, Replacement("f", (split,), **more))  # type: ignore[arg-type]
    return result.text if isinstance(result, MatchResult) else result.reason


def test_line_ends_of_the_file_are_kept_whatever_the_block_uses() -> None:
    assert change("a\r\nb\r\nc\r\n", "b", "B\nB2") == "a\r\nB\r\nB2\r\nc\r\n"
    assert change("a\rb\rc", "b", "B") == "a\rB\rc"


def test_a_file_without_final_newline_stays_without_one() -> None:
    assert change("a\nb", "b", "B\nC") == "a\nB\nC"
    assert change("a\nb", "a", "A") == "A\nb"
    assert change("a\nb\n", "b", "B\nC") == "a\nB\nC\n"
    assert change("a\nb", "b", "") == "a"


def test_mixed_line_ends_change_only_where_lines_change() -> None:
    assert change("a\r\nb\nc\r\n", "b", "B") == "a\r\nB\nc\r\n"


def test_context_lines_keep_the_files_own_white_space() -> None:
    assert (
        change("if x:  \n\treturn 1\n", "if x:\n    return 1", "if x:\n    return 2")
        == "if x:  \n\treturn 2\n"
    )


@pytest.mark.parametrize(
    ("text", "search", "new", "result"),
    [
        # The block lost the outer indentation.
        ("class A:\n    def f(self):\n        return 1\n", "def f(self):\n    return 1",
         "def f(self):\n    x = 2\n    if x:\n        return x",
         "class A:\n    def f(self):\n        x = 2\n        if x:\n            return x\n"),
        # The file uses tabs, the block spaces.
        ("func f() {\n\tif a {\n\t\tb()\n\t}\n}\n", "    if a {\n        b()\n    }",
         "    if a {\n        b()\n        for {\n            c()\n        }\n    }",
         "func f() {\n\tif a {\n\t\tb()\n\t\tfor {\n\t\t\tc()\n\t\t}\n\t}\n}\n"),
        # The block has too much of it.
        ("def f():\n    return 1\n", "    def f():\n        return 1", "    def f():\n        return 2",
         "def f():\n    return 2\n"),
        # The file uses two spaces, the block tabs.
        ("a {\n  b {\n    c;\n  }\n}\n", "\tb {\n\t\tc;", "\tb {\n\t\tc;\n\t\t\td;",
         "a {\n  b {\n    c;\n      d;\n  }\n}\n"),
        # The matched line shows no indentation, but the rest of the file does.
        ("import a\n\ndef f():\n    pass\n", "import a", "import a\nif a:\n\tb()",
         "import a\nif a:\n    b()\n\ndef f():\n    pass\n"),
        # Two spaces a level in the file, four in the block: what goes deeper goes by the file's measure.
        ("  a {\n    b;\n  }\n", "    a {\n        b;", "    a {\n        b;\n            c;",
         "  a {\n    b;\n      c;\n  }\n"),
        # Further out than any line the block repeats.
        ("def f():\n    if a:\n        x = 1\n", "\t\tx = 1", "\t\tx = 1\n\ty = 2",
         "def f():\n    if a:\n        x = 1\n    y = 2\n"),
    ],
)  # fmt: skip
def test_indentation_is_repaired_to_the_files_own(text: str, search: str, new: str, result: str) -> None:
    assert change(text, search, new) == result


def test_indentation_that_follows_no_rule_is_refused() -> None:
    assert change("  a\n      b\n", "    a\n    b", "    a\n    c") is EditFailureReason.INDENTATION


def test_two_equal_places_are_ambiguous_and_their_lines_are_named() -> None:
    result = apply_replacement("x\ny\nx\n", Replacement("f", (SearchReplace(("x",), ("z",)),)))
    assert isinstance(result, EditFailure)
    assert result.reason is EditFailureReason.AMBIGUOUS
    assert "at 1, 3" in result.message


def test_a_hint_chooses_between_equal_places() -> None:
    text = "x\na\nx\nb\nx\n"
    assert change(text, "x", "z", near=3) is EditFailureReason.AMBIGUOUS  # lines 2 and 4 are equally near
    assert change(text, "x", "z", near=4) == "x\na\nx\nb\nz\n"
    assert change(text, "x", "z", within=("a",)) == "x\na\nz\nb\nx\n"
    assert change(text, "x", "z", at_end=True) == "x\na\nx\nb\nz\n"
    assert change(text, "x", "z", within=("missing",)) is EditFailureReason.NOT_FOUND


def test_a_nearly_equal_place_is_taken_only_if_there_is_one() -> None:
    text = "alpha = compute(first, second)\nomega = other(thing)\n"
    assert change(text, "alpha = compute(first, sekond)", "alpha = 1") == "alpha = 1\nomega = other(thing)\n"
    twice = "value_one = compute(a, b)\nvalue_two = compute(a, b)\n"
    assert change(twice, "value_six = compute(a, b)", "x") is EditFailureReason.AMBIGUOUS
    assert change(text, "nothing like it at all", "x") is EditFailureReason.NOT_FOUND


def test_lines_remembered_wrongly_but_not_changed_keep_the_files_text() -> None:
    text = "def area(width, height):\n    # multiply both\n    result = width * height\n    return result\n"
    search = (
        "def area(width, height):\n    # multiply the two\n    result = width * height\n    return result"
    )
    new = (
        "def area(width, height):\n    # multiply the two\n    result = width * height * 2\n    return result"
    )
    assert change(text, search, new) == text.replace("height\n    return", "height * 2\n    return")


def test_part_of_a_line_can_be_replaced_where_it_occurs_once() -> None:
    assert change("x = foo(1) + bar(2)\r\n", "foo(1)", "baz(3)") == "x = baz(3) + bar(2)\r\n"
    assert change("foobar = compute(everything)\n", "foo", "baz") is EditFailureReason.NOT_FOUND
    assert change("x = foo(1) + bar(2)\n", "foo(1)", "baz(3)", in_order=True) is EditFailureReason.NOT_FOUND


def test_an_empty_search_is_refused_unless_the_file_is_empty() -> None:
    assert change("a\n", "", "b") is EditFailureReason.EMPTY_SEARCH
    assert change("", "", "b") == "b\n"


def test_blank_lines_around_both_sides_do_not_prevent_a_match() -> None:
    assert change("a\nb\nc\n", "\nb\n", "\nB\n") == "a\nB\nc\n"


def test_of_several_readings_the_first_that_fits_is_meant() -> None:
    readings = (
        SearchReplace(("Title", "=====", "nope"), ()),
        SearchReplace(("Title", "=====", "old"), ("Title", "=====", "new")),
    )
    assert apply_replacement("Title\n=====\nold\n", Replacement("f", readings)) == MatchResult(
        "Title\n=====\nnew\n", 3
    )


SOURCES = [inspect.getsource(module) for module in (argparse, json.decoder, textwrap, threading)]


@given(st.sampled_from(SOURCES), st.data())
def test_blocks_quoted_from_real_code_land_where_they_were_taken_or_are_refused(
    text: str, data: st.DataObject
) -> None:
    lines = text.split("\n")
    size = data.draw(st.integers(2, 10))
    at = data.draw(st.integers(0, len(lines) - size - 1))
    quoted = lines[at : at + size]
    changed = list(quoted)
    where = data.draw(st.integers(0, size - 1))
    deep = quoted[where][: len(quoted[where]) - len(quoted[where].lstrip())]
    changed[where : where + data.draw(st.integers(0, 1))] = [f"{deep}if new:", f"{deep}    call()"]
    wanted = "\n".join([*lines[:at], *changed, *lines[at + size :]])
    # Models often drop the indentation that all lines share.
    shared = min((len(line) - len(line.lstrip()) for line in quoted + changed if line.strip()), default=0)
    dropped = data.draw(st.sampled_from([0, shared]))
    split = SearchReplace(tuple(line[dropped:] for line in quoted), tuple(line[dropped:] for line in changed))
    starts = [i for i in range(len(lines)) if lines[i : i + size] == list(split.search)]
    result = apply_replacement(text, Replacement("f", (split,)))
    if dropped and len(starts) == 1:
        return  # without its indentation it is an exact quote of another place, which is then meant
    if isinstance(result, MatchResult):
        assert result.text == wanted
    else:
        assert result.reason in (EditFailureReason.AMBIGUOUS, EditFailureReason.EMPTY_SEARCH)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[str], int, int, list[str]]:
    """A file of distinct lines with ends of their own, a range in it, and lines that take its place."""
    count = draw(st.integers(1, 12))
    body = st.text(st.sampled_from("ab \té😀"), max_size=6)
    ends = st.sampled_from(["\n", "\r\n", "\r"])
    # A letter after the number: a lone CR before an empty line's LF would be one line end.
    lines = [f"{i}x{draw(body)}{draw(ends)}" for i in range(count)]
    if draw(st.booleans()):
        lines[-1] = lines[-1].rstrip("\r\n")
    start = draw(st.integers(0, count - 1))
    end = draw(st.integers(start + 1, count))
    new = draw(st.lists(st.text(st.sampled_from("pq "), min_size=1, max_size=5), max_size=4))
    return lines, start, end, new


@given(cases())
def test_every_byte_outside_the_replaced_lines_is_kept(case: tuple[list[str], int, int, list[str]]) -> None:
    lines, start, end, new = case
    split = SearchReplace(tuple(line.rstrip("\r\n") for line in lines[start:end]), tuple(new))
    result = apply_replacement("".join(lines), Replacement("f", (split,)))
    assert isinstance(result, MatchResult)
    after = split_lines(result.text)
    # A line before a removed tail may become the last one and then ends as the file ended.
    assert [line.rstrip("\r\n") for line in after] == [
        line.rstrip("\r\n") for line in lines[:start] + [f"{line}\n" for line in new] + lines[end:]
    ]
    assert after[:start][:-1] == lines[:start][:-1]
    if end < len(lines):
        assert after[len(after) - (len(lines) - end) :] == lines[end:]
    if after:
        assert after[-1].endswith(("\r", "\n")) == lines[-1].endswith(("\r", "\n"))

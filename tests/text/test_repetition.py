"""Loops are seen in a stream, and code that merely resembles itself is none."""

from __future__ import annotations

from pathlib import Path

import pytest

import keystroke
from keystroke.text.repetition import LoopDetector, loop_start


@pytest.mark.parametrize("piece", ["more ", "I will.\n", "def f():\n    pass\n\n\n", "x" * 300 + "\n"])
def test_a_loop_is_cut_to_its_first_round(piece: str) -> None:
    start = "Once upon a time "
    text = start + piece * min(60, 2300 // len(piece))  # all of it is looked at
    at = loop_start(text)
    assert at is not None
    assert len(start) < at <= len(start + piece)
    assert text[at:].count(piece) >= 3


def test_of_a_text_longer_than_what_is_looked_at_only_the_end_is_cut() -> None:
    text = "Once upon a time " + ("x" * 300 + "\n") * 60
    at = loop_start(text)
    assert at is not None
    assert len(text) - 2400 < at < len(text) - 3 * 301


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "-" * 500,
        "0, " * 300,
        "\n" * 500,
        "| --- | --- |\n" * 40,
        "".join(f"case {n}: return {n};\n" for n in range(200)),
    ],
)
def test_rulers_tables_and_rows_of_figures_are_no_loops(text: str) -> None:
    assert loop_start(text) is None


def test_no_source_file_of_this_project_loops() -> None:
    for path in Path(keystroke.__file__).parent.rglob("*.py"):
        text = path.read_text("utf-8")
        assert not any(loop_start(text[:end]) for end in range(500, len(text), 997)), path


def test_a_stream_is_seen_to_loop_however_it_is_cut() -> None:
    for size in (1, 3, 50, 1000):
        watch = LoopDetector()
        text = "The answer is: " + "yes it is. " * 100
        assert any(watch.feed(text[at : at + size]) for at in range(0, len(text), size)), size

"""Loops are seen in a stream, and code that merely resembles itself is none."""

from __future__ import annotations

from pathlib import Path

import pytest

import keystroke
from keystroke.text.repetition import LoopWatch, loop_start


@pytest.mark.parametrize("piece", ["more ", "I will.\n", "def f():\n    pass\n\n\n", "x" * 300 + "\n"])
def test_a_loop_is_cut_to_its_first_round(piece: str) -> None:
    text = "Once upon a time " + piece * 60
    at = loop_start(text)
    assert at is not None
    assert at <= len("Once upon a time ") + len(piece) or text[:at].startswith("Once")
    assert text[at:].count(piece) >= 3


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
        watch = LoopWatch()
        text = "The answer is: " + "yes it is. " * 100
        assert any(watch.looping(text[at : at + size]) for at in range(0, len(text), size)), size

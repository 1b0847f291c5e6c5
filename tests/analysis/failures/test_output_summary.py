"""The part of a failing command's output that says what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from keystroke.analysis.failures.output_summary import distinct_reports, summarize_output

TESTS = """
from double import double


def helper(value):
    return double(value)


def test_first():
    values = [1, 2]
    assert double(values[0]) == 2


def test_again():
    assert double(1) == 2


def test_through_a_helper():
    assert helper(None) == 4


""" + "\n\n".join(f"def test_more_{n}():\n    assert double({n}) == {2 * n}" for n in range(10, 60))


def reported(folder: Path, source: str) -> str:
    (folder / "double.py").write_text(source)
    (folder / "test_double.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header"],
        cwd=folder,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # reading those here takes seconds
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout


def test_the_first_failures_that_differ_are_told_with_what_was_expected(tmp_path: Path) -> None:
    output = reported(tmp_path, "def double(n):\n    return n + 0\n")
    told = summarize_output(output)
    assert len(told) <= 2000 < len(output)
    assert "values = [1, 2]" in told
    assert ">       assert double(values[0]) == 2" in told
    assert "assert 1 == 2" in told
    assert told.count("assert 1 == 2") == 1  # said once, though two tests say it
    assert told.splitlines()[-1].startswith("53 failed")


def test_a_failure_below_a_test_shows_both_places(tmp_path: Path) -> None:
    told = summarize_output(reported(tmp_path, "def double(n):\n    return n * 2\n"))
    assert "assert helper(None) == 4" in told
    assert ">       return n * 2" in told
    assert "TypeError" in told
    assert "double.py:2: TypeError" in told  # where it is mended, for whoever looks for the place


def test_what_cannot_be_imported_is_told(tmp_path: Path) -> None:
    told = summarize_output(reported(tmp_path, "def double(n:\n    return n\n"))
    assert "SyntaxError" in told


def test_of_anything_else_the_end_is_told() -> None:
    assert summarize_output("short") == "short"
    long = "\n".join(f"line {n}" for n in range(1000)) + "\nerror: no such thing"
    assert summarize_output(long, 100).endswith("error: no such thing")
    assert len(summarize_output(long, 100)) == 101


def test_each_failure_that_differs_by_itself(tmp_path: Path) -> None:
    each = distinct_reports(reported(tmp_path, "def double(n):\n    return n + 0\n"))
    assert len(each) == 4
    assert "values = [1, 2]" in each[0]
    assert [part.count("double.py:") for part in each] == [1, 1, 1, 1]
    assert distinct_reports("nothing of a report\n") == []

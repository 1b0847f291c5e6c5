"""Which regular expressions can run away, told without running them."""

from __future__ import annotations

import pytest

from keystroke.analysis.audit import Auditor
from keystroke.analysis.audit.rules.backtracking import backtracks_exponentially


@pytest.mark.parametrize(
    "pattern",
    [
        r"^(a+)+$",
        r"(a*)*b",
        r"(.*)*x",
        r"(\w+\s*)+$",
        r"^([\w.-]+)*@x$",
        r"(a|aa)+$",
        r"(\d+|\w+)*!",
        r"(x+x+)+y",
        r"^(([a-z])+.)+[A-Z]$",
        r"(?:\s*,?\s*)*;",
        r"(?<name>[a-z]+)*\d",
    ],
)
def test_a_text_that_can_be_cut_into_rounds_in_many_ways_runs_away(pattern: str) -> None:
    assert backtracks_exponentially(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        r"^[a-z]+(?:-[a-z]+)*$",
        r"\+[a-z0-9]+(?:[-_.][a-z0-9]+)*",
        r"(\d+,)*\d+",
        r'(?:[^"\\]|\\.)*"',
        r"(foo|bar)+$",
        r"^(\w+\.)+com$",
        r"([a-z]+=[^&]*&)*$",
        r"^(?:\d{1,3}\.){3}\d{1,3}$",
        r"(\s+\w+)*;",
        r"(a+)+",
        r"(",
        r"",
    ],
)
def test_rounds_with_one_cut_only_do_not(pattern: str) -> None:
    assert not backtracks_exponentially(pattern)


def test_hostile_nesting_is_judged_or_left_alone() -> None:
    assert backtracks_exponentially("(" * 80 + "a" + ")*" * 80 + "b") in (True, False)
    text = "const p = /" + "(" * 400 + "a" + ")*" * 400 + "b/;\n"
    assert isinstance(Auditor("javascript").audit(text), tuple)

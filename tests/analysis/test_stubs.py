"""Functions that wait to be written."""

from __future__ import annotations

import pytest

from keystroke.analysis.stubs import find_stubs


@pytest.mark.parametrize(
    "body",
    [
        "pass",
        "...",
        '"""Half of it."""',
        '"""Half."""\n    pass',
        "raise NotImplementedError",
        "raise NotImplementedError('soon')",
    ],
)
def test_a_body_that_does_nothing_waits_to_be_written(body: str) -> None:
    assert find_stubs(f"def half(n):\n    {body}\n") == ["half"]


@pytest.mark.parametrize("body", ["return None", "n = 1", "raise ValueError", "raise", "yield", "half(n)"])
def test_a_body_that_does_something_is_written(body: str) -> None:
    assert find_stubs(f"def half(n):\n    {body}\n") == []


def test_methods_count_in_the_order_of_the_text_and_what_does_not_parse_has_none() -> None:
    text = (
        "class A:\n    def b(self):\n        pass\n    def c(self):\n        return 1\nasync def a(): ...\n"
    )
    assert find_stubs(text) == ["b", "a"]
    assert find_stubs("    def b(self):\n        pass\n") == ["b"]  # a part of a file
    assert find_stubs("def (:\n    pass") == []

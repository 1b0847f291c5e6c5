"""Unrequested changes are removed, and what stays keeps its place: docstrings first, comments above their
line."""

from __future__ import annotations

import pytest

from keystroke.assist.edit.drift import remove_drift

_OLD = '''import math


def area(radius):
    """The area of a circle."""
    # uses pi
    return math.pi * radius ** 2


def mean(values):
    """The mean of some numbers.

    Raises where there are none.
    """

    total = sum(values)  # all at once
    return total / len(values)
'''
_GUARD = '    if radius < 0:\n        raise ValueError("negative")\n'


@pytest.mark.parametrize(
    "written",
    [
        _OLD.replace("    # uses pi\n", f"{_GUARD}    # uses pi\n"),
        _OLD.replace("    # uses pi\n", _GUARD),  # the comment is lost
        _OLD.replace('    """The area of a circle."""\n    # uses pi\n', f"{_GUARD}    # uses pi\n"),
        _OLD.replace('circle."""\n    # uses pi\n', f'disk."""\n{_GUARD}    # uses pi\n'),  # reworded
        _OLD.replace("    # uses pi\n", f"    # refuses nonsense\n{_GUARD}    # uses pi\n"),  # remarked on
    ],
)
def test_a_guard_goes_below_the_docstring_and_above_the_comment(written: str) -> None:
    wanted = _OLD.replace("    # uses pi\n", f"{_GUARD}    # uses pi\n")
    assert remove_drift(_OLD, written, "area.py", "raise ValueError if the radius is negative") == wanted


def test_a_guard_below_a_docstring_of_several_lines_and_a_blank_line() -> None:
    guard = "    if not values:\n        return 0\n\n"
    written = _OLD.replace("    total", f"{guard}    total").replace("  # all at once", "")
    wanted = _OLD.replace("    total", f"{guard}    total")
    assert remove_drift(_OLD, written, "area.py", "return 0 for an empty list") == wanted


def test_a_changed_line_below_a_docstring_keeps_it() -> None:
    written = _OLD.replace('    """The area of a circle."""\n', "").replace("radius ** 2", "radius * radius")
    wanted = _OLD.replace("radius ** 2", "radius * radius")
    assert remove_drift(_OLD, written, "area.py", "multiply instead of raising to a power") == wanted


def test_a_changed_signature_keeps_the_docstring_and_the_order_below_it() -> None:
    body = f"def area(radius, strict=True):\n{_GUARD}    return math.pi * radius ** 2\n"
    start, end = _OLD.index("def area"), _OLD.index("\n\ndef mean")
    wanted = (
        "def area(radius, strict=True):\n"
        f'    """The area of a circle."""\n{_GUARD}    # uses pi\n    return math.pi * radius ** 2\n'
    )
    found = remove_drift(_OLD, _OLD[:start] + body + _OLD[end:], "area.py", "add a parameter strict")
    assert found == _OLD[:start] + wanted + _OLD[end:]


def test_comments_of_a_new_definition_stay() -> None:
    added = '\n\ndef double(value):\n    """Twice the value."""\n    # by adding\n    return value + value\n'
    assert remove_drift(_OLD, _OLD + added, "area.py", "add a function double") == _OLD + added


def test_a_comment_goes_with_the_line_it_explains() -> None:
    written = _OLD.replace("    # uses pi\n    return math.pi * radius ** 2\n", "    return tau(radius)\n")
    found = remove_drift(_OLD, written, "area.py", "call tau")
    assert found == _OLD.replace("    return math.pi * radius ** 2\n", "    return tau(radius)\n")


def test_block_comments_of_other_languages_stay_above_their_line() -> None:
    old = "function load(path) {\n  /* read\n     all of it */\n  var y = read(path);\n  return y;\n}\n"
    guard = "  if (!path) {\n    return null;\n  }\n"
    written = old.replace("  /* read\n     all of it */\n", guard)
    wanted = old.replace("  /* read", f"{guard}  /* read")
    assert remove_drift(old, written, "load.js", "return null if there is no path") == wanted

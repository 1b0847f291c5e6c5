"""A text checked piece by piece: the same words as checked whole, whatever is typed into it."""
# ruff: noqa: E501 - a case is one line

from __future__ import annotations

import ast
import sys
import sysconfig
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keystroke.analysis.check import Diagnostic, Project
from keystroke.analysis.check.check import check
from keystroke.analysis.check.flakes import separable
from keystroke.analysis.check.pieces import single_piece, split_pieces

PROGRAM = '''"""A module.
looks = like code
"""

from __future__ import annotations

import json
import os
import sys as system
from typing import TYPE_CHECKING, Literal, overload

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Shape", "total", "missing"]
TEXT = """
def not_a_function(:
"""


@overload
def total(x: int) -> int: ...
@overload
def total(x: str) -> str: ...
def total(x):
    global counted
    counted = json.dumps(x)
    return later(x)


class Shape:
    kind: Literal["round", "square"] = "round"

    def area(self, path: "Path") -> float:
        self.size = 1.0
        return self.sizes + undefined_here


class Round(Shape):
    def name():
        return self.kind


def later(value):
    import os
    print("{value} and {nowhere}")
    return valu if value else counted


value = early
early = [item for item in range(3)]
if value:
    print(
late
    )
else:
    late = 1
'''


def plain(text: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Diagnostic, ...]:
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[check.__module__], "split_pieces", single_piece)
        return check(text, "a.py", project=Project(), fixes=False)


def test_the_pieces_are_the_text_and_more_than_one() -> None:
    found = split_pieces(PROGRAM)
    assert found is not None
    assert "".join(piece.text for piece in found) == PROGRAM
    assert len(found) > 5
    assert separable(found)


def test_the_program_has_the_same_errors_in_pieces_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    found = check(PROGRAM, "a.py", project=Project(), fixes=False)
    assert found == plain(PROGRAM, monkeypatch)
    codes = {(item.code, item.subject) for item in found}
    assert {
        ("undefined-export", "missing"),
        ("undefined-name", "undefined_here"),
        ("undefined-name", "valu"),
        ("undefined-name", "early"),
        ("unused-import", "sys as system"),
        ("unknown-self-attribute", "sizes"),
    } <= codes
    assert not codes & {
        ("undefined-name", "later"),
        ("undefined-name", "counted"),
        ("undefined-name", "round"),
    }


SNIPPETS = ["x", "(", ")", ":", '"', '"""', "\n", "    ", "\n\n\ndef later(a):\n    return os\n", "import os\n", "\ndel value\n", "@", "#", "\\\n", "\nelse:\n", "class A: pass\n", "\n__all__ += ['x']\n", "system", "from os.path import *\n"]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    changes=st.lists(
        st.tuples(st.integers(0, len(PROGRAM)), st.integers(0, 30), st.sampled_from(SNIPPETS)),
        min_size=1,
        max_size=3,
    )
)
@example(changes=[(3, 0, "x"), (408, 0, "\\\n")])  # a backslash alone on a line of a function
def test_whatever_is_typed_the_words_are_those_of_the_whole(changes: list[tuple[int, int, str]]) -> None:
    text = PROGRAM
    for start, removed, new in changes:
        text = text[:start] + new + text[start + removed :]
    with pytest.MonkeyPatch.context() as patch:
        assert check(text, "a.py", project=Project(), fixes=False) == plain(text, patch)


STATEMENTS = [
    *(ast.unparse(node) + "\n" for node in ast.parse(PROGRAM).body[1:]),
    "import os\n",
    "del value\n",
    "json = 1\n",
    "print(json)\n",
    "from os.path import *\n",
    "try: pass\nexcept E as json: pass\n",
    "try:\n    import q\nexcept ImportError:\n    q = None\n",
    "for os in []: pass\n",
    "def h():\n    global os\n    os = 1\n",
    "[json := 1 for i in []]\n",
    "class B(Shape):\n    os = os\n",
    "@later\ndef decorated(): ...\n",
    "import a.b\nimport a.c\n",
    "late: int\n",
]


@settings(max_examples=80, deadline=None)
@given(chosen=st.lists(st.sampled_from(STATEMENTS), min_size=2, max_size=14))
def test_whatever_statements_follow_each_other_the_words_are_those_of_the_whole(chosen: list[str]) -> None:
    text = "".join(chosen)
    with pytest.MonkeyPatch.context() as patch:
        assert check(text, "a.py", project=Project(), fixes=False) == plain(text, patch)


def test_installed_files_have_the_same_errors_in_pieces_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    files = sorted(Path(sysconfig.get_path("purelib"), "pyflakes").glob("*.py"))
    files += sorted(Path(sysconfig.get_path("purelib"), "jinja2").glob("*.py"))[:12]
    assert len(files) > 10
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert check(text, "a.py", project=Project(), fixes=False) == plain(text, monkeypatch), file

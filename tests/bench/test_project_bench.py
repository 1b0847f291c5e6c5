"""Cases are found in their projects, and a copy of a case's file is no evidence for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench.in_project import CaseLocation, compare_rows, fetch_projects, index_around, locate

from keystroke.analysis.text_index import TextContext
from keystroke.text.cases import CompletionCase

TEXT = "import math\n\n\n" + "".join(f"def part_{n}(width):\n    return width * {n}\n" for n in range(9))
CASE = CompletionCase(
    "rest_of_line", "boxes", "1.0", "MIT", "src/boxes.py",
    TEXT[: TEXT.index("width * 4")], "width * 4", TEXT[TEXT.index("width * 4") + 9 :],
)  # fmt: skip
OTHER = "def area(box):\n    return box.width * box.height\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {"src/boxes.py": TEXT, "build/lib/boxes.py": TEXT, "src/area.py": OTHER, "src/page.js": "x\n"}
    (tmp_path / "boxes@1.0.json").write_text(json.dumps(files))
    return tmp_path


def test_a_case_is_found_with_the_whole_file_around_it(folder: Path) -> None:
    place = locate(CASE, folder)
    assert isinstance(place, CaseLocation)
    assert place.before + CASE.middle + place.after == TEXT
    assert fetch_projects([CASE], folder) == 1  # what is there is not asked for


def test_a_place_that_is_not_in_the_release_is_left_out(folder: Path) -> None:
    other = CompletionCase(**{**{f: getattr(CASE, f) for f in CASE.__slots__}, "prefix": "something else"})
    assert locate(other, folder) is None


def test_copies_of_the_file_and_other_languages_are_no_evidence(folder: Path) -> None:
    place = locate(CASE, folder)
    assert place is not None
    index = index_around(place)
    assert set(index.spans) == {"src/area.py"}
    assert index.find_continuations(TextContext.before("x = box.")) is not None


def test_rows_are_compared_place_by_place() -> None:
    assert compare_rows([True, True, False], [False, True, True]) == {"only_before": 1, "only_now": 1}

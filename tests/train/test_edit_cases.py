"""Cases of next edits: made from real releases, judged by place and by text."""

from __future__ import annotations

from pathlib import Path

import pytest

from keystroke.errors import InputError
from keystroke.train import tokenizer as code_tokenizer
from keystroke.train.card import edit_samples
from keystroke.train.corpus.hunks import Hunk
from keystroke.train.corpus.trajectories import FileEdit
from keystroke.train.edit_cases import (
    EditCase,
    WordJudge,
    edit_summary,
    evaluate_edits,
    make_edit_cases,
    read_edit_cases,
    write_edit_cases,
)
from keystroke.train.edits import edit_format

ROOT = Path(__file__).parents[2]
FORM = edit_format(code_tokenizer.plain(code_tokenizer.load(ROOT / "models" / "keystroke-80m")))
BEFORE = "\n".join(f"call_{i} = old_name({i})" if i % 30 == 0 else f"x_{i} = {i}" for i in range(150))
EDIT = FileEdit(
    "project", "MIT", "1.0", "1.1", "pkg/module.py", BEFORE,
    [Hunk(i, [f"call_{i} = old_name({i})"], [f"call_{i} = new_name({i})"]) for i in range(0, 150, 30)],
)  # fmt: skip


class Knowing:
    """Looks for what is still old, and makes it new."""

    def chances(self, case: EditCase) -> list[float]:
        return [float(any("old_name" in line for line in case.lines[p.first : p.last])) for p in case.places]

    def rewrite(self, case: EditCase, place: int) -> list[str] | None:
        region = case.places[place]
        return [line.replace("old_name", "new_name") for line in case.lines[region.first : region.last]]


class Eager:
    """Everything changes, into nothing at all."""

    def chances(self, case: EditCase) -> list[float]:
        return [1.0] * len(case.places)

    def rewrite(self, case: EditCase, place: int) -> list[str] | None:
        return []


def test_who_knows_scores_full_marks_and_who_guesses_does_not() -> None:
    cases = make_edit_cases([EDIT], FORM, 8, seed=1)
    assert len(cases) == 8
    report = evaluate_edits(Knowing(), cases)
    assert report.place.value == report.text.value == report.both.value == report.offered.value == 1.0
    assert report.alarms.value == 0.0
    assert report.alarms.of + report.place.of == 8
    guessed = evaluate_edits(Eager(), cases)
    assert guessed.alarms.value == 1.0
    assert guessed.text.value == guessed.both.value == 0.0
    assert guessed.offered.value < 1.0


def test_a_case_has_one_place_that_changes_or_none() -> None:
    for case in make_edit_cases([EDIT], FORM, 8, seed=2):
        stale = [
            any("old_name" in line for line in case.lines[p.first + 1 : p.last - 1]) for p in case.places
        ]
        assert sum(stale) <= (case.right is not None)
        assert (case.answer is None) == (case.right is None)


def test_cases_survive_a_file(tmp_path: Path) -> None:
    cases = make_edit_cases([EDIT], FORM, 4, seed=3)
    write_edit_cases(tmp_path / "cases.xz", cases)
    assert read_edit_cases(tmp_path / "cases.xz") == cases
    (tmp_path / "bad.xz").write_bytes(b"nothing")
    with pytest.raises(InputError, match="make them again"):
        read_edit_cases(tmp_path / "bad.xz")


def test_the_committed_cases_are_permissive_and_ask_both_ways() -> None:
    cases = read_edit_cases(ROOT / "bench" / "data" / "edits.jsonl.xz")
    assert sum(case.right is None for case in cases) == 100
    assert sum(case.right is not None for case in cases) == 200
    assert all(case.licence and "GPL" not in case.licence for case in cases)
    assert all(case.history for case in cases)
    report = evaluate_edits(WordJudge(), cases[:60], sure=0.3)
    assert 0.1 < report.place.value < 0.6
    assert set(edit_summary(report)) >= {"edit_place", "edit_text_95", "edit_alarms_of"}


def test_the_card_shows_edits_right_and_wrong() -> None:
    cases = make_edit_cases([EDIT], FORM, 6, seed=5)
    shown = edit_samples(Knowing(), cases, 6)
    assert "+call_30 = new_name(30)" in shown or "new_name" in shown
    assert "(exact)" in shown
    assert "nothing was left to do" in shown
    assert "the file has" in edit_samples(Eager(), cases, 6)

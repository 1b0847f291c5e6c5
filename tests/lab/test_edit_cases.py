"""Cases of next edits: made from real releases, judged by place and by text."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from keystroke.errors import InputError
from keystroke.text.cases import write_rows
from keystroke_lab.corpus.hunks import EditHunk
from keystroke_lab.corpus.trajectories import FileEdit
from keystroke_lab.evaluation.edit_cases import (
    EditCase,
    WordJudge,
    edit_case,
    edit_summary,
    evaluate_edits,
    read_edit_cases,
)
from keystroke_lab.pretraining.edit_sequences import edit_format, steps
from keystroke_lab.tokenizer import code_tokenizer

ROOT = Path(__file__).parents[2]
FORM = edit_format(code_tokenizer.plain(code_tokenizer.load(ROOT / "models" / "keystroke-80m")))
BEFORE = "\n".join(f"call_{i} = old_name({i})" if i % 30 == 0 else f"x_{i} = {i}" for i in range(150))
EDIT = FileEdit(
    "project", "MIT", "1.0", "1.1", "pkg/module.py", BEFORE,
    [EditHunk(i, [f"call_{i} = old_name({i})"], [f"call_{i} = new_name({i})"]) for i in range(0, 150, 30)],
)  # fmt: skip


def make_cases(count: int, seed: int) -> list[EditCase]:
    """`count` cases of EDIT, two in three with a change left to make."""
    rng = random.Random(seed)
    pool = steps([EDIT])
    found: list[EditCase] = []
    while len(found) < count:
        case = edit_case(rng.choice(pool), FORM, rng, positive=len(found) % 3 != 2)
        if case is not None:
            found.append(case)
    return found


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
    cases = make_cases(8, seed=1)
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
    for case in make_cases(8, seed=2):
        stale = [
            any("old_name" in line for line in case.lines[p.first + 1 : p.last - 1]) for p in case.places
        ]
        assert sum(stale) <= (case.right is not None)
        assert (case.answer is None) == (case.right is None)


def test_cases_survive_a_file(tmp_path: Path) -> None:
    cases = make_cases(4, seed=3)
    write_rows(tmp_path / "cases.xz", cases)
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

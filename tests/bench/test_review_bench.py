"""The labelled diffs of `bench/review.py` are what their labels say."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from bench.review import is_right, summary
from bench.review_cases import LabelledDiff, read_diffs, read_held

from keystroke.analysis.audit import Severity
from keystroke.assist.review import ReviewFinding

DIFFS = read_diffs()
HELD = read_held()


def test_there_are_sixty_and_half_of_them_bring_a_defect() -> None:
    assert Counter(diff.kind for diff in DIFFS) == {"fix": 30, "change": 16, "refactor": 14}
    assert len({diff.id for diff in DIFFS}) == 60


def test_the_second_set_has_other_files_and_diffs_that_mend_what_others_break() -> None:
    kinds = Counter(diff.kind for diff in HELD)
    assert kinds == {"defect": 17, "mend": 4, "change": 4, "refactor": 6}
    assert not {diff.path for diff in HELD} & {diff.path for diff in DIFFS}
    assert len({diff.id for diff in HELD}) == len(HELD)


@pytest.mark.parametrize("diff", [*DIFFS, *HELD], ids=lambda diff: diff.id)
def test_each_changes_lines_that_are_there(diff: LabelledDiff) -> None:
    changed = diff.changed()
    assert diff.before != diff.after
    assert changed.before == diff.before
    assert changed.lines
    assert max(changed.lines) <= diff.after.count("\n") + 1


def test_a_finding_is_right_only_on_a_changed_line_of_a_diff_that_brings_a_defect() -> None:
    diff = next(diff for diff in DIFFS if diff.defect)
    harmless = next(diff for diff in DIFFS if not diff.defect)

    def finding(line: int) -> ReviewFinding:
        return ReviewFinding("model", "remark", Severity.LOW, "x", diff.path, line, 1, 0, 0)

    (line, *_), outside = sorted(diff.changed().lines), 10_000
    assert is_right(diff, finding(line))
    assert not is_right(diff, finding(outside))
    assert not is_right(harmless, finding(min(harmless.changed().lines)))


def test_the_summary_counts_findings_and_diffs_apart() -> None:
    good, bad = {"right": True}, {"right": False}
    rows: list[dict[str, Any]] = [
        {"defect": True, "findings": [good, good, bad]},
        {"defect": True, "findings": []},
        {"defect": False, "findings": [bad]},
        {"defect": False, "findings": []},
    ]
    found = summary(rows)
    assert (found["precision"], found["findings"]) == (0.5, 4)
    assert (found["defects_found"], found["defects"]) == (1, 2)
    assert (found["harmless_alarmed"], found["harmless"]) == (1, 2)
    assert summary([{"defect": True, "findings": []}])["precision"] is None

"""The labelled diffs of `bench/review.py` are what their labels say."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from bench.review import right, summary
from bench.review_cases import Diff, read_diffs

from keystroke.analysis.audit import Severity
from keystroke.assist.review import Finding

DIFFS = read_diffs()


def test_there_are_sixty_and_half_of_them_bring_a_defect() -> None:
    assert Counter(diff.kind for diff in DIFFS) == {"fix": 30, "change": 16, "refactor": 14}
    assert len({diff.id for diff in DIFFS}) == 60


@pytest.mark.parametrize("diff", DIFFS, ids=lambda diff: diff.id)
def test_each_changes_lines_that_are_there(diff: Diff) -> None:
    changed = diff.changed()
    assert diff.before != diff.after
    assert changed.before == diff.before
    assert changed.lines
    assert max(changed.lines) <= diff.after.count("\n") + 1


def test_a_finding_is_right_only_on_a_changed_line_of_a_diff_that_brings_a_defect() -> None:
    diff = next(diff for diff in DIFFS if diff.defect)
    harmless = next(diff for diff in DIFFS if not diff.defect)

    def finding(line: int) -> Finding:
        return Finding("model", "remark", Severity.LOW, "x", diff.path, line, 1, 0, 0)

    (line, *_), outside = sorted(diff.changed().lines), 10_000
    assert right(diff, finding(line))
    assert not right(diff, finding(outside))
    assert not right(harmless, finding(min(harmless.changed().lines)))


def test_the_summary_counts_findings_and_diffs_apart() -> None:
    good, bad = {"right": True}, {"right": False}
    rows: list[dict[str, Any]] = [
        {"kind": "fix", "findings": [good, good, bad]},
        {"kind": "fix", "findings": []},
        {"kind": "refactor", "findings": [bad]},
        {"kind": "change", "findings": []},
    ]
    found = summary(rows)
    assert (found["precision"], found["findings"]) == (0.5, 4)
    assert (found["defects_found"], found["defects"]) == (1, 2)
    assert (found["harmless_alarmed"], found["harmless"]) == (1, 2)
    assert summary([{"kind": "fix", "findings": []}])["precision"] is None

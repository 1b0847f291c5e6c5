"""Summarises results: score and time for each configuration.

Tasks that cannot be scored on this machine do not count; errors count as failed. Seconds are the solver's,
from the prompt to the answer, its own checks included.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

import msgspec

from keystroke.agent.evaluation.tasks import ResultStatus, TaskResult


class Summary(msgspec.Struct, frozen=True):
    label: str
    model: str
    tasks: int
    passed: int
    skipped: int
    score: float  # per cent
    margin: float  # half of a 95 % interval, in points
    seconds_mean: float
    seconds_median: float
    seconds_total: float
    tokens: int
    tokens_per_second: float
    attempts: float  # per task
    cost: float


def summarise(rows: Iterable[TaskResult]) -> list[Summary]:
    """One summary per configuration, in order of appearance."""
    groups: dict[str, list[TaskResult]] = {}
    for row in rows:
        groups.setdefault(row.label, []).append(row)
    return [_summarise_rows(label, found) for label, found in groups.items()]


def _summarise_rows(label: str, rows: Sequence[TaskResult]) -> Summary:
    counted = [row for row in rows if row.status is not ResultStatus.SKIPPED]
    passed = sum(row.status is ResultStatus.PASSED for row in counted)
    count = len(counted)
    seconds = [row.seconds for row in counted]
    total, tokens = sum(seconds), sum(row.tokens for row in counted)
    share = passed / count if count else 0.0
    return Summary(
        label=label,
        model=rows[0].model,
        tasks=count,
        passed=passed,
        skipped=len(rows) - count,
        score=round(100 * share, 1),
        margin=round(196 * math.sqrt(share * (1 - share) / count), 1) if count else 0.0,
        seconds_mean=round(total / count, 3) if count else 0.0,
        seconds_median=round(median(seconds), 3) if seconds else 0.0,
        seconds_total=round(total, 2),
        tokens=tokens,
        tokens_per_second=round(tokens / total, 1) if total else 0.0,
        attempts=round(sum(row.attempts for row in counted) / count, 2) if count else 0.0,
        cost=round(sum(row.cost for row in counted), 6),
    )


HEADINGS = ("configuration", "score", "±", "tasks", "s/task", "median s", "tok/s", "attempts", "cost")


def table_rows(summaries: Sequence[Summary]) -> list[tuple[str, ...]]:
    """The cells of a table under `HEADINGS`."""
    return [
        (
            s.label,
            f"{s.score:.1f}",
            f"{s.margin:.1f}",
            f"{s.passed}/{s.tasks}" + (f" ({s.skipped} skipped)" if s.skipped else ""),
            f"{s.seconds_mean:.2f}",
            f"{s.seconds_median:.2f}",
            f"{s.tokens_per_second:.0f}",
            f"{s.attempts:.1f}",
            f"{s.cost:.4f}" if s.cost else "-",
        )
        for s in summaries
    ]

"""Exactness of one model's suggestions in one language, and what each costs; used by `bench/completion.py`.

Law: knows cases and suggesters, nothing of files or the command line. Every share has its interval; a time is
from the question to the whole answer, nothing warm.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import PurePath
from statistics import median
from typing import Any

from keystroke.analysis.syntax import language_of
from keystroke.train.cases import Case
from keystroke.train.evaluate import GATE, Share, Suggester, Suggestion
from keystroke.train.fim import Cut

# What is asked: the kind of place, and whether the text below is in view.
TASKS = {
    "rest_em": (Cut.REST_OF_LINE, False),
    "line_em": (Cut.LINE, False),
    "fim_rest_em": (Cut.REST_OF_LINE, True),
    "fim_line_em": (Cut.LINE, True),
}


class Cascade:
    """The small model's answer where it is sure enough to be shown, else the larger one's: what stands on
    the screen when both have spoken."""

    def __init__(self, small: Suggester, large: Suggester) -> None:
        self._small, self._large = small, large
        self.name = f"{small.name}>{large.name}"
        self.fills = small.fills and large.fills

    def line(self, prefix: str, suffix: str | None) -> Suggestion:
        first = self._small.line(prefix, suffix)
        if first.confidence >= GATE and first.text.strip():
            return first
        return self._large.line(prefix, suffix)

    def block(self, prefix: str, suffix: str | None) -> Suggestion:
        return self._large.block(prefix, suffix)


def language(case: Case) -> str:
    name = language_of(case.path, None) or PurePath(case.path).suffix.lstrip(".")
    return "typescript" if name == "tsx" else name


def by_language(cases: Sequence[Case], each: int) -> dict[str, list[Case]]:
    """The first `each` cases of each kind in each language; all of them for 0."""
    found: dict[str, list[Case]] = {}
    for case in cases:
        held = found.setdefault(language(case), [])
        if not each or sum(other.kind == case.kind for other in held) < each:
            held.append(case)
    return found


def exactness(
    suggester: Suggester, cases: Sequence[Case], tasks: Sequence[str], done: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """The share of each task that is right to the letter, with its interval, and `p50_ms` over all."""
    row: dict[str, Any] = {}
    spent: list[float] = []
    for task in tasks:
        kind, below = TASKS[task]
        asked = [case for case in cases if case.kind == kind]
        if not asked or (below and not suggester.fills):
            continue
        hits = 0
        for case in asked:
            began = time.perf_counter()
            answer = suggester.line(case.prefix, case.suffix if below else None)
            spent.append(time.perf_counter() - began)
            hits += answer.text.rstrip() == case.middle.rstrip()
            done()
        share = Share(hits, len(asked))
        row[task] = round(share.value, 4)
        row[f"{task}_95"] = [round(edge, 4) for edge in share.interval]
        row[f"{task}_of"] = len(asked)
    row["p50_ms"] = round(median(spent) * 1e3, 1) if spent else None
    return row


def whole(rows: dict[str, dict[str, Any]], tasks: Sequence[str]) -> dict[str, Any]:
    """All languages together: hits over places, the median of the languages' medians."""
    total: dict[str, Any] = {}
    for task in tasks:
        counted = [(row[task] * row[f"{task}_of"], row[f"{task}_of"]) for row in rows.values() if task in row]
        if counted:
            share = Share(round(sum(hits for hits, _ in counted)), sum(of for _, of in counted))
            total[task] = round(share.value, 4)
            total[f"{task}_95"] = [round(edge, 4) for edge in share.interval]
            total[f"{task}_of"] = share.of
    times = [row["p50_ms"] for row in rows.values() if row.get("p50_ms") is not None]
    total["p50_ms"] = round(median(times), 1) if times else None
    return total

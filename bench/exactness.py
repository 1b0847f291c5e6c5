"""Exactness of one model's suggestions in one language, and what each costs; used by `bench/completion.py`.

Law: knows cases and suggesters, nothing of files or the command line. Every share has its interval; a time is
from the question to the whole answer, nothing warm.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path, PurePath
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


class Kept:
    """Answers with what each cost, kept on disk where a file is given: what is asked again, by a cascade or
    by a benchmark that was stopped, counts as it was. `load` is called when an answer is missing."""

    def __init__(self, load: Callable[[], Suggester], path: Path | None = None) -> None:
        self._load, self._path = load, path
        self._suggester: Suggester | None = None
        self._said: dict[str, tuple[Suggestion, float]] = {}
        self._fills: bool | None = None
        for line in path.read_text().splitlines() if path is not None and path.exists() else ():
            row = json.loads(line)
            self._fills = row["fills"]
            self._said[row["key"]] = (Suggestion(row["text"], row["confidence"]), row["seconds"])

    @property
    def fills(self) -> bool:
        if self._fills is None:
            self._fills = self._loaded().fills
        return self._fills

    def timed(self, prefix: str, suffix: str | None) -> tuple[Suggestion, float]:
        """The answer, and the seconds from the question to it."""
        key = hashlib.sha256(repr((prefix, suffix)).encode()).hexdigest()[:24]
        if key not in self._said:
            suggester = self._loaded()
            began = time.perf_counter()
            answer = suggester.line(prefix, suffix)
            seconds = time.perf_counter() - began
            self._said[key] = (answer, seconds)
            if self._path is not None:
                row = {
                    "key": key, "text": answer.text, "confidence": answer.confidence,
                    "seconds": round(seconds, 5), "fills": suggester.fills,
                }  # fmt: skip
                with self._path.open("a") as stream:
                    stream.write(json.dumps(row) + "\n")
        return self._said[key]

    def _loaded(self) -> Suggester:
        self._suggester = self._suggester or self._load()
        return self._suggester

    def release(self) -> None:
        """Forget the suggester, not its answers."""
        self._suggester = None


class Cascade:
    """The small model's answer where it is sure enough to be shown, else the larger one's: what stands on
    the screen when both have spoken."""

    def __init__(self, small: Kept, large: Kept) -> None:
        self._small, self._large = small, large

    @property
    def fills(self) -> bool:
        return self._small.fills and self._large.fills

    def timed(self, prefix: str, suffix: str | None) -> tuple[Suggestion, float]:
        first, seconds = self._small.timed(prefix, suffix)
        if first.confidence >= GATE and first.text.strip():
            return first, seconds
        second, more = self._large.timed(prefix, suffix)
        return second, seconds + more


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


def exactness(suggester: Kept | Cascade, cases: Sequence[Case], tasks: Sequence[str]) -> dict[str, Any]:
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
            answer, seconds = suggester.timed(case.prefix, case.suffix if below else None)
            spent.append(seconds)
            hits += answer.text.rstrip() == case.middle.rstrip()
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

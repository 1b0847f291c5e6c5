"""Files that contain lines of evaluation cases; they are never trained on.

Six consecutive lines that also occur around a case count as a copy, whatever project they come from; lines of
a single character are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from keystroke.errors import InputError
from keystroke.text.cases import read_cases
from keystroke_lab.corpus.dedup import LineHashes, line_hashes
from keystroke_lab.corpus.shards import read_shard
from keystroke_lab.evaluation.edit_cases import read_edit_cases

RUN = 6  # lines: shorter runs are idioms that everybody writes


def _runs(hashes: LineHashes) -> NDArray[np.uint64]:
    """One number for every `RUN` lines that follow each other."""
    count = max(0, len(hashes) - RUN + 1)
    mixed = np.zeros(count, dtype=np.uint64)
    for i in range(RUN):
        mixed = (mixed ^ hashes[i : i + count]) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return mixed


class EvaluationLines:
    """What evaluation cases show, and whether a file holds a part of it."""

    def __init__(self, texts: Iterable[str]) -> None:
        runs = [_runs(line_hashes(text)) for text in texts]
        self._runs = np.unique(np.concatenate(runs)) if runs else np.zeros(0, dtype=np.uint64)

    @classmethod
    def from_files(cls, paths: Sequence[Path]) -> EvaluationLines:
        """Cases of completion or of next edits, as the benchmarks read them."""
        return cls(text for path in paths for text in _texts(path))

    def occurs_in(self, text: str) -> bool:
        """Whether the text holds a run of a case."""
        return len(self._runs) > 0 and self.occurs_in_hashes(line_hashes(text))

    def occurs_in_hashes(self, hashes: LineHashes) -> bool:
        """`holds` of a text whose lines are hashed already."""
        if not len(self._runs):
            return False
        mine = _runs(hashes)
        nearest = np.minimum(np.searchsorted(self._runs, mine), len(self._runs) - 1)
        return bool((self._runs[nearest] == mine).any())


def contaminated(pieces: Sequence[Path], cases: Sequence[Path], workers: int = 1) -> list[str]:
    """Files of training pieces that hold a run of a case, as "project path"; and the projects of cases among
    them, whatever they hold. An empty list is what a corpus must give."""
    evaluated = EvaluationLines.from_files(cases)
    projects = frozenset(name for path in cases for name in _projects(path))
    with ProcessPoolExecutor(workers) as pool:
        found = pool.map(partial(_within, evaluated, projects), pieces)
        return [row for rows in found for row in rows]


def _within(evaluated: EvaluationLines, projects: frozenset[str], piece: Path) -> list[str]:
    return [
        f"{source.project} {source.path}"
        for source in read_shard(piece)
        if source.project in projects or evaluated.occurs_in(source.text)
    ]


def _projects(path: Path) -> Iterator[str]:
    try:
        yield from (case.project for case in read_cases(path))
    except InputError:
        yield from (case.project for case in read_edit_cases(path))


def _texts(path: Path) -> Iterator[str]:
    try:
        yield from (case.prefix + case.middle + case.suffix for case in read_cases(path))
        return
    except InputError:
        edits = read_edit_cases(path)
    for case in edits:
        yield "\n".join(case.lines)
        if case.right is not None and case.answer is not None:
            place = case.places[case.right]
            yield "\n".join((*case.lines[: place.first], *case.answer, *case.lines[place.last :]))

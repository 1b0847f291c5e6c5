"""Collects the edits of many packages: one file each, downloads in threads, comparison in processes.

A package whose file exists is not collected again. One that fails is counted and tried again next time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor
from pathlib import Path

import httpx

from keystroke.errors import KeystrokeError
from keystroke_lab.corpus.harvest import bounded
from keystroke_lab.corpus.hunks import NoEdit, squeezed, trajectory
from keystroke_lab.corpus.processes import Processes
from keystroke_lab.corpus.trajectories import FileEdit, write_edits

FILES_OF_A_PAIR = 40  # a release that changed more was a sweep; an even sample of it will do
SAME_CHANGE = 3  # files of one project that may show the same change
Report = Callable[[str, int, int], None]
# Collects one package into a file, with the given processes; returns the outcome.
CollectOne = Callable[[str, Path, Processes], str]
_FAILURES = (
    KeystrokeError, httpx.HTTPError, OSError, ValueError, ArithmeticError, KeyError, TypeError,
    AttributeError, BrokenExecutor,
)  # fmt: skip


def collect_each(
    collect: CollectOne,
    names: Sequence[str],
    target: Callable[[str], Path],
    what: str,
    *,
    workers: int,
    processes: int,
    report: Report,
) -> Counter[str]:
    """Collect every name whose `target` does not exist; counts of outcomes."""
    outcomes: Counter[str] = Counter()

    def one(name: str) -> str:
        path = target(name)
        if path.exists():
            return "there"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return collect(name, path, worker_pool)
        except _FAILURES as error:
            return f"failed: {type(error).__name__}"

    with Processes(processes) as worker_pool, ThreadPoolExecutor(workers) as pool:
        for done, outcome in enumerate(bounded(pool, one, names, workers * 2), start=1):
            outcomes[outcome] += 1
            report(what, done, len(names))
    return outcomes


def store_version_edits(
    project: str, licence: str, versions: Iterable[tuple[str, Mapping[str, str]]], target: Path
) -> int:
    """Write the edits between consecutive versions (number, texts by path), oldest first; their number."""
    edits = list(without_sweeps(version_edits(project, licence, versions)))
    write_edits(target, edits)
    return len(edits)


def version_edits(
    project: str, licence: str, versions: Iterable[tuple[str, Mapping[str, str]]]
) -> Iterator[FileEdit]:
    before: tuple[str, Mapping[str, str]] | None = None
    for number, files in versions:
        if before is not None:
            old = before[1]
            changed = sorted(path for path in old.keys() & files.keys() if old[path] != files[path])
            for path in changed[:FILES_OF_A_PAIR]:
                found = trajectory(old[path], files[path])
                if not isinstance(found, NoEdit):
                    yield FileEdit(project, licence, before[0], number, path, found.before, found.hunks)
        before = (number, files)


def without_sweeps(edits: Iterable[FileEdit]) -> Iterator[FileEdit]:
    """Leave out files that only repeat a change already seen in a few others."""
    seen: Counter[tuple[str, str]] = Counter()
    for edit in edits:
        keys = {(squeezed(hunk.old), squeezed(hunk.new)) for hunk in edit.hunks}
        if any(seen[key] < SAME_CHANGE for key in keys):
            yield edit
        seen.update(keys)

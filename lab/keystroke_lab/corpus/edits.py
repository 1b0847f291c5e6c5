"""What changed between consecutive releases of a project, as edits people made.

Downloads and compares; one file per project, so a collection can be stopped and resumed. The filters and
licences are those of the corpus. `edit_shards` decides what is trained on and what is held out.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

from keystroke.agent.evaluation.source_archives import normalise_name
from keystroke_lab.corpus.archives import python_files
from keystroke_lab.corpus.collecting import FILES_OF_A_PAIR, Report, collect_each, without_sweeps
from keystroke_lab.corpus.filters import Refusal, clean
from keystroke_lab.corpus.harvest import ProjectRecord, read_record
from keystroke_lab.corpus.hunks import LARGEST_FILE, NoEdit, trajectory
from keystroke_lab.corpus.licences import permissive_licence
from keystroke_lab.corpus.package_index import PackageIndex, Release
from keystroke_lab.corpus.processes import Processes
from keystroke_lab.corpus.split import CorpusPart, part_of
from keystroke_lab.corpus.trajectories import FileEdit, write_edits

LARGEST_ARCHIVE = 4 << 20
_RELEASE_FILES = re.compile(r"(^|/)(setup|conf|version|__version__|_version|__about__|about|release)\.py$")


def choose_projects(folders: Sequence[Path], parts: Iterable[CorpusPart]) -> list[ProjectRecord]:
    """Kept projects of these parts, each once, in an order that has nothing to do with their names."""
    wanted, found = set(parts), dict[str, ProjectRecord]()
    for folder in folders:
        for path in sorted(folder.glob("*.jsonl.gz")):
            record = read_record(path)
            if record.outcome != "kept" or record.name in found:
                continue
            if part_of(record.name, datetime.fromisoformat(record.first_released)) in wanted:
                found[record.name] = record
    return sorted(found.values(), key=lambda r: _mixed(r.name))


def _mixed(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8, salt=b"edits").digest()


def release_edits(
    record: ProjectRecord, old: dict[str, bytes], new: dict[str, bytes], versions: tuple[str, str]
) -> Iterator[FileEdit]:
    """Edits between the files of two releases, in path order."""
    changed = [
        path
        for path in old.keys() & new.keys()
        if old[path] != new[path]
        and len(new[path]) <= LARGEST_FILE
        and len(old[path]) <= LARGEST_FILE
        and not _RELEASE_FILES.search(path)
    ]
    # Bytes first: cleaning costs more than comparing, and most files of a release are as they were.
    for path in sorted(sorted(changed, key=_mixed)[:FILES_OF_A_PAIR]):
        before, after = clean(path, old[path]), clean(path, new[path])
        if isinstance(before, Refusal) or isinstance(after, Refusal):
            continue
        found = trajectory(before, after)
        if not isinstance(found, NoEdit):
            yield FileEdit(record.name, record.licence, *versions, path, found.before, found.hunks)


def fetched_releases(
    index: PackageIndex, record: ProjectRecord, releases: int
) -> list[tuple[Release, bytes]]:
    """The project's latest `releases` with their archives, oldest first; none where there is no pair."""
    project = index.project(record.name)
    return [] if project is None else _fetch_latest(index, project.releases, releases)


def _fetch_latest(index: PackageIndex, every: Sequence[Release], count: int) -> list[tuple[Release, bytes]]:
    recent = [r for r in every if r.download.size <= LARGEST_ARCHIVE][-count:]
    return [(release, index.fetch(release.download)) for release in recent] if len(recent) > 1 else []


def named_releases(
    index: PackageIndex, name: str, releases: int, until: datetime
) -> tuple[ProjectRecord, list[tuple[Release, bytes]]]:
    """As `fetched_releases`, of a project known by its name alone, as it stood on the day `until`. None
    where its licence is not permissive or it is not to be trained on: the record says why."""
    project = index.project(name)
    if project is None:
        return ProjectRecord(name, "absent"), []
    licence = permissive_licence(project.info)
    if licence is None:
        return ProjectRecord(name, "licence"), []
    if part_of(project.name, project.first_released) is not CorpusPart.TRAIN:
        return ProjectRecord(name, "held out"), []
    known = [release for release in project.releases if release.uploaded < until]
    return ProjectRecord(project.name, "kept", licence=licence), _fetch_latest(index, known, releases)


def store_edits(record: ProjectRecord, releases: list[tuple[Release, bytes]], target: Path) -> int:
    """Write the edits between these releases, oldest pair first; how many there are. All that needs a core,
    and nothing that needs the index."""
    found: list[FileEdit] = []
    before: tuple[str, dict[str, bytes]] | None = None
    for release, data in releases:
        files = dict(python_files(data, release.download.filename, sdist=release.download.sdist))
        if before is not None:
            found.extend(release_edits(record, before[1], files, (before[0], release.version)))
        before = (release.version, files)
    edits = list(without_sweeps(found))
    write_edits(target, edits)
    return len(edits)


def collect(
    index: PackageIndex,
    records: Sequence[ProjectRecord],
    out: Path,
    *,
    releases: int,
    workers: int = 6,
    processes: int = 0,
    report: Report = lambda *_: None,
) -> Counter[str]:
    """Collect the edits of every project not yet in `out`; counts of outcomes. A project that fails is
    counted and tried again next time. `workers` projects are fetched at a time, compared by `processes`."""

    def ask(name: str) -> tuple[ProjectRecord, list[tuple[Release, bytes]]]:
        return by_name[name], fetched_releases(index, by_name[name], releases)

    by_name = {record.name: record for record in records}
    return _collect(ask, list(by_name), out, workers, processes, report)


def collect_named(
    index: PackageIndex,
    names: Sequence[str],
    out: Path,
    *,
    releases: int,
    until: datetime,
    workers: int = 6,
    processes: int = 0,
    report: Report = lambda *_: None,
) -> Counter[str]:
    """As `collect`, of projects that need not be harvested: each archive is fetched once, and nothing of a
    project that is not to be trained on."""

    def ask(name: str) -> tuple[ProjectRecord, list[tuple[Release, bytes]]]:
        return named_releases(index, name, releases, until)

    return _collect(ask, [normalise_name(name) for name in names], out, workers, processes, report)


def _collect(
    ask: Callable[[str], tuple[ProjectRecord, list[tuple[Release, bytes]]]],
    names: Sequence[str],
    out: Path,
    workers: int,
    processes: int,
    report: Report,
) -> Counter[str]:
    def one(name: str, target: Path, worker_pool: Processes) -> str:
        record, releases = ask(name)
        edits = worker_pool.do(store_edits, record, releases, target)
        return "collected" if edits else "no edits" if record.outcome == "kept" else record.outcome

    return collect_each(
        one,
        names,
        lambda name: out / f"{name}.jsonl.gz",
        "edits",
        workers=workers,
        processes=processes,
        report=report,
    )

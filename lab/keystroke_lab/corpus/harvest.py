"""Downloads projects of the package index and stores their cleaned files, one compressed file per project.

A project is done when its file exists, so a stopped harvest resumes. The first line of the file is the
project's record (licence, dates, refused files by reason); each further line is one source file.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from keystroke.agent.evaluation.source_archives import normalise_name
from keystroke.errors import InputError, KeystrokeError
from keystroke_lab.corpus.archives import MAX_FILE, source_files
from keystroke_lab.corpus.filters import Refusal, clean, is_test
from keystroke_lab.corpus.languages import SUFFIXES, language_of
from keystroke_lab.corpus.licences import permissive_licence
from keystroke_lab.corpus.package_index import Download, IndexedProject, PackageIndex
from keystroke_lab.corpus.processes import Processes

Item = TypeVar("Item")
Result = TypeVar("Result")

PROJECT_LIMIT = 4 << 20  # characters kept of one project: no single style may dominate
TEST_SHARE = 0.25  # of what is kept


@dataclass(frozen=True, slots=True)
class HarvestedFile:
    path: str
    sha256: str
    text: str
    licence: str = ""  # where it is stated by file; the project's otherwise


@dataclass(frozen=True, slots=True)
class ProjectRecord:
    """The record of a harvested project. `outcome` is "kept" or the reason why it was not kept."""

    name: str
    outcome: str
    version: str = ""
    licence: str = ""
    first_released: str = ""
    archive: str = ""
    archive_sha256: str = ""
    requires: list[str] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    characters: int = 0
    cap: int = PROJECT_LIMIT  # the limit it was harvested under
    languages: dict[str, int] = field(default_factory=dict)  # characters of each


@dataclass(frozen=True, slots=True)
class HarvestLimits:
    """Which projects a harvest keeps."""

    first_released_from: datetime | None = None  # only projects at least this young
    first_released_before: datetime | None = None  # only projects older than this
    min_files: int = 1
    min_releases: int = 1
    try_variants: bool = True  # "python-NAME" and "pyNAME" where NAME is unknown
    characters: int = PROJECT_LIMIT  # kept of one project
    languages: tuple[str, ...] = ("python",)


def harvested_path(folder: Path, name: str) -> Path:
    return folder / f"{normalise_name(name)}.jsonl.gz"


def read_project(path: Path) -> tuple[ProjectRecord, list[HarvestedFile]]:
    """A harvested project. Raises InputError if the file is damaged."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as stream:
            record = ProjectRecord(**json.loads(next(stream)))
            return record, [HarvestedFile(**json.loads(line)) for line in stream]
    except (OSError, EOFError, StopIteration, ValueError, TypeError) as error:
        raise InputError(
            f"{path} is not a harvested project ({error}); delete it and harvest again"
        ) from error


def read_record(path: Path) -> ProjectRecord:
    """The project's record alone, without reading its files."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as stream:
            return ProjectRecord(**json.loads(next(stream)))
    except (OSError, EOFError, StopIteration, ValueError, TypeError) as error:
        raise InputError(
            f"{path} is not a harvested project ({error}); delete it and harvest again"
        ) from error


def write_project(path: Path, record: ProjectRecord, files: list[HarvestedFile]) -> None:
    """A harvested project as `read_project` reads it."""
    partial = path.with_suffix(".partial")
    with gzip.open(partial, "wt", encoding="utf-8", compresslevel=1) as stream:
        for row in (asdict(record), *map(asdict, files)):
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
    os.replace(partial, path)


def select_files(
    contents: Iterable[tuple[str, bytes]],
    limit: int = PROJECT_LIMIT,
    licence: Callable[[str], str | None] = lambda path: "",
) -> tuple[list[HarvestedFile], dict[str, int]]:
    """Clean files in path order, at most `limit` characters, exact repeats left out, tests capped, and how
    many were refused for what. A file whose `licence` is None is none of ours."""
    refused: Counter[str] = Counter()
    code: list[HarvestedFile] = []
    tests: list[HarvestedFile] = []
    seen: set[str] = set()
    for path, data in contents:
        stated = licence(path)
        if stated is None:
            refused["licence"] += 1
            continue
        text = clean(path, data)
        if isinstance(text, Refusal):
            refused[text] += 1
            continue
        sha256 = hashlib.sha256(text.encode()).hexdigest()
        if sha256 in seen:
            refused["repeat"] += 1
            continue
        seen.add(sha256)
        (tests if is_test(path) else code).append(HarvestedFile(path, sha256, text, stated))
    kept: list[HarvestedFile] = []
    room = limit
    # Hash order: a cap then takes an even sample of the project, and a larger cap adds to a smaller one's.
    for file in sorted(code, key=lambda f: f.sha256):
        if len(file.text) <= room:
            kept.append(file)
            room -= len(file.text)
        else:
            refused["over_cap"] += 1
    test_room = min(room, int(TEST_SHARE / (1 - TEST_SHARE) * (limit - room)))
    for file in sorted(tests, key=lambda f: f.sha256):
        if len(file.text) <= test_room:
            kept.append(file)
            test_room -= len(file.text)
        else:
            refused["over_cap"] += 1
    return sorted(kept, key=lambda f: f.path), dict(refused)


def _find(index: PackageIndex, name: str, limits: HarvestLimits) -> IndexedProject | None:
    names = (name, f"python-{name}", f"py{name}") if limits.try_variants else (name,)
    return next((project for each in names if (project := index.project(each))), None)


def harvest_project(
    index: PackageIndex, name: str, folder: Path, limits: HarvestLimits, processes: Processes
) -> ProjectRecord:
    """Fetch, clean and store one project; its record says what came of it."""
    path = harvested_path(folder, name)
    if path.exists():
        record = read_record(path)
        if not _was_cut(record, limits):
            return record
    record, download = _look_up(index, name, limits)
    if download is None:
        write_project(path, record, [])
        return record
    return processes.do(_stored, path, record, download, index.fetch(download), limits)


def _was_cut(record: ProjectRecord, limits: HarvestLimits) -> bool:
    """Whether a smaller cap left out files of a project that the present one has room for."""
    full = record.characters + MAX_FILE >= record.cap  # the next file might not have fitted
    return record.cap < limits.characters and full and record.refused.get("over_cap", 0) > 0


def _look_up(index: PackageIndex, name: str, limits: HarvestLimits) -> tuple[ProjectRecord, Download | None]:
    """What the index says of a project, and what to fetch if it is wanted."""
    key = normalise_name(name)
    project = _find(index, name, limits)
    if project is None:
        return ProjectRecord(key, "absent"), None
    facts: dict[str, Any] = {
        "name": project.name,
        "first_released": project.first_released.isoformat(),
        "requires": sorted(project.requirements),
    }
    licence = permissive_licence(project.info)
    if licence is None:
        return ProjectRecord(**facts, outcome="licence"), None
    if limits.first_released_from and project.first_released < limits.first_released_from:
        return ProjectRecord(**facts, outcome="too_old", licence=licence), None
    if limits.first_released_before and project.first_released >= limits.first_released_before:
        return ProjectRecord(**facts, outcome="too_young", licence=licence), None
    if len(project.releases) < limits.min_releases:
        return ProjectRecord(**facts, outcome="few_releases", licence=licence), None
    release = project.releases[-1]
    facts |= {"licence": licence, "version": release.version}
    facts |= {"archive": release.download.filename, "archive_sha256": release.download.sha256}
    return ProjectRecord(**facts, outcome="kept"), release.download


def _stored(
    path: Path, record: ProjectRecord, download: Download, data: bytes, limits: HarvestLimits
) -> ProjectRecord:
    """Clean a fetched project and write it. All that needs a core, and nothing that needs the index."""
    suffixes = frozenset(suffix for suffix, language in SUFFIXES.items() if language in limits.languages)
    found = source_files(data, download.filename, suffixes)
    contents = ((_inside(path) if download.sdist else path, content) for path, content, _ in found)
    files, refused = select_files(contents, limits.characters)
    if len(files) < limits.min_files:
        record, files = replace(record, outcome="few_files", refused=refused), []
    else:
        characters = sum(len(f.text) for f in files)
        record = replace(record, refused=refused, characters=characters, cap=limits.characters)
        record = replace(record, languages=characters_by_language(files))
    write_project(path, record, files)
    return record


def _inside(path: str) -> str:
    """A source archive's top folder is left out."""
    return path.partition("/")[2] or path


def characters_by_language(files: Iterable[HarvestedFile]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for file in files:
        counts[language_of(file.path, file.text) or "python"] += len(file.text)
    return dict(counts)


def harvest(
    index: PackageIndex,
    names: Iterable[str],
    folder: Path,
    *,
    limits: HarvestLimits | None = None,
    workers: int = 6,
    processes: int = 0,
    report: Callable[[ProjectRecord], None] = lambda record: None,
) -> Counter[str]:
    """Harvest every name not yet in `folder`; counts of outcomes. A project that fails is counted and
    tried again next time. `workers` projects are fetched at a time and cleaned by `processes`."""
    folder.mkdir(parents=True, exist_ok=True)
    limits = limits or HarvestLimits()
    outcomes: Counter[str] = Counter()

    def one(name: str) -> ProjectRecord:
        try:
            return harvest_project(index, name, folder, limits, worker_pool)
        except (KeystrokeError, OSError, ValueError, ArithmeticError, BrokenExecutor) as error:
            return ProjectRecord(normalise_name(name), f"failed: {type(error).__name__}")

    with Processes(processes) as worker_pool, ThreadPoolExecutor(workers) as pool:
        for record in bounded(pool, one, names, workers * 2):
            outcomes[record.outcome] += 1
            report(record)
    return outcomes


def bounded(
    pool: ThreadPoolExecutor, work: Callable[[Item], Result], items: Iterable[Item], limit: int
) -> Iterator[Result]:
    """Results as they come, with at most `limit` items under way. Stopped in between, it starts no more."""
    waiting: set[Future[Result]] = set()
    try:
        for item in items:
            waiting.add(pool.submit(work, item))
            if len(waiting) >= limit:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
    finally:
        for future in waiting:
            future.cancel()

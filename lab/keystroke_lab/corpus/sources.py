"""Harvests Debian source packages and npm packages: cleaned files on disk, one compressed file a package.

A package is done when its file exists, so a stopped harvest resumes. The next package comes from the
ecosystem furthest from its goal, so a time limit is spent evenly. A package's date is an upper bound:
whatever a frozen Debian release holds or names is older than the release.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from keystroke.errors import InputError, KeystrokeError
from keystroke_lab.corpus import npm
from keystroke_lab.corpus.archives import source_files
from keystroke_lab.corpus.copyright import parse
from keystroke_lab.corpus.debian import DebianPackage, Mirror, contents_of, copyright_of
from keystroke_lab.corpus.downloads import DownloadTooLarge
from keystroke_lab.corpus.harvest import (
    ProjectRecord,
    bounded,
    characters_by_language,
    read_record,
    select_files,
    write_project,
)
from keystroke_lab.corpus.languages import SUFFIXES
from keystroke_lab.corpus.processes import Processes
from keystroke_lab.corpus.split import LATE

FROZEN = datetime(2025, 5, 17, tzinfo=UTC)  # trixie's full freeze: what it holds was released before
CAP = 2 << 20  # characters kept of one package
LEAST_FREE = 4 << 30  # bytes of free disk below which the harvest stops
_PREFERRED_SIZE = (60_000, 2_500_000)  # bytes of an archive that is fetched first
_SUFFIXES = frozenset(SUFFIXES)
_MANIFEST = "package.json"
_CRATES = "usr/share/cargo/registry/"  # where a crate's binary package has its source
# The languages that are taken from each ecosystem.
ECOSYSTEM_LANGUAGES = {
    "go": ("go",), "rust": ("rust",), "java": ("java",), "native": ("c", "cpp"),
    "javascript": ("javascript", "typescript"), "npm": ("javascript", "typescript"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class WantedPackage:
    """One package to harvest."""

    key: str  # "debian:NAME" or "npm:NAME"
    ecosystem: str
    debian: DebianPackage | None = None
    known: datetime | None = None  # an npm package that is known to be at least this old


def in_order(packages: Iterable[DebianPackage]) -> list[WantedPackage]:
    """Packages in a fixed pseudo-random order, those with an archive of a preferred size first: smaller ones
    cost more requests than they give text, and most of a larger one is over the cap."""

    def place(package: DebianPackage) -> tuple[bool, bytes]:
        smallest, largest = _PREFERRED_SIZE
        preferred = smallest <= package.upstream.size <= largest
        return not preferred, hashlib.blake2b(package.name.encode(), digest_size=8).digest()

    return [WantedPackage(f"debian:{p.name}", p.ecosystem, p) for p in sorted(packages, key=place)]


def stored_path(folder: Path, key: str) -> Path:
    return folder / f"{key.replace(':', '+').replace('/', '+')}.jsonl.gz"


@dataclass(slots=True)
class PackageQueue:
    """Packages by ecosystem. Iterating yields the next package of the ecosystem furthest from its goal."""

    goals: Mapping[str, int]  # characters of each language; 0: none wanted
    waiting: dict[str, deque[WantedPackage]] = field(default_factory=dict)
    characters: Counter[str] = field(default_factory=Counter)
    _named: set[str] = field(default_factory=set)

    def add(self, wanted: WantedPackage) -> None:
        if wanted.key not in self._named and wanted.ecosystem in ECOSYSTEM_LANGUAGES:
            self._named.add(wanted.key)
            self.waiting.setdefault(wanted.ecosystem, deque()).append(wanted)

    def reached(self, ecosystem: str) -> float:
        """The least share of its goal that any language of the ecosystem has reached."""
        shares = [
            self.characters[name] / goal
            for name in ECOSYSTEM_LANGUAGES[ecosystem]
            if (goal := self.goals.get(name, 0))
        ]
        return min(shares, default=1.0)

    def __iter__(self) -> Iterator[WantedPackage]:
        while True:
            poor = [
                (self.reached(e), e) for e, queue in self.waiting.items() if queue and self.reached(e) < 1
            ]
            if not poor:
                return
            yield self.waiting[min(poor)[1]].popleft()

    def count(self, record: ProjectRecord) -> None:
        """Count a harvested package and queue the npm packages that it requires. What a package of a frozen
        Debian release requires is at least as old as the release."""
        self.characters.update(record.languages)
        if record.outcome != "kept" or not record.requires:
            return
        frozen = record.name.startswith("debian:")
        for name in record.requires:
            self.add(WantedPackage(f"npm:{name}", "npm", known=FROZEN if frozen else None))


def harvest_sources(
    mirror: Mirror,
    registry: npm.NpmIndex | None,
    queue: PackageQueue,
    folder: Path,
    *,
    seconds: float = 0.0,
    workers: int = 12,
    processes: int = 0,
    report: Callable[[PackageQueue], None] = lambda queue: None,
) -> Counter[str]:
    """Harvest packages of the queue until its goals are reached, it is empty or the time is over. Returns
    the number of packages by outcome. Raises InputError when the disk is nearly full."""
    folder.mkdir(parents=True, exist_ok=True)
    outcomes: Counter[str] = Counter()
    end = time.monotonic() + seconds if seconds else float("inf")

    def one(wanted: WantedPackage) -> ProjectRecord:
        path = stored_path(folder, wanted.key)
        try:
            if path.exists():
                return read_record(path)
            if wanted.debian is not None:
                return _debian(mirror, wanted.debian, path, worker_pool)
            return _npm(registry, wanted, path, worker_pool)
        except (
            KeystrokeError,
            OSError,
            ValueError,
            ArithmeticError,
            BrokenExecutor,
            httpx.HTTPError,
        ) as error:
            return ProjectRecord(wanted.key, f"failed: {type(error).__name__}")

    def allowed() -> Iterator[WantedPackage]:
        for count, wanted in enumerate(queue):
            if time.monotonic() >= end:
                return
            if count % 64 == 0 and shutil.disk_usage(folder).free < LEAST_FREE:
                raise InputError(f"less than 4 GB are free where {folder} is; make room and run this again")
            yield wanted

    with Processes(processes) as worker_pool, ThreadPoolExecutor(workers) as pool:
        for record in bounded(pool, one, allowed(), workers * 2):
            outcomes[record.outcome] += 1
            queue.count(record)
            report(queue)
    return outcomes


def _debian(mirror: Mirror, package: DebianPackage, path: Path, worker_pool: Processes) -> ProjectRecord:
    """Fetches the copyright statement first: it is small and decides whether the source is fetched."""
    stated = ""
    for binary in package.stating:
        data = mirror.fetch(binary)
        if stated := worker_pool.do(copyright_of, data):
            break
    if not parse(stated).any_permissive:
        return _refused(path, _record(package, "licence"))
    if binary != package.upstream:
        data = mirror.fetch(package.upstream)
    return worker_pool.do(_store_debian, path, package, data, stated)


def _record(package: DebianPackage, outcome: str) -> ProjectRecord:
    return ProjectRecord(
        f"debian:{package.name}",
        outcome,
        version=package.version,
        first_released=FROZEN.isoformat(),
        archive=package.upstream.name,
        archive_sha256=package.upstream.sha256,
    )


def _refused(path: Path, record: ProjectRecord) -> ProjectRecord:
    write_project(path, record, [])
    return record


def _store_debian(path: Path, package: DebianPackage, data: bytes, stated: str) -> ProjectRecord:
    """Clean and write a package. Runs in a worker process."""
    contents, needs, youngest = [], dict[str, None](), 0.0
    crate = package.upstream.name.endswith(".deb")
    packed = contents_of(data) if crate else data
    for name, content, changed in source_files(packed, package.upstream.name, _SUFFIXES, (f"/{_MANIFEST}",)):
        inside = name.partition(_CRATES)[2].partition("/")[2] if crate else name.partition("/")[2]
        youngest = max(youngest, changed)
        if name.endswith(_MANIFEST):
            needs |= dict.fromkeys(_needed(content))
        elif inside and not inside.startswith("debian/"):
            contents.append((inside, content))
    record = _record(package, "kept")
    if (
        youngest >= LATE.timestamp() and not crate
    ):  # an update of a frozen release: what is new in it is too young
        return _refused(path, replace(record, outcome="too_young"))
    return _stored(path, replace(record, requires=list(needs)), contents, parse(stated).licence)


def _needed(manifest: bytes) -> Iterable[str]:
    """Names that a package.json requires."""
    try:
        found: Mapping[str, Any] = json.loads(manifest)
        return [*(found.get("dependencies") or ()), *(found.get("devDependencies") or ())]
    except (ValueError, AttributeError, TypeError):
        return ()


def _npm(
    registry: npm.NpmIndex | None, wanted: WantedPackage, path: Path, worker_pool: Processes
) -> ProjectRecord:
    package = registry.package(wanted.key.removeprefix("npm:")) if registry is not None else None
    if package is None:
        return _refused(path, ProjectRecord(wanted.key, "absent"))
    first = min([datetime.fromisoformat(package.first_released), *([wanted.known] if wanted.known else [])])
    record = ProjectRecord(
        wanted.key,
        "kept",
        version=package.version,
        licence=package.licence or "",
        first_released=first.isoformat(),
        archive=package.archive.rpartition("/")[2],
        requires=list(package.requires),
    )
    if package.licence is None:
        return _refused(path, replace(record, outcome="licence"))
    if first >= LATE:
        return _refused(path, replace(record, outcome="too_young"))
    try:
        data = registry.fetch(package) if registry is not None else b""
    except DownloadTooLarge:
        return _refused(path, replace(record, outcome="too_large"))
    return worker_pool.do(_store_npm, path, record, data)


def _store_npm(path: Path, record: ProjectRecord, data: bytes) -> ProjectRecord:
    """Clean and write a package. Runs in a worker process."""
    contents = [(n.partition("/")[2], content) for n, content, _ in source_files(data, "x.tgz", _SUFFIXES)]
    by_hand = npm.without_compiled([name for name, _ in contents])
    return _stored(path, record, [(n, c) for n, c in contents if n in by_hand], lambda _: record.licence)


def _stored(
    path: Path,
    record: ProjectRecord,
    contents: list[tuple[str, bytes]],
    licence: Callable[[str], str | None],
) -> ProjectRecord:
    files, refused = select_files(contents, CAP, licence)
    if not files:
        return _refused(path, replace(record, outcome="few_files", refused=refused))
    stated = dict.fromkeys(file.licence for file in files)
    record = replace(
        record,
        licence=" AND ".join(sorted(stated)),
        refused=refused,
        characters=sum(len(file.text) for file in files),
        cap=CAP,
        languages=characters_by_language(files),
    )
    write_project(path, record, files)
    return record

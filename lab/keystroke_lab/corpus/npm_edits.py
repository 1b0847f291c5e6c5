"""Edits between consecutive versions of JavaScript and TypeScript packages.

The registry is the one npm is configured for. Licences and hunks follow the rules for Python. Bundles,
minified files and compiled modules are left out. Archives are untrusted: entries and sizes are bounded, and a
damaged archive yields what could be read before the damage.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

from keystroke.agent.evaluation.downloads import DownloadTooLarge, Fetcher
from keystroke.errors import InputError, KeystrokeError, NotFound
from keystroke_lab.corpus.archives import MAX_ENTRIES, MAX_TOTAL
from keystroke_lab.corpus.edits import FILES_OF_A_PAIR, without_sweeps
from keystroke_lab.corpus.harvest import bounded
from keystroke_lab.corpus.hunks import LARGEST_FILE, NoEdit, trajectory
from keystroke_lab.corpus.licences import permissive_licence
from keystroke_lab.corpus.processes import Processes
from keystroke_lab.corpus.trajectories import FileEdit, write_edits

LARGEST_PACKAGE = 2_000_000  # bytes unpacked
_SOURCE = re.compile(r"\.(js|mjs|cjs|jsx|ts|tsx)$")
_BUILT = re.compile(
    r"(^|/)(dist|build|umd|vendor|node_modules|bundles?|_?esm\w*|cjs|fesm\w*)/|\.min\.|\.d\.[cm]?ts$|bundle",
    re.I,
)
_WRITTEN_BY_A_TOOL = re.compile(
    r"generated|__esModule|sourceMappingURL|webpackBootstrap|regenerator|_interopRequire|do not edit", re.I
)
_RELEASED = re.compile(r"\d+\.\d+\.\d+")  # no pre-releases
_LONGEST_LINE, _MEAN_LINE = 300, 70


def configured_registry() -> str:
    """The registry's address, as npm has it. Raises NotFound without npm."""
    npm = shutil.which("npm")
    if npm is None:
        raise NotFound("npm is not here; install Node.js to collect edits of JavaScript packages")
    asked = subprocess.run([npm, "config", "get", "registry"], capture_output=True, text=True, check=False)
    address = asked.stdout.strip().rstrip("/")
    if not address.startswith(("http://", "https://")):
        raise InputError(f"npm's registry {address!r} is not a web address; set one with `npm config`")
    return address


@dataclass(frozen=True, slots=True)
class NpmVersion:
    number: str
    archive: str  # its address


class NpmRegistry:
    """A client of the registry. Thread-safe as httpx's client is."""

    def __init__(self, base: str | None = None, *, transport: httpx.BaseTransport | None = None) -> None:
        self.base = base or configured_registry()
        self._server = Fetcher("the npm registry", transport=transport)

    def versions(self, name: str, count: int, until: datetime | None = None) -> tuple[str, list[NpmVersion]]:
        """The licence and the latest released versions of a package (before `until`), oldest first; none
        where the licence is not permissive or there is no such package."""
        response = self._server.get(f"{self.base}/{name.replace('/', '%2f')}")
        if response.status_code != 200:
            return "", []
        data = response.json()
        found: Mapping[str, Any] = data.get("versions") or {}
        stated = data.get("license") or (found[list(found)[-1]].get("license") if found else "")
        licence = permissive_licence({"license": stated.get("type") if isinstance(stated, dict) else stated})
        if licence is None:
            return "", []
        dates: Mapping[str, str] = data.get("time") or {}
        last = "9" if until is None else until.isoformat()  # both are of one form, so letters compare
        small = [
            NpmVersion(number, str(version["dist"]["tarball"]))
            for number, version in found.items()
            if _RELEASED.fullmatch(number)
            and (version["dist"].get("unpackedSize") or 0) < LARGEST_PACKAGE
            and dates.get(number, "") < last
        ]
        return licence, small[-count:]

    def fetch(self, version: NpmVersion) -> bytes:
        """Raises TooLarge."""
        return self._server.download(version.archive, LARGEST_PACKAGE)

    def close(self) -> None:
        self._server.close()


def script_files(data: bytes) -> dict[str, str]:
    """The sources of a package that somebody wrote, by path without its top folder."""
    found: dict[str, str] = {}
    total = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r|*") as archive:
            for count, member in enumerate(archive):
                path = member.name.partition("/")[2]
                if count >= MAX_ENTRIES or total > MAX_TOTAL:
                    break
                if not member.isreg() or not 0 < member.size <= LARGEST_FILE or not _SOURCE.search(path):
                    continue
                stream = None if _BUILT.search(path) else archive.extractfile(member)
                if stream is not None:
                    content = stream.read(LARGEST_FILE)
                    total += len(content)
                    if (text := _written(content)) is not None:
                        found[path] = text
    except (tarfile.TarError, zlib.error, EOFError, OSError, ValueError):
        pass  # what was read before the damage is as good as any
    return found


def _written(content: bytes) -> str | None:
    """The text of a file; None where a tool wrote it."""
    try:
        text = content.decode().replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None
    lines = text.split("\n")
    if max(map(len, lines)) > _LONGEST_LINE or len(text) > _MEAN_LINE * len(lines):
        return None
    return None if _WRITTEN_BY_A_TOOL.search(text) else text


def package_edits(name: str, licence: str, versions: Sequence[tuple[str, bytes]]) -> Iterator[FileEdit]:
    """Edits between consecutive versions, oldest first."""
    before: tuple[str, dict[str, str]] | None = None
    for number, data in versions:
        files = script_files(data)
        if before is not None:
            old = before[1]
            changed = sorted(path for path in old.keys() & files.keys() if old[path] != files[path])
            for path in changed[:FILES_OF_A_PAIR]:
                found = trajectory(old[path], files[path])
                if not isinstance(found, NoEdit):
                    yield FileEdit(f"npm:{name}", licence, before[0], number, path, found.before, found.hunks)
        before = (number, files)


def _store(name: str, licence: str, versions: Sequence[tuple[str, bytes]], target: Path) -> int:
    edits = list(without_sweeps(package_edits(name, licence, versions)))
    write_edits(target, edits)
    return len(edits)


def collect_packages(
    registry: NpmRegistry,
    names: Sequence[str],
    out: Path,
    *,
    versions: int = 4,
    until: datetime | None = None,
    workers: int = 6,
    processes: int = 0,
    report: Callable[[str, int, int], None] = lambda *_: None,
) -> Counter[str]:
    """Collect the edits of every package not yet in `out`; counts of outcomes. One that fails is counted
    and tried again next time."""
    out.mkdir(parents=True, exist_ok=True)
    outcomes: Counter[str] = Counter()

    def one(name: str) -> str:
        target = out / f"npm+{name.replace('/', '+')}.jsonl.gz"
        if target.exists():
            return "there"
        try:
            licence, found = registry.versions(name, versions, until)
            if len(found) < 2:
                return "left out"
            archives = [(version.number, registry.fetch(version)) for version in found]
            edits = crew.do(_store, name, licence, archives, target)
        except DownloadTooLarge:
            return "left out"
        except (
            KeystrokeError, httpx.HTTPError, OSError, ValueError, KeyError, TypeError, AttributeError,
            BrokenExecutor,
        ) as error:  # fmt: skip
            return f"failed: {type(error).__name__}"
        return "collected" if edits else "no edits"

    with Processes(processes) as crew, ThreadPoolExecutor(workers) as pool:
        for done, outcome in enumerate(bounded(pool, one, names, workers * 2), start=1):
            outcomes[outcome] += 1
            report("packages", done, len(names))
    return outcomes

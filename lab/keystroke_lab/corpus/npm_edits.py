"""Edits between consecutive versions of JavaScript and TypeScript packages.

The registry is the one npm is configured for. Licences and hunks follow the rules for Python. Bundles,
minified files and compiled modules are left out. Archives are untrusted: entries and sizes are bounded, and a
damaged archive yields what could be read before the damage.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

from keystroke.errors import InputError, NotFound
from keystroke_lab.corpus.archives import text_files
from keystroke_lab.corpus.collecting import Report, collect_each, store_version_edits
from keystroke_lab.corpus.downloads import DownloadTooLarge, Fetcher
from keystroke_lab.corpus.hunks import LARGEST_FILE
from keystroke_lab.corpus.licences import permissive_licence
from keystroke_lab.corpus.processes import Processes

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
    """The address of the registry that npm is configured for. Raises NotFound without npm."""
    npm = shutil.which("npm")
    if npm is None:
        raise NotFound("npm is not installed; install Node.js to collect edits of JavaScript packages")
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
        last = "9" if until is None else until.isoformat()  # both are ISO dates, which sort as strings
        small = [
            NpmVersion(number, str(version["dist"]["tarball"]))
            for number, version in found.items()
            if _RELEASED.fullmatch(number)
            and (version["dist"].get("unpackedSize") or 0) < LARGEST_PACKAGE
            and dates.get(number, "") < last
        ]
        return licence, small[-count:]

    def fetch(self, version: NpmVersion) -> bytes:
        """The bytes of the version's archive. Raises DownloadTooLarge."""
        return self._server.download(version.archive, LARGEST_PACKAGE)

    def close(self) -> None:
        self._server.close()


def script_files(data: bytes) -> dict[str, str]:
    """The hand-written sources of a package, by path without its top folder."""

    def wanted(path: str) -> bool:
        return _SOURCE.search(path) is not None and not _BUILT.search(path)

    return {path: text for path, text in text_files(data, wanted, LARGEST_FILE) if _is_handwritten(text)}


def _is_handwritten(text: str) -> bool:
    lines = text.split("\n")
    if max(map(len, lines)) > _LONGEST_LINE or len(text) > _MEAN_LINE * len(lines):
        return False
    return _WRITTEN_BY_A_TOOL.search(text) is None


def _store(name: str, licence: str, archives: Sequence[tuple[str, bytes]], target: Path) -> int:
    versions = ((number, script_files(data)) for number, data in archives)
    return store_version_edits(f"npm:{name}", licence, versions, target)


def collect_packages(
    registry: NpmRegistry,
    names: Sequence[str],
    out: Path,
    *,
    versions: int = 4,
    until: datetime | None = None,
    workers: int = 6,
    processes: int = 0,
    report: Report = lambda *_: None,
) -> Counter[str]:
    """Collect the edits of every package not yet in `out`; counts of outcomes. One that fails is counted
    and tried again next time."""

    def one(name: str, target: Path, worker_pool: Processes) -> str:
        licence, found = registry.versions(name, versions, until)
        if len(found) < 2:
            return "left out"
        try:
            archives = [(version.number, registry.fetch(version)) for version in found]
        except DownloadTooLarge:
            return "left out"
        return "collected" if worker_pool.do(_store, name, licence, archives, target) else "no edits"

    return collect_each(
        one,
        names,
        lambda name: out / f"npm+{name.replace('/', '+')}.jsonl.gz",
        "packages",
        workers=workers,
        processes=processes,
        report=report,
    )

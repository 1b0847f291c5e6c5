"""The package index this machine's pip is set up for, read through its JSON interface.

Lists projects and releases and downloads archives with checked hashes. Stores nothing and names no host:
the index is the one pip uses. Few requests run at a time; failed ones are retried with increasing delays.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import urljoin

import httpx

from keystroke.agent.evaluation.source_archives import configured_index, normalise_name
from keystroke_lab.corpus.downloads import Fetcher

_UNSTABLE = re.compile(r"(a|b|c|rc|alpha|beta|dev|pre|post)\d*", re.I)


@dataclass(frozen=True, slots=True)
class Download:
    """One file of a release."""

    url: str
    filename: str
    size: int
    sha256: str
    sdist: bool


@dataclass(frozen=True, slots=True)
class Release:
    version: str
    uploaded: datetime
    download: Download


@dataclass(frozen=True, slots=True)
class IndexedProject:
    """What the index says about one project."""

    name: str
    info: Mapping[str, Any]
    first_released: datetime
    releases: tuple[Release, ...]  # oldest first; each with its smallest suitable file

    @property
    def requirements(self) -> frozenset[str]:
        """Names this project says it needs."""
        found = (re.match(r"[A-Za-z0-9._-]+", line) for line in self.info.get("requires_dist") or ())
        return frozenset(normalise_name(m.group()) for m in found if m)


def _version_key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:6])


SMALL_ARCHIVE = 5 << 20
LARGEST = 16 << 20


def _suitable(files: list[Mapping[str, Any]], page: str) -> Download | None:
    """A source archive if it is small (it has the tests), else the smallest wheel, else a larger source
    archive."""
    sdists, wheels = [], []
    for file in files:
        size, sha256 = file.get("size"), (file.get("digests") or {}).get("sha256")
        if file.get("yanked") or not size or not sha256 or not file.get("url") or size > LARGEST:
            continue
        name, url = str(file.get("filename", "")), urljoin(page, str(file["url"]))
        if file.get("packagetype") == "sdist" and name.endswith((".tar.gz", ".zip", ".tgz")):
            sdists.append(Download(url, name, int(size), str(sha256), True))
        elif file.get("packagetype") == "bdist_wheel":
            wheels.append(Download(url, name, int(size), str(sha256), False))
    small = [d for d in sdists if d.size <= SMALL_ARCHIVE]
    return min(small or wheels or sdists, key=lambda d: d.size, default=None)


class PackageIndex:
    """A client of the index. Thread-safe as httpx's client is."""

    def __init__(
        self, base: str | None = None, *, connections: int = 8, transport: httpx.BaseTransport | None = None
    ) -> None:
        self.base = (base or configured_index()).rstrip("/")
        self._server = Fetcher("the package index", connections=connections, transport=transport)

    def names(self) -> list[str]:
        """Every project name on the index (a long list)."""
        response = self._server.get(
            f"{self.base}/simple/", headers={"Accept": "application/vnd.pypi.simple.v1+json"}
        )
        response.raise_for_status()
        if "json" in response.headers.get("Content-Type", ""):
            return [str(entry["name"]) for entry in response.json()["projects"]]
        return re.findall(r'<a href="[^"]*?([^"/]+)/"', response.text)

    def project(self, name: str) -> IndexedProject | None:
        """The project, or None if the index has no such name or nothing of it is usable."""
        page = f"{self.base}/pypi/{normalise_name(name)}/json"
        response = self._server.get(page)
        if response.status_code != 200:
            return None
        data = response.json()
        dates: list[datetime] = []
        releases: list[Release] = []
        for version, files in (data.get("releases") or {}).items():
            uploaded = [
                datetime.fromisoformat(f["upload_time_iso_8601"])
                for f in files
                if f.get("upload_time_iso_8601")
            ]
            if not uploaded:
                continue
            dates.append(min(uploaded))
            download = _suitable(files, page)
            if download and not _UNSTABLE.search(version):
                releases.append(Release(version, min(uploaded), download))
        if not releases:
            return None
        releases.sort(key=lambda r: (_version_key(r.version), r.uploaded))
        return IndexedProject(normalise_name(name), data.get("info") or {}, min(dates), tuple(releases))

    def fetch(self, download: Download) -> bytes:
        """The file's bytes, hash checked."""
        return self._server.fetch(download.url, download.sha256, download.filename)

    def close(self) -> None:
        self._server.close()

"""A client of the npm registry: the latest version of a package, its licence, dependencies and archive.

The registry is the one npm is configured for. It cannot list its packages; the caller starts with known names
and adds the dependencies of packages it has fetched. Nothing from a package is executed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import httpx

from keystroke_lab.corpus.downloads import Fetcher
from keystroke_lab.corpus.licences import permissive_licence
from keystroke_lab.corpus.npm_edits import configured_registry

LARGEST = 6_000_000  # bytes unpacked; if the registry gives no size, the limit applies to the archive


@dataclass(frozen=True, slots=True)
class NpmPackage:
    name: str
    version: str
    licence: str | None  # None: not permissive
    first_released: str
    archive: str  # its address
    requires: tuple[str, ...]


class NpmIndex:
    """A client of the registry. Thread-safe as httpx's client is."""

    def __init__(
        self, base: str | None = None, *, connections: int = 8, transport: httpx.BaseTransport | None = None
    ) -> None:
        self.base = base or configured_registry()
        self._server = Fetcher("the npm registry", connections=connections, transport=transport)

    def package(self, name: str) -> NpmPackage | None:
        """The package's latest version; None where there is none, it is too large, or it is not dated."""
        answer = self._server.get(f"{self.base}/{name.replace('/', '%2f')}")
        if answer.status_code != 200:
            return None
        data: Mapping[str, Any] = answer.json()
        number = (data.get("dist-tags") or {}).get("latest", "")
        latest: Mapping[str, Any] = (data.get("versions") or {}).get(number) or {}
        created = min((data.get("time") or {}).values(), default=None)
        archive = (latest.get("dist") or {}).get("tarball")
        if not created or not archive or (latest["dist"].get("unpackedSize") or 0) > LARGEST:
            return None
        stated = latest.get("license") or data.get("license")
        licence = permissive_licence({"license": stated.get("type") if isinstance(stated, dict) else stated})
        needs = [*(latest.get("dependencies") or ()), *(latest.get("devDependencies") or ())]
        return NpmPackage(name, str(number), licence, str(created), str(archive), tuple(dict.fromkeys(needs)))

    def fetch(self, package: NpmPackage) -> bytes:
        """The bytes of the package's archive. Raises DownloadTooLarge."""
        return self._server.download(package.archive, LARGEST)

    def close(self) -> None:
        self._server.close()


def without_compiled(paths: list[str]) -> set[str]:
    """The paths without compiled scripts: those named like a TypeScript file anywhere in the package."""
    typed = {PurePosixPath(p).stem for p in paths if p.endswith((".ts", ".tsx")) and not p.endswith(".d.ts")}
    scripts = (".js", ".mjs", ".cjs", ".jsx")
    return {p for p in paths if not (p.endswith(scripts) and PurePosixPath(p).stem in typed)}

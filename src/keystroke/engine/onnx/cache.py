"""A cache of converted models on disk, one folder per entry.

An entry is complete or absent: it is built in a temporary folder, described by a manifest of sizes and
hashes, and renamed into place. One process builds it while others wait.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from keystroke.engine.checkpoint.digest import quick_digest
from keystroke.errors import ModelError

if TYPE_CHECKING:
    from filelock import BaseFileLock

_MANIFEST = "manifest.json"
_PARTIAL = ".partial"
_LOCK = ".lock"


@dataclass(frozen=True, slots=True)
class CachedConversion:
    path: Path
    bytes: int
    last_used: float  # seconds since the epoch


class ConversionCache:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def entry(self, name: str, key: str, make: Callable[[Path], None], needed: int) -> Path:
        """The folder for `key`, built by `make(empty folder)` if it is missing or damaged. `needed` is its
        approximate size. A failure leaves no entry."""
        label = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:60] or "model"
        place = self.folder / f"{label}-{hashlib.sha256(key.encode()).hexdigest()[:20]}"
        if _is_intact(place):
            _touch(place)
            return place
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with _lock(self.folder / (place.name + _LOCK)):
                if not _is_intact(place):  # another process may have built it meanwhile
                    self._make(place, make, needed)
        except OSError as error:
            raise ModelError(
                f"the converted model could not be written to {self.folder} ({error.strerror or error}); "
                "free some space there or choose another cache folder"
            ) from error
        _touch(place)
        return place

    def _make(self, place: Path, make: Callable[[Path], None], needed: int) -> None:
        for leftover in self.folder.glob(f"{place.name}{_PARTIAL}*"):  # of a dead process: we hold the lock
            shutil.rmtree(leftover, ignore_errors=True)
        _check_space(self.folder, needed)
        partial = self.folder / f"{place.name}{_PARTIAL}-{os.getpid()}"
        partial.mkdir()
        try:
            make(partial)
            _describe(partial)
            _remove(place)  # a damaged one
            partial.rename(place)
            _sync(self.folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def entries(self) -> list[CachedConversion]:
        """Complete entries, the most recently used first."""
        found = []
        for manifest in self.folder.glob(f"*/{_MANIFEST}"):
            if _PARTIAL in manifest.parent.name:
                continue
            with contextlib.suppress(OSError):  # removed by another process meanwhile
                size = sum(file.stat().st_size for file in manifest.parent.iterdir())
                found.append(CachedConversion(manifest.parent, size, manifest.stat().st_mtime))
        return sorted(found, key=lambda entry: -entry.last_used)

    def prune(self, limit: int = 0) -> int:
        """Remove the least recently used entries until at most `limit` bytes are left. Returns the bytes
        freed. A process that runs a removed model is not affected: it has mapped the file."""
        try:
            return self._prune_entries(limit) + self._prune_leftovers()
        except OSError as error:
            raise ModelError(
                f"{self.folder} could not be cleared ({error.strerror or error}); check its permissions"
            ) from error

    def clear(self) -> None:
        """Remove every entry and every free lock; entries that are being built stay."""
        self.prune()
        for lock in self.folder.glob(f"*{_LOCK}"):
            with contextlib.suppress(OSError), _lock(lock, blocking=False):  # a TimeoutError is one too
                lock.unlink()
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def _prune_entries(self, limit: int) -> int:
        freed, kept = 0, 0
        for entry in self.entries():
            if kept + entry.bytes <= limit:
                kept += entry.bytes
            else:
                _remove(entry.path)
                freed += entry.bytes
        return freed

    def _prune_leftovers(self) -> int:
        """Remove the partial entries of dead processes; live ones hold their lock."""
        freed = 0
        for leftover in self.folder.glob(f"*{_PARTIAL}-*"):
            lock = self.folder / (leftover.name.partition(_PARTIAL)[0] + _LOCK)
            with contextlib.suppress(TimeoutError), _lock(lock, blocking=False):
                freed += sum(file.stat().st_size for file in leftover.iterdir())
                shutil.rmtree(leftover, ignore_errors=True)
        return freed


def _is_intact(place: Path) -> bool:
    """Whether the sizes and sampled hashes of all files match the manifest."""
    try:
        files = json.loads((place / _MANIFEST).read_bytes())["files"]
        return bool(files) and all(
            (place / name).stat().st_size == described["bytes"]
            and quick_digest([place / name]) == described["digest"]
            for name, described in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _describe(folder: Path) -> None:
    files = {}
    for path in sorted(folder.iterdir()):
        _sync(path)
        files[path.name] = {"bytes": path.stat().st_size, "digest": quick_digest([path])}
    manifest = folder / _MANIFEST
    manifest.write_text(json.dumps({"made": time.time(), "files": files}, indent=1))
    _sync(manifest)
    _sync(folder)


def _remove(place: Path) -> None:
    """Remove an entry, its manifest first, so that a partly removed entry is never considered complete."""
    (place / _MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(place, ignore_errors=True)


def _touch(place: Path) -> None:
    with contextlib.suppress(OSError):  # a read-only cache works, without times of use
        os.utime(place / _MANIFEST)


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    wanted = needed + needed // 50 + (16 << 20)
    if free < wanted:
        raise ModelError(
            f"the converted model needs {_format_size(wanted)} in {folder}, where {_format_size(free)} are "
            "free; free some space or choose another cache folder"
        )


def _format_size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _sync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return  # folders cannot be opened on Windows
    handle = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _lock(path: Path, *, blocking: bool = True) -> BaseFileLock:
    """A lock that the system releases if the process dies. Unless `blocking`, entering it raises TimeoutError
    if it is taken. Imported here: not needed to load a cached model."""
    from filelock import FileLock

    return FileLock(path, blocking=blocking)

"""Which state of the program this is: two installations of one version are told apart by it.

Cheap enough for every command, so no source and no weights are read. An installed package is known by
its RECORD, where the installer put the checksum of every file, the shipped weights' too; a checkout, and what
came without a RECORD, by the names, sizes and times of its files. Nothing changed: the same words every time.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


def fingerprint() -> str:
    """Where the program lies and what it is made of, as the disk has it now."""
    package = Path(__file__).resolve().parents[2]
    source = checkout(package)
    record = _record(package) if source is None else None
    if record is None:
        places = [package] if source is None else [package, source / "models"]
        record = "\n".join(sorted(line for place in places for line in _files(place)))
    return f"{package}@{hashlib.sha256(record.encode()).hexdigest()[:16]}"


def checkout(package: Path | None = None) -> Path | None:
    """The checkout that the program runs from; None where it is installed."""
    root = (package or Path(__file__).resolve().parents[2]).parents[1]
    return root if (root / "pyproject.toml").is_file() else None


def _record(package: Path) -> str | None:
    """What the installer wrote down about this very package; None where it did not, or about another one."""
    try:
        installed = distribution("keystroke")
    except PackageNotFoundError:
        return None
    place = Path(str(installed.locate_file(package.name)))
    return installed.read_text("RECORD") if place.resolve() == package else None


def _files(folder: Path) -> Iterator[str]:
    """Path, size and time of every file below, as far as they can be seen."""
    pending = [str(folder)]
    while pending:
        with suppress(OSError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.name.startswith(".") or entry.name == "__pycache__":
                    continue  # what editors and Python put there
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                    continue
                with suppress(OSError):  # replaced just now
                    found = entry.stat()
                    yield f"{entry.path} {found.st_size} {found.st_mtime_ns}"

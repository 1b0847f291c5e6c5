"""A fingerprint of the installed program, which differs between installations of the same version.

It is cheap enough for every command: an installed package is identified by its RECORD file, which contains
the checksums of all files; a checkout by the names, sizes and modification times of its files.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


def fingerprint() -> str:
    """The program's path and a hash of its files as they are on disk now."""
    package = Path(__file__).resolve().parents[2]
    source = checkout(package)
    record = _record(package) if source is None else None
    if record is None:
        places = [package] if source is None else [package, source / "models"]
        record = "\n".join(sorted(line for path in places for line in _files(path)))
    return f"{package}@{hashlib.sha256(record.encode()).hexdigest()[:16]}"


def checkout(package: Path | None = None) -> Path | None:
    """The checkout that the program runs from; None for an installation."""
    root = (package or Path(__file__).resolve().parents[2]).parents[1]
    return root if (root / "pyproject.toml").is_file() else None


def _record(package: Path) -> str | None:
    """The RECORD of this package; None if it has none, or belongs to another copy."""
    try:
        installed = distribution("keystroke")
    except PackageNotFoundError:
        return None
    path = Path(str(installed.locate_file(package.name)))
    return installed.read_text("RECORD") if path.resolve() == package else None


def _files(folder: Path) -> Iterator[str]:
    """Path, size and modification time of every readable file below a folder."""
    pending = [str(folder)]
    while pending:
        with suppress(OSError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.name.startswith(".") or entry.name == "__pycache__":
                    continue  # created by editors and Python
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                    continue
                with suppress(OSError):  # replaced at this moment
                    found = entry.stat()
                    yield f"{entry.path} {found.st_size} {found.st_mtime_ns}"

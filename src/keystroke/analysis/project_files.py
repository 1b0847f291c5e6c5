"""The files of a tree that belong to it.

What git ignores is left out where git can be asked; a repository's own settings run nothing. Nothing is
read here, and links are named as they are.
"""

from __future__ import annotations

import math
import os
import subprocess
import time
from pathlib import Path

_PATIENCE = 60.0  # seconds for git, where nobody is in a hurry
_SKIPPED_FOLDERS = {
    ".git",
    ".hg",
    ".svn",
    "node_modules",
    "__pycache__",
    ".venv",
    "venv",
    ".tox",
    ".mypy_cache",
    "dist",
    "build",
}


def project_files(root: Path, *, seconds: float | None = None) -> list[Path]:
    """Every file below `root` that git tracks or would track, in order of name; where git cannot say, every
    file outside folders that hold no source. `seconds`: how long looking may take; what was found by then is
    what there is (a root may be a whole disk)."""
    return _tracked(root, seconds or _PATIENCE) or _walked(root, seconds)


def _tracked(root: Path, seconds: float) -> list[Path]:
    # A repository may name a program as its file system monitor: looking must not start it.
    command = ["git", "-C", str(root), "-c", "core.fsmonitor=false", "ls-files", "-z", "--cached", "--others"]
    try:
        found = subprocess.run(
            [*command, "--exclude-standard"], capture_output=True, timeout=seconds, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return sorted({root / os.fsdecode(name) for name in found.stdout.split(b"\0") if name})


def _walked(root: Path, seconds: float | None) -> list[Path]:
    out: list[Path] = []
    until = math.inf if seconds is None else time.monotonic() + seconds
    for folder, folders, names in os.walk(root, followlinks=False):
        if time.monotonic() > until:
            break
        folders[:] = sorted(
            name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith(".")
        )
        out.extend(Path(folder) / name for name in names)
    return sorted(out)

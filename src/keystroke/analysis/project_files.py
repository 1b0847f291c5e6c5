"""Lists the files of a project without reading them.

Files that git ignores are left out if git is available; settings of the repository run no program. Links are
not followed.
"""

from __future__ import annotations

import math
import os
import stat
import subprocess
import time
from collections.abc import Container, Iterable, Iterator
from pathlib import Path

from keystroke.analysis.git import run_git

_GIT_TIMEOUT = 60.0  # seconds
_SKIPPED_FOLDERS = frozenset({"node_modules", "__pycache__", "venv", "dist", "build"})
_NO_PYTHON_SOURCE = _SKIPPED_FOLDERS | {"env", "site-packages", "htmlcov"}


def project_files(root: Path, *, seconds: float | None = None) -> list[Path]:
    """Every file below `root` that git tracks or would track, sorted by name; without git, every file outside
    folders that hold no source. `seconds`: a time limit, after which the files found so far are returned."""
    return _list_tracked(root, seconds or _GIT_TIMEOUT) or _walk_folders(root, seconds)


def _list_tracked(root: Path, seconds: float) -> list[Path]:
    try:
        found = run_git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", seconds=seconds)
        found.check_returncode()
    except (OSError, subprocess.SubprocessError):
        return []
    return sorted({root / os.fsdecode(name) for name in found.stdout.split(b"\0") if name})


def _walk_folders(root: Path, seconds: float | None) -> list[Path]:
    out: list[Path] = []
    until = math.inf if seconds is None else time.monotonic() + seconds
    for folder, folders, names in os.walk(root, followlinks=False):
        if time.monotonic() > until:
            break
        folders[:] = _source_folders(folders, _SKIPPED_FOLDERS)
        out.extend(path for name in names if not _is_special(path := Path(folder, name)))
    return sorted(out)


def _is_special(path: Path) -> bool:
    """Whether this is a pipe, a socket or a device, which nobody may open: a pipe would wait for a writer."""
    try:
        return stat.S_IFMT(path.stat().st_mode) != stat.S_IFREG
    except OSError:
        return True


def python_files(root: Path) -> Iterator[str]:
    """The Python files of a workspace as relative paths, without environments, caches and hidden folders."""
    for folder, folders, names in os.walk(root):
        folders[:] = _source_folders(folders, _NO_PYTHON_SOURCE)
        place = Path(folder).relative_to(root)
        for name in sorted(names):
            if name.endswith(".py") and not (Path(folder) / name).is_symlink():
                yield (place / name).as_posix()


def _source_folders(folders: Iterable[str], skipped: Container[str]) -> list[str]:
    return sorted(name for name in folders if name not in skipped and not name.startswith("."))

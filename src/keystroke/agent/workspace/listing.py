"""Lists the files of a project.

Files that git ignores are left out; without git, folders that tools generate. So are names that are not
UTF-8. Names are relative to the root, with forward slashes, in a fixed order. The repository's own hooks and
monitors are not run.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from keystroke.analysis.git import run_git

MOST = 50_000  # files; a larger tree is cut, so that a home folder does not block
GENERATED = frozenset(
    {
        ".git", ".hg", ".svn", "node_modules", ".venv", "venv", ".tox", ".nox", "__pycache__", ".mypy_cache",
        ".pytest_cache", ".ruff_cache", ".hypothesis", ".cache", "dist", "build", ".eggs", "target",
        ".direnv",
    }
)  # fmt: skip
_TEMPORARY = (".pyc", ".pyo", ".orig", ".rej")
_SECONDS = 30


def list_files(root: Path) -> list[str]:
    """The project's files below `root`."""
    found = _run_git(root, ["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
    if found is not None:
        names = sorted({os.fsdecode(name) for name in found.split(b"\0") if name})
        return list(islice((name for name in names if is_text(name) and (root / name).is_file()), MOST))
    names, waiting = [], [""]
    while waiting and len(names) < MOST:
        inside = waiting.pop()
        try:
            with os.scandir(root / inside) as entries:
                ordered = sorted(entries, key=lambda entry: entry.name)
        except OSError:
            continue
        folders = []
        for entry in ordered:
            name = f"{inside}/{entry.name}" if inside else entry.name
            if not is_text(entry.name):
                continue
            if entry.is_dir(follow_symlinks=False):
                folders += [name] if entry.name not in GENERATED else []
            elif not entry.name.endswith(_TEMPORARY):
                names.append(name)
        waiting += reversed(folders)
    return names[:MOST]


def is_text(name: str) -> bool:
    """Whether a file name is UTF-8; others can be neither shown to a model nor recorded."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def ignored_files(root: Path, names: Iterable[str]) -> set[str]:
    """The names among these that are temporary files of tools, or that git ignores."""
    wanted = list(names)
    ignored = {
        name for name in wanted if name.endswith(_TEMPORARY) or not GENERATED.isdisjoint(name.split("/")[:-1])
    }
    rest = [name for name in wanted if name not in ignored]
    if rest:
        output = _run_git(root, ["check-ignore", "-z", "--stdin"], b"\0".join(map(os.fsencode, rest)))
        ignored |= {os.fsdecode(name) for name in (output or b"").split(b"\0") if name}
    return ignored


def _run_git(root: Path, arguments: Sequence[str], stdin: bytes = b"") -> bytes | None:
    """git's output; None where there is no git or no repository."""
    try:
        done = run_git(root, *arguments, stdin=stdin, seconds=_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode in (0, 1) else None

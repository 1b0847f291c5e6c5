"""Which files a project consists of.

What git ignores is left out where git can be asked; else folders that tools fill. Names are relative to
the root, with forward slashes, in order. No repository's own monitor or hook is run.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

MOST = 50_000  # files; a larger tree is cut, so that nobody waits for a home folder
FILLED = frozenset(
    {
        ".git", ".hg", ".svn", "node_modules", ".venv", "venv", ".tox", ".nox", "__pycache__", ".mypy_cache",
        ".pytest_cache", ".ruff_cache", ".hypothesis", ".cache", "dist", "build", ".eggs", "target",
        ".direnv",
    }
)  # fmt: skip
_LITTER = (".pyc", ".pyo", ".orig", ".rej")
_SECONDS = 30


def listed(root: Path, most: int = MOST) -> list[str]:
    """The project's files below `root`."""
    found = _git(root, ["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
    if found is not None:
        names = sorted({os.fsdecode(name) for name in found.split(b"\0") if name})
        return [name for name in names if (root / name).is_file()][:most]
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in FILLED)
        inside = Path(folder).relative_to(root)
        names += [(inside / name).as_posix() for name in sorted(files) if not name.endswith(_LITTER)]
        if len(names) >= most:
            break
    return names[:most]


def unwanted(root: Path, names: Iterable[str]) -> set[str]:
    """Which of these names the project does not want to keep: litter of tools, and what git ignores."""
    wanted = list(names)
    litter = {
        name for name in wanted if name.endswith(_LITTER) or not FILLED.isdisjoint(name.split("/")[:-1])
    }
    rest = [name for name in wanted if name not in litter]
    if rest:
        told = _git(root, ["check-ignore", "-z", "--stdin"], b"\0".join(map(os.fsencode, rest)))
        litter |= {os.fsdecode(name) for name in (told or b"").split(b"\0") if name}
    return litter


def _git(root: Path, arguments: Sequence[str], given: bytes = b"") -> bytes | None:
    """What git says; None where there is no git or no repository."""
    command = ["git", "-C", str(root), "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null"]
    try:
        done = subprocess.run(
            [*command, *arguments], input=given, capture_output=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode in (0, 1) else None

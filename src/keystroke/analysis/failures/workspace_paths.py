"""Maps a printed path to a file of the workspace.

Files outside the workspace and installed packages give None. A compiler or a virtual machine may print only
the end of a path, which is accepted if exactly one file matches.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from keystroke.analysis.failures.failure import StackFrame

_FOREIGN = frozenset({"site-packages", "dist-packages", "node_modules", ".venv", "venv"})
_SKIPPED = _FOREIGN | {"__pycache__"}
_FILES = 50_000  # files that are searched for the end of a path


def workspace_path(frame: StackFrame, root: Path, cwd: Path, *, search: bool = False) -> str | None:
    """The path of a frame's file in the workspace. `cwd` is the folder the program ran in; `search`: accept a
    file whose path ends with the printed one."""
    if not frame.path or frame.path.startswith("<") or "\0" in frame.path:
        return None
    path = Path(frame.path)
    try:
        real = (path if path.is_absolute() else cwd / path).resolve()
        top = root.resolve()
        name = real.relative_to(top) if real.is_relative_to(top) else None
        if name is not None and real.is_file():
            return None if _FOREIGN & set(name.parts) else name.as_posix()
    except (ValueError, OSError, RuntimeError):
        return None
    if not search or path.is_absolute():
        return None
    return _single(_paths_ending_in(top, frame.path))


def _single(found: Iterator[str]) -> str | None:
    first = next(found, None)
    return first if next(found, None) is None else None


def _paths_ending_in(root: Path, printed: str) -> Iterator[str]:
    parts = [part for part in PurePosixPath(printed).parts if part not in (".", "..")]
    if not parts:
        return
    seen = 0
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED and not name.startswith(".")]
        seen += len(names)
        if seen > _FILES:
            return
        if parts[-1] in names:
            name = (Path(folder) / parts[-1]).relative_to(root)
            if list(name.parts[-len(parts) :]) == parts:
                yield name.as_posix()

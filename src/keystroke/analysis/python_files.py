"""The Python files of a workspace, as names relative to it.

Folders that hold no source of the project (environments, caches, hidden ones) are left out, and links
are not followed, so nothing outside is ever listed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

SKIPPED = frozenset(
    {"node_modules", "__pycache__", "venv", "env", "site-packages", "build", "dist", "htmlcov"}
)


def python_files(root: Path) -> Iterator[str]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in SKIPPED and not name.startswith("."))
        place = Path(folder).relative_to(root)
        for name in sorted(names):
            if name.endswith(".py") and not (Path(folder) / name).is_symlink():
                yield (place / name).as_posix()

"""A settings file of a project, read as what it is: something a stranger may have written.

Regular files only, inside the project, bounded in size and in the length of a line (parsers of dotted
keys take quadratic time on one long line). Anything else says nothing. Never waits: a pipe or a device is
not read, and a link that leads out of the project is not followed.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

LARGEST = 256 * 1024
LONGEST_LINE = 4096


def read_settings(path: Path, root: Path | None = None, largest: int = LARGEST) -> str:
    """Its text; empty where there is none to be read. `root`: the project's folder, where it is known."""
    try:
        if root is not None and not path.resolve().is_relative_to(root.resolve()):
            return ""
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(descriptor, "rb") as stream:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode) or about.st_size > largest:
                return ""
            text = stream.read(largest).decode("utf-8", "replace")
    except (OSError, ValueError, RuntimeError):
        return ""
    return "" if any(len(line) > LONGEST_LINE for line in text.splitlines()) else text

"""Reads settings files of a project, which are untrusted.

Only regular files inside the project are read, bounded in size and in the length of a line (parsers of dotted
keys take quadratic time on a long line). Everything else counts as empty; reading never blocks.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

LARGEST = 256 * 1024
LONGEST_LINE = 4096


def read_settings(path: Path, root: Path | None = None, largest: int = LARGEST) -> str:
    """The text of a settings file; empty if it cannot be read. `root`: the project's folder, if known."""
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

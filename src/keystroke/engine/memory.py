"""How much memory this machine can still give.

Law: asks the system and guesses nothing; None where it will not say.
"""

from __future__ import annotations

import os
from pathlib import Path


def available_bytes() -> int | None:
    """Memory that can be taken without swapping, as the system estimates it."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:  # macOS has no such estimate; all of the memory is the most there can be
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None

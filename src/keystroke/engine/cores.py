"""The number of processor cores that this process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """The cores that the process may run on if the system reports them, else all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

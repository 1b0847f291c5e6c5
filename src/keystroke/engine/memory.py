"""How much memory is available on this machine and in this container."""

from __future__ import annotations

import os
from pathlib import Path

MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def available_bytes() -> int | None:
    """Memory that can be allocated without swapping, as the system estimates it, within a container's limit;
    None if the system does not report it."""
    known = [count for count in (_machine(), _container()) if count is not None]
    return min(known, default=None)


def _machine() -> int | None:
    try:
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:  # macOS has no such estimate: use the total
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _container() -> int | None:
    """What the control group has left, counting its file cache as free. None if it has no limit."""
    try:
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        counts = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        return max(limit - used + int(counts.get("inactive_file", 0)), 0)
    except (OSError, ValueError):  # "max" means none
        return None

"""The memory that is available on this machine and in this container."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path

MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def available_bytes() -> int | None:
    """Memory that can be allocated without swapping, as the system estimates it, within a container's limit;
    None if the system does not report it."""
    known = [count for count in (_machine_memory(), _container_memory()) if count is not None]
    return min(known, default=None)


def _machine_memory() -> int | None:
    try:
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    if (found := _mac_memory()) is not None:
        return found
    return total_memory() or None  # no such estimate


def total_memory() -> int:
    """The machine's memory in bytes; 0 where the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


def _mac_memory() -> int | None:
    """The memory that macOS can allocate: free pages, and those it may drop. None elsewhere."""
    if platform.system() != "Darwin":
        return None
    try:
        done = subprocess.run(["vm_stat"], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return droppable_bytes(done.stdout)


def droppable_bytes(vm_stat: str) -> int | None:
    """The bytes of free, inactive, speculative and purgeable pages in the output of `vm_stat`; None if it
    is not understood. Purgeable pages may be counted twice, if they are inactive too: they are few."""
    size = re.search(r"page size of (\d+) bytes", vm_stat)
    pages = dict(re.findall(r"^Pages (\w+):\s+(\d+)\.", vm_stat, re.MULTILINE))
    if size is None or not {"free", "inactive"} <= pages.keys():
        return None
    kinds = ("free", "inactive", "speculative", "purgeable")
    return int(size[1]) * sum(int(pages.get(kind, 0)) for kind in kinds)


def _container_memory() -> int | None:
    """The memory that the control group has left, with its file cache as free; None if it has no limit."""
    try:
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        counts = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        return max(limit - used + int(counts.get("inactive_file", 0)), 0)
    except (OSError, ValueError):  # "max" means none
        return None

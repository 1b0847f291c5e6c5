"""A tree of processes: how much it takes, and how all of it is ended.

Law: looks and kills, nothing else. Everything below a process is found by who started whom, so what calls
itself a daemon is found too, as long as orphans fall to a process of the tree (a namespace's first process,
or a subreaper).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_PASSES = 200  # looks at a tree that grows while it is being stopped


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    parent: int
    memory: int  # bytes
    threads: int


def tree(root: int) -> list[Process]:
    """Every living process below `root`, and `root` itself, in no special order."""
    children: dict[int, list[Process]] = {}
    found: list[Process] = []
    for process in _all():
        children.setdefault(process.parent, []).append(process)
        if process.pid == root:
            found.append(process)
    wave = [root]
    while wave:
        below = [child for pid in wave for child in children.get(pid, ())]
        found += below
        wave = [child.pid for child in below]
    return found


def owned() -> int:
    """How many threads the user has, everywhere on this machine."""
    user, count = os.getuid(), 0
    for process in _all():
        with contextlib.suppress(OSError):
            if sys.platform != "linux" or os.stat(f"/proc/{process.pid}").st_uid == user:
                count += process.threads
    return count


def end_tree(root: int) -> None:
    """Kill `root` and everything below it. All are stopped first: what stands still starts nothing more, and
    nothing loses its parent before it was found."""
    stopped: set[int] = set()
    for _ in range(_PASSES):
        fresh = {process.pid for process in tree(root)} - stopped
        if not fresh:
            break
        for pid in fresh:
            _send(pid, signal.SIGSTOP)
        stopped |= fresh
    for pid in (*stopped, root):
        _send(pid, signal.SIGKILL)


def end_namespace(root: int) -> None:
    """Kill the first process of a namespace, which `root` started: the kernel ends all others with it,
    however many there are and however fast they multiply."""
    for process in _all():
        if process.parent == root:
            _send(process.pid, signal.SIGKILL)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _all() -> Iterator[Process]:
    return _from_proc() if sys.platform == "linux" else _from_ps()


def _from_proc() -> Iterator[Process]:
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                stat = file.read()
        except OSError:
            continue  # it is gone
        # The name stands in parentheses and may hold anything, so fields are counted from the last one.
        fields = stat[stat.rindex(b")") + 2 :].split()
        if fields[0] != b"Z":
            yield Process(int(name), int(fields[1]), int(fields[21]) * _PAGE, int(fields[17]))


def _from_ps() -> Iterator[Process]:
    told = subprocess.run(
        ["ps", "-axo", "pid=,ppid=,rss=,stat="], capture_output=True, text=True, check=False
    )
    for line in told.stdout.splitlines():
        pid, parent, memory, state = line.split(None, 3)
        if not state.startswith("Z"):
            yield Process(int(pid), int(parent), int(memory) * 1024, 1)

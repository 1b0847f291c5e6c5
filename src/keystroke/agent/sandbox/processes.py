"""A tree of processes: how much it takes, and how all of it is ended.

Looks and kills, nothing else. Everything below a process is found by who started whom, so what calls
itself a daemon is found too, as long as orphans fall to a process of the tree (a namespace's first process,
or a subreaper).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_STALE = 0.25  # seconds that a count of all of a user's threads is good for; it only widens a limit
_PASSES = 200  # looks at a tree that grows while it is being stopped


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    parent: int
    memory: int  # bytes
    threads: int


@dataclass(slots=True)
class _Look:
    """What was seen last, of all processes; shared, for a look costs a file a process."""

    processes: list[Process] = field(default_factory=list)
    at: float = -1e9
    count: int = 0


_look, _looking = _Look(), threading.Lock()
_owned, _counting = _Look(), threading.Lock()


def tree(root: int, age: float = 0.0) -> list[Process]:
    """Every living process below `root`, and `root` itself, in no special order. `age`: what was seen so many
    seconds ago will do, so that many who watch look once."""
    children: dict[int, list[Process]] = {}
    found: list[Process] = []
    for process in _seen(age):
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
    with _counting:
        if time.monotonic() - _owned.at > _STALE:
            user, count = os.getuid(), 0
            for process in _seen(_STALE):
                with contextlib.suppress(OSError):
                    if sys.platform != "linux" or os.stat(f"/proc/{process.pid}").st_uid == user:
                        count += process.threads
            _owned.at, _owned.count = time.monotonic(), count
        return _owned.count


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


def _seen(age: float) -> list[Process]:
    """All processes of the machine, as they were at most `age` seconds ago."""
    with _looking:
        if not age or time.monotonic() - _look.at > age:
            _look.processes, _look.at = list(_all()), time.monotonic()
        return _look.processes


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

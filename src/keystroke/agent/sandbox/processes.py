"""Measures and kills a tree of processes.

Descendants are found by parent process, daemons too, as long as a process of the tree adopts orphans (a
namespace's first process, or a subreaper).
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
_STALE = 0.25  # seconds that the count of a user's threads stays valid; it only widens a limit
_PASSES = 200  # over a tree that grows while it is being stopped


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    parent: int
    memory: int  # bytes
    threads: int


@dataclass(slots=True)
class _Scan:
    """The last scan of all processes; shared, because a scan reads one file per process."""

    processes: list[Process] = field(default_factory=list)
    at: float = -1e9
    count: int = 0


_scan, _scanning = _Scan(), threading.Lock()
_owned, _counting = _Scan(), threading.Lock()


def process_tree(root: int, age: float = 0.0) -> list[Process]:
    """Every living process below `root`, and `root` itself, in any order. A scan at most `age` seconds old
    is reused, so that several watchers share one."""
    children: dict[int, list[Process]] = {}
    found: list[Process] = []
    for process in _scan_processes(age):
        children.setdefault(process.parent, []).append(process)
        if process.pid == root:
            found.append(process)
    wave = [root]
    while wave:
        below = [child for pid in wave for child in children.get(pid, ())]
        found += below
        wave = [child.pid for child in below]
    return found


def user_thread_count() -> int:
    """The number of the user's threads on this machine."""
    with _counting:
        if time.monotonic() - _owned.at > _STALE:
            user, count = os.getuid(), 0
            for process in _scan_processes(_STALE):
                with contextlib.suppress(OSError):
                    if sys.platform != "linux" or os.stat(f"/proc/{process.pid}").st_uid == user:
                        count += process.threads
            _owned.at, _owned.count = time.monotonic(), count
        return _owned.count


def end_tree(root: int) -> None:
    """Kill `root` and its descendants. All are stopped first, so that none starts another or loses its
    parent before it is found."""
    stopped: set[int] = set()
    for _ in range(_PASSES):
        fresh = {process.pid for process in process_tree(root)} - stopped
        if not fresh:
            break
        for pid in fresh:
            _send(pid, signal.SIGSTOP)
        stopped |= fresh
    for pid in (*stopped, root):
        _send(pid, signal.SIGKILL)


def end_group(leader: int) -> None:
    """Kill what is left of the process group of a process that has ended: children that it started in its
    last moment."""
    try:
        os.kill(leader, 0)  # another process that has the number now
    except ProcessLookupError:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
    except PermissionError:
        return


def end_namespace(root: int) -> bool:
    """Kill the first process of the namespace that `root` started: the kernel ends all others with it. False
    where `root` has not started it yet."""
    first = [process.pid for process in _list_processes() if process.parent == root]
    for pid in first:
        _send(pid, signal.SIGKILL)
    return bool(first)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _scan_processes(age: float) -> list[Process]:
    """All processes of the machine, at most `age` seconds old."""
    with _scanning:
        if not age or time.monotonic() - _scan.at > age:
            _scan.processes, _scan.at = list(_list_processes()), time.monotonic()
        return _scan.processes


def _list_processes() -> Iterator[Process]:
    return _from_proc() if sys.platform == "linux" else _from_ps()


def _from_proc() -> Iterator[Process]:
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                stat = file.read()
        except OSError:
            continue  # it has ended
        # The name is in parentheses and may contain anything, so fields are counted from the last one.
        fields = stat[stat.rindex(b")") + 2 :].split()
        if fields[0] != b"Z":
            yield Process(int(name), int(fields[1]), int(fields[21]) * _PAGE, int(fields[17]))


def _from_ps() -> Iterator[Process]:
    listing = subprocess.run(
        ["ps", "-axo", "pid=,ppid=,rss=,stat="], capture_output=True, text=True, check=False
    )
    for line in listing.stdout.splitlines():
        pid, parent, memory, state = line.split(None, 3)
        if not state.startswith("Z"):
            yield Process(int(pid), int(parent), int(memory) * 1024, 1)

"""A hard limit on the number of processes, where the system lends us a control group.

Best effort. Looking every few milliseconds ends a tree that grows, but a bomb grows faster than one
looks on a busy machine; a control group (version 2 or 1) cannot be outrun. Where none can be made, nothing
changes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
_JOIN = 'echo 0 > "$0"; exec "$@"'  # a process moves itself, then becomes the command
_number = itertools.count()


@dataclass(frozen=True, slots=True)
class Group:
    """`prefix` goes before a command that shall join; empty where there is no group."""

    folder: Path | None = None

    @property
    def prefix(self) -> tuple[str, ...]:
        if self.folder is None:
            return ()
        return ("/bin/sh", "-c", _JOIN, str(self.folder / "cgroup.procs"))

    def reached(self) -> bool:
        """Whether a process was refused because there are as many as may be."""
        if self.folder is None:
            return False
        try:
            told = (self.folder / "pids.events").read_text().split()
        except OSError:
            return False
        return told[-1:] not in ([], ["0"])


@contextlib.contextmanager
def process_limit(most: int) -> Iterator[Group]:
    """A group of at most `most` processes, or the empty one. It is removed afterwards."""
    group = _made(most)
    if group is None:
        yield Group()
        return
    try:
        yield Group(group)
    finally:
        for _ in range(50):  # it cannot go while the last process is being buried
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.01)


def _made(most: int) -> Path | None:
    for parent in _parents():
        group = parent / f"keystroke-{os.getpid()}-{next(_number)}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / "pids.max").write_text(str(most))
            if os.access(group / "cgroup.procs", os.W_OK):
                return group
        except OSError:
            pass
        with contextlib.suppress(OSError):
            group.rmdir()
    return None


def _parents() -> list[Path]:
    """Groups that may hold one of ours: of version 1 our own; of version 2 the one around ours, for a group
    with processes in it lends nothing to groups below."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "pids" in controllers.split(","):
            found.append(_MOUNT / "pids" / path.lstrip("/"))
        elif not controllers:
            own = _MOUNT / path.lstrip("/")
            found.append(own if path == "/" else own.parent)
    return [group for group in found if os.access(group, os.W_OK)]

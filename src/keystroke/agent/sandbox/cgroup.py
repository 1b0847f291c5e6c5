"""A hard limit on the number of processes, by a control group (version 1 or 2) where one can be created.

Best effort: polling ends a growing process tree, but a fork bomb can grow faster than polling on a busy
machine. A control group cannot be outrun.
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
class ControlGroup:
    """`prefix` precedes a command that joins the group; empty where there is no group."""

    folder: Path | None = None

    @property
    def prefix(self) -> tuple[str, ...]:
        if self.folder is None:
            return ()
        return ("/bin/sh", "-c", _JOIN, str(self.folder / "cgroup.procs"))

    def limit_reached(self) -> bool:
        """Whether a process was refused because of the limit."""
        if self.folder is None:
            return False
        try:
            events = (self.folder / "pids.events").read_text().split()
        except OSError:
            return False
        return events[-1:] not in ([], ["0"])


@contextlib.contextmanager
def process_limit(most: int) -> Iterator[ControlGroup]:
    """A group of at most `most` processes, or an empty one. It is removed afterwards."""
    group = _create(most)
    if group is None:
        yield ControlGroup()
        return
    try:
        yield ControlGroup(group)
    finally:
        for _ in range(50):  # it cannot be removed before the last process is reaped
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.01)


def _create(most: int) -> Path | None:
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
    """Groups that may contain a new one: in version 1 our own; in version 2 its parent, because a group
    with processes cannot delegate controllers."""
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

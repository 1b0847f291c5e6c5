"""Results as they come, on disk, so that a run can be taken up where it stopped.

One JSON line a result, appended and flushed; the first line names the set. A line that a crash cut short
is left out when read. A task done one way is done once: errors are done again.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from keystroke.agent.evaluation.tasks import Done, Status
from keystroke.errors import InputError


class Head(msgspec.Struct, frozen=True):
    """What a file of results is about."""

    set: str
    tasks: int
    version: int = 1


class Record:
    def __init__(self, path: Path | None, head: Head) -> None:
        """Opens or begins the file. InputError if it holds results of another set."""
        self.path, self.head = path, head
        self.rows: list[Done] = []
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and path.stat().st_size:
                self._read(path)
            else:
                path.write_bytes(msgspec.json.encode(head) + b"\n")
        except OSError as error:
            raise InputError(f"the results {path} cannot be written: {error.strerror}") from None

    def _read(self, path: Path) -> None:
        first, *lines = path.read_bytes().split(b"\n")
        try:
            head = msgspec.json.decode(first, type=Head)
        except msgspec.MsgspecError:
            raise InputError(f"{path} holds no results; name another file with --out") from None
        if head.set != self.head.set:
            raise InputError(
                f"{path} holds results of {head.set}, not of {self.head.set}; name another file with --out"
            )
        for line in lines:
            try:
                self.rows.append(msgspec.json.decode(line, type=Done))
            except msgspec.MsgspecError:
                continue  # cut short by a crash
        if lines and lines[-1]:  # its last line has no end: begin a new one
            with path.open("ab") as file:
                file.write(b"\n")

    def known(self, way: str) -> set[str]:
        """Tasks that need not be done again this way."""
        return {row.task for row in self.rows if row.way == way and row.status is not Status.ERROR}

    def add(self, row: Done) -> None:
        """InputError where the disk is full: nothing that was recorded is lost."""
        self.rows = [old for old in self.rows if (old.task, old.way) != (row.task, row.way)]
        self.rows.append(row)
        if self.path is None:
            return
        try:
            with self.path.open("ab") as file:
                file.write(msgspec.json.encode(row) + b"\n")
        except OSError as error:
            raise InputError(
                f"the results {self.path} cannot be written: {error.strerror}; free some room, then go on "
                "with the same command"
            ) from None

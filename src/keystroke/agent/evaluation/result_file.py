"""Results on disk, so that an evaluation can continue where it stopped.

One JSON line per result; the first line names the set. A line that a crash cut short is ignored. Errors
are done again.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from keystroke.agent.evaluation.tasks import ResultStatus, TaskResult
from keystroke.errors import InputError


class ResultHeader(msgspec.Struct, frozen=True):
    set: str
    tasks: int
    version: int = 1


class ResultFile:
    def __init__(self, path: Path | None, head: ResultHeader) -> None:
        """Open or create the file. InputError if it has results of another set."""
        self.path, self.head = path, head
        self.rows: list[TaskResult] = []
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
            head = msgspec.json.decode(first, type=ResultHeader)
        except msgspec.MsgspecError:
            raise InputError(f"{path} holds no results; name another file with --out") from None
        if head.set != self.head.set:
            raise InputError(
                f"{path} holds results of {head.set}, not of {self.head.set}; name another file with --out"
            )
        for line in lines:
            try:
                self.rows.append(msgspec.json.decode(line, type=TaskResult))
            except msgspec.MsgspecError:
                continue  # cut short by a crash
        if lines and lines[-1]:  # its last line is cut short: start a new one
            with path.open("ab") as file:
                file.write(b"\n")

    def finished_tasks(self, label: str) -> set[str]:
        """Tasks that are finished in this configuration."""
        return {row.task for row in self.rows if row.label == label and row.status is not ResultStatus.ERROR}

    def add(self, row: TaskResult) -> None:
        """Append a result. InputError where the disk is full; earlier results are kept."""
        self.rows = [old for old in self.rows if (old.task, old.label) != (row.task, row.label)]
        self.rows.append(row)
        if self.path is None:
            return
        try:
            with self.path.open("ab") as file:
                file.write(msgspec.json.encode(row) + b"\n")
        except OSError as error:
            raise InputError(
                f"the results {self.path} cannot be written: {error.strerror}; free some room, then run "
                "the same command again"
            ) from None

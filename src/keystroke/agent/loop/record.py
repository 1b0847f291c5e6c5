"""A task on disk, so that it can be gone on with: after an interrupt, a crash, or to say more.

One JSON file a task under the user's state folder, readable by the user alone, replaced whole at every
step. It holds what was said and what would change, never what the user was asked or answered.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from keystroke.agent.chat import Receipt
from keystroke.agent.workspace.overlay import Saved
from keystroke.errors import InputError, NotFound
from keystroke.text.encoding import digest

KEPT = 50  # tasks a workspace
FINISHED = 'the last task is done; say what else to do: keystroke do --continue "..."'


class TaskRecord(msgspec.Struct, frozen=True):
    id: str
    instruction: str
    status: str  # "working", or what it ended with
    model: str
    messages: list[dict[str, Any]] = []
    overlay: Saved = Saved({}, {})
    receipts: tuple[Receipt, ...] = ()
    tries: int = 0
    check: str = ""
    files: tuple[str, ...] = ()
    time: float = 0.0
    created: float = 0.0
    workspace: str = ""
    owner: str = ""  # the key of a server that made it; empty: this machine's user
    given: dict[str, Any] = {}  # what else a client asked for, so that it can be gone on with
    line: str = ""  # how it ended
    diff: str = ""
    entry: str = ""  # of the undo journal
    pid: int = 0  # of the process that works on it

    @property
    def under_way(self) -> bool:
        """Whether another process works on it, as far as can be told; what this one does it knows itself."""
        if self.status != "working" or self.pid in (0, os.getpid()):
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:
            return True
        return True


class Records:
    """The tasks of one workspace."""

    def __init__(self, state: Path, root: Path) -> None:
        self._folder = state / "tasks" / digest(os.fsencode(root))[:16]

    def save(self, record: TaskRecord) -> None:
        """InputError where it cannot be written; the record before it stays."""
        path = self._path(record.id)
        part = path.with_suffix(".part")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.encode(record))
            os.replace(part, path)
        except OSError as error:
            raise InputError(
                f"the task's record {path} cannot be written: {error.strerror}; free some room"
            ) from None
        for old in sorted(self._folder.glob("*.json"), reverse=True)[KEPT:]:
            with contextlib.suppress(OSError):
                old.unlink()

    def newest(self) -> TaskRecord:
        """The task of this workspace that was worked on last. NotFound if there is none."""
        for record in self.all():
            return record
        raise NotFound("there is no task in this workspace to go on with; say what to do")

    def all(self) -> Iterator[TaskRecord]:
        """Newest first; a record that cannot be read is passed over."""
        for path in sorted(self._folder.glob("*.json"), reverse=True):
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                yield msgspec.json.decode(path.read_bytes(), type=TaskRecord)

    def _path(self, task: str) -> Path:
        return self._folder / f"{task}.json"


def find_record(state: Path, task: str) -> TaskRecord:
    """A task by its id, whichever workspace it belongs to. NotFound."""
    for path in (state / "tasks").glob(f"*/{task}.json") if task.isdigit() else ():
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode(path.read_bytes(), type=TaskRecord)
    raise NotFound(f"there is no task {task:.60} here")


def all_records(state: Path) -> Iterator[TaskRecord]:
    """The tasks of all workspaces, newest first; a record that cannot be read is passed over."""
    for path in sorted((state / "tasks").glob("*/*.json"), key=lambda path: path.name, reverse=True):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            yield msgspec.json.decode(path.read_bytes(), type=TaskRecord)


def new_id() -> str:
    """Sorts by time."""
    return f"{time.time_ns():020d}"

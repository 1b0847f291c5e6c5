"""Task records on disk, so that a task can be continued after an interrupt, a crash, or with a new
instruction.

One JSON file per task under the user's state folder, readable by the user alone, replaced whole at every
step. It holds the conversation and the change, never approvals.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from keystroke.agent.chat.receipt import StepReceipt
from keystroke.agent.workspace.overlay import SavedOverlay
from keystroke.errors import InputError, NotFound
from keystroke.replacing import replace_file
from keystroke.text.encoding import digest

MAX_RECORDS = 50  # per workspace
ALREADY_DONE = 'the last task is done; say what else to do: keystroke do --continue "..."'


class TaskRecord(msgspec.Struct, frozen=True):
    id: str
    instruction: str
    status: str  # "working", or an EndStatus
    model: str
    messages: list[dict[str, Any]] = []
    overlay: SavedOverlay = SavedOverlay({}, {})
    receipts: tuple[StepReceipt, ...] = ()
    tries: int = 0
    check: str = ""
    files: tuple[str, ...] = ()
    found: tuple[str, ...] = ()  # files that the program found for the task
    time: float = 0.0
    created: float = 0.0
    workspace: str = ""
    owner: str = ""  # the API key it was created with; empty: this machine's user
    given: dict[str, Any] = {}  # the client's request, to continue the task with
    line: str = ""  # how it ended, in one line
    diff: str = ""
    entry: str = ""  # of the undo journal
    pid: int = 0  # of the process that runs it

    @property
    def under_way(self) -> bool:
        """Whether another process runs it, as far as can be seen. This process knows its own tasks."""
        if self.status != "working" or self.pid in (0, os.getpid()):
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:
            return True
        return True


class TaskStore:
    """The tasks of one workspace."""

    def __init__(self, state: Path, root: Path) -> None:
        self._folder = state / "tasks" / digest(os.fsencode(root))[:16]

    def save(self, record: TaskRecord) -> None:
        """Write a record. InputError where it cannot be written; the previous version stays."""
        path = self._folder / f"{record.id}.json"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(path, msgspec.json.encode(record))
        except OSError as error:
            raise InputError(
                f"the task's record {path} cannot be written: {error.strerror}; free some room"
            ) from None
        for old in sorted(self._folder.glob("*.json"), reverse=True)[MAX_RECORDS:]:
            with contextlib.suppress(OSError):
                old.unlink()

    def remove(self, task: str) -> None:
        """Forget a task. Does nothing where it is not known."""
        with contextlib.suppress(OSError):
            (self._folder / f"{task}.json").unlink()

    def latest(self) -> TaskRecord:
        """The newest task of this workspace. NotFound if there is none."""
        if (record := next(self.all(), None)) is not None:
            return record
        raise NotFound("there is no task in this workspace to continue; say what to do")

    def all(self) -> Iterator[TaskRecord]:
        """Newest first; unreadable records are skipped."""
        return _read_records(sorted(self._folder.glob("*.json"), reverse=True))


def find_record(state: Path, task: str) -> TaskRecord:
    """A task of any workspace, by its id. NotFound."""
    paths = (state / "tasks").glob(f"*/{task}.json") if task.isdigit() else ()
    if (record := next(_read_records(paths), None)) is not None:
        return record
    raise NotFound(f"there is no task {task:.60} here")


def all_records(state: Path) -> Iterator[TaskRecord]:
    """The tasks of all workspaces, newest first; unreadable records are skipped."""
    return _read_records(sorted((state / "tasks").glob("*/*.json"), key=lambda path: path.name, reverse=True))


def _read_records(paths: Iterable[Path]) -> Iterator[TaskRecord]:
    for path in paths:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            yield msgspec.json.decode(path.read_bytes(), type=TaskRecord)


def new_id() -> str:
    """An id that sorts by time."""
    return f"{time.time_ns():020d}"

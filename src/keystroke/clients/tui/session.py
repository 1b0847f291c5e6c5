"""Sessions of the terminal interface: messages, answers and tasks of one folder, stored on disk.

Rewinding cuts the entries at a point; the gateway undoes the changes of the tasks after it. A session file
that cannot be read is never overwritten.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Literal

import msgspec

from keystroke.clients.task_client import TaskClient
from keystroke.errors import InputError, KeystrokeError
from keystroke.replacing import replace_file

_MAX_SESSIONS = 200  # the oldest are deleted


class SessionEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`kind` "task": `text` is the instruction and `task` its id."""

    kind: Literal["user", "assistant", "task"]
    text: str
    task: str = ""


class TuiSession(msgspec.Struct, kw_only=True):
    id: str
    workspace: str
    changed_at: float
    entries: list[SessionEntry] = []
    model: str = "auto"

    @property
    def title(self) -> str:
        first = next((entry.text for entry in self.entries if entry.kind != "assistant"), "")
        return " ".join(first.split())[:80] or "(empty)"

    def messages(self) -> list[tuple[str, str]]:
        """The conversation as roles and texts. A task appears as the user's instruction."""
        return [("assistant" if e.kind == "assistant" else "user", e.text) for e in self.entries]

    def rewind_points(self) -> list[int]:
        """The indexes of messages and tasks, which the session can be rewound to, newest first."""
        return [n for n in reversed(range(len(self.entries))) if self.entries[n].kind != "assistant"]

    def tasks_after(self, point: int) -> list[str]:
        """The ids of the tasks that a rewind to `point` undoes, newest first."""
        return [entry.task for entry in reversed(self.entries[point:]) if entry.kind == "task" and entry.task]

    def rewind(self, point: int) -> SessionEntry:
        """Remove all entries from `point` on; return the first of them."""
        first = self.entries[point]
        self.entries = self.entries[:point]
        return first


class SessionStore:
    """This user's sessions, one file each."""

    def __init__(self, state: Path) -> None:
        self._folder = state / "sessions"

    def create(self, workspace: Path) -> TuiSession:
        now = time.time()
        return TuiSession(
            id=f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}", workspace=str(workspace), changed_at=now
        )

    def save(self, session: TuiSession) -> None:
        """Write the session atomically; an empty one is deleted."""
        file = self._folder / f"{session.id}.json"
        if not session.entries:
            file.unlink(missing_ok=True)
            return
        session.changed_at = time.time()
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(file, msgspec.json.format(msgspec.json.encode(session)))
        for old in sorted(self._folder.glob("*.json"), key=lambda f: f.stat().st_mtime)[:-_MAX_SESSIONS]:
            old.unlink(missing_ok=True)

    def list(self, workspace: Path | None = None) -> list[TuiSession]:
        """The readable sessions of `workspace`, or of all folders, newest first."""
        found = []
        for file in self._folder.glob("*.json"):
            try:
                session = msgspec.json.decode(file.read_bytes(), type=TuiSession)
            except (OSError, msgspec.MsgspecError):
                continue
            if workspace is None or session.workspace == str(workspace):
                found.append(session)
        return sorted(found, key=lambda session: session.changed_at, reverse=True)

    def load(self, name: str) -> TuiSession:
        """Raises InputError."""
        file = self._folder / f"{Path(name).name}.json"
        try:
            return msgspec.json.decode(file.read_bytes(), type=TuiSession)
        except OSError:
            raise InputError(f"there is no session {name!r:.80}; `/sessions` lists them") from None
        except msgspec.MsgspecError:
            raise InputError(f"{file} is not a valid session; move it away") from None


async def rewind(
    session: TuiSession, point: int, tasks: TaskClient
) -> tuple[SessionEntry | None, KeystrokeError | None]:
    """Rewind the conversation and files to before entry `point`: tasks are undone newest first. If one cannot
    be undone, the session is kept up to and including it. Returns the entry at `point`, and the error that
    stopped the rewind. The caller saves the session."""
    refused: KeystrokeError | None = None
    for task in session.tasks_after(point):
        try:
            if (await tasks.get(task)).status == "done":
                await tasks.act(task, "undo")
        except KeystrokeError as error:
            refused = error
            point = 1 + next(n for n, entry in enumerate(session.entries) if entry.task == task)
            break
    first = session.rewind(point) if point < len(session.entries) else None
    return (first if refused is None else None), refused

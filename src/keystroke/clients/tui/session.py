"""A session: what was said and done in one folder, kept on disk, to be gone on with and rewound.

Entries are the truth, in order: something said, an answer, or a task with the change it made. Rewinding
cuts them off at a point; which tasks' changes must be taken back for that, newest first, is said here, taking
them back is the gateway's. A file of sessions that cannot be read is left alone and said, never overwritten.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Literal

import msgspec

from keystroke.errors import InputError

_KEPT = 200  # sessions; the oldest go first


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
        return " ".join(first.split())[:80] or "(nothing said yet)"

    def messages(self) -> list[tuple[str, str]]:
        """What was said, for a model that does not know it: role and text. A task is told as what was asked
        for, so that the conversation knows of it."""
        told = {"user": "user", "assistant": "assistant", "task": "user"}
        return [(told[entry.kind], entry.text) for entry in self.entries]

    def rewind_points(self) -> list[int]:
        """Where it can be rewound to: before each thing that the user said or asked for, newest first."""
        return [n for n in reversed(range(len(self.entries))) if self.entries[n].kind != "assistant"]

    def tasks_after(self, point: int) -> list[str]:
        """The tasks whose changes a rewind to `point` takes back, newest first."""
        return [entry.task for entry in reversed(self.entries[point:]) if entry.kind == "task" and entry.task]

    def rewind(self, point: int) -> SessionEntry:
        """Forget everything from `point` on; what stood there comes back, to be said anew."""
        first = self.entries[point]
        self.entries = self.entries[:point]
        return first


class SessionStore:
    """The sessions of this user, one file each."""

    def __init__(self, state: Path) -> None:
        self._folder = state / "sessions"

    def create(self, workspace: Path) -> TuiSession:
        now = time.time()
        return TuiSession(
            id=f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}", workspace=str(workspace), changed_at=now
        )

    def save(self, session: TuiSession) -> None:
        """Write it, whole or not at all. An empty one leaves nothing behind."""
        file = self._folder / f"{session.id}.json"
        if not session.entries:
            file.unlink(missing_ok=True)
            return
        session.changed_at = time.time()
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = file.with_suffix(f".{os.getpid()}.tmp")
        with open(draft, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as out:
            out.write(msgspec.json.format(msgspec.json.encode(session)))
        os.replace(draft, file)
        for old in sorted(self._folder.glob("*.json"), key=lambda f: f.stat().st_mtime)[:-_KEPT]:
            old.unlink(missing_ok=True)

    def list(self, workspace: Path | None = None) -> list[TuiSession]:
        """Those that can be read, of `workspace` or of all, newest first."""
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
            raise InputError(f"{file} is not a session; move it away") from None

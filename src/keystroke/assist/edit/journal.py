"""The undo journal: what each applied edit replaced, in the user's state folder.

An entry is written before the files are and holds inverse edits with the digests of both sides. Undo reverts
the newest entry completely, and only while every file is as the edit left it. `recover` reverts an edit whose
process died. Entries hold source text, so only the user may read them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from filelock import FileLock

from keystroke.assist.edit.workspace import FileWrite, Workspace
from keystroke.errors import InputError, KeystrokeError, NotFound
from keystroke.text import Edit, apply_edits
from keystroke.text.encoding import decode, digest

MAX_ENTRIES = 100  # per workspace


class InverseChange(msgspec.Struct, frozen=True):
    """How to revert one file. `before` or `after` is None where there was or is no file. `edits` undo a
    change of text; `data` and `mode` restore a removed file."""

    path: str
    before: str | None
    after: str | None
    edits: tuple[tuple[int, int, str], ...] = ()
    data: bytes | None = None
    mode: int | None = None


class JournalEntry(msgspec.Struct, frozen=True):
    id: str
    time: float
    instruction: str
    workspace: str
    files: tuple[InverseChange, ...]


class Journal:
    """The edits of one workspace that can be undone, one file each, newest last."""

    def __init__(self, state: Path, workspace: Workspace) -> None:
        self._workspace = workspace
        self._folder = state / "undo" / digest(os.fsencode(workspace.root))[:16]

    @contextlib.contextmanager
    def recording(self, instruction: str, files: Sequence[InverseChange]) -> Iterator[JournalEntry]:
        """Record an entry, and mark its edit as running until the context exits. The entry of a failed edit
        is deleted unless a file could not be restored: then undo can do it."""
        now = time.time_ns()
        entry = JournalEntry(f"{now:020d}", now / 1e9, instruction, str(self._workspace.root), tuple(files))
        mark = self._folder / f"{entry.id}.open"
        lock = FileLock(mark, mode=0o600)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock.acquire()
        except OSError as error:
            raise InputError(
                f"the undo journal {mark} cannot be written: {error.strerror}; nothing was changed"
            ) from None
        try:
            self._write_entry(entry)
            try:
                yield entry
            except BaseException:
                self.discard_failed(entry)
                raise
        finally:
            lock.release()
            with contextlib.suppress(OSError):
                mark.unlink()

    def recover(self) -> list[str]:
        """Revert edits whose process died. Returns one sentence for each."""
        messages = []
        for mark in sorted(self._folder.glob("*.open")):
            lock = FileLock(mark, mode=0o600, blocking=False)
            try:
                lock.acquire()
            except OSError:  # its process lives (Timeout), or the mark is not ours
                continue
            try:
                messages += self._recover_entry(mark.stem)
            except (OSError, KeystrokeError) as error:  # reported once; the entry stays
                messages.append(f"an edit was interrupted and cannot be taken back: {error}")
            finally:
                lock.release()
                with contextlib.suppress(OSError):
                    mark.unlink()
        return messages

    def _recover_entry(self, entry_id: str) -> list[str]:
        self._entry_path(entry_id).with_suffix(".part").unlink(missing_ok=True)
        if not self._entry_path(entry_id).exists():
            return []  # it had not started
        entry = self._load(entry_id)
        self._workspace.clear([inverse.path for inverse in entry.files], entry.id)
        now = [self._current_digest(inverse.path) for inverse in entry.files]
        if all(have == inverse.after for have, inverse in zip(now, entry.files, strict=True)):
            return []  # it was complete except for its mark
        if any(have != inverse.before for have, inverse in zip(now, entry.files, strict=True)):
            self.revert(entry)
            return [f"an edit that was interrupted was taken back: {entry.instruction[:100]}"]
        self.forget(entry.id)
        return []

    def _write_entry(self, entry: JournalEntry) -> None:
        """Write an entry durably."""
        path, part = self._entry_path(entry.id), self._entry_path(entry.id).with_suffix(".part")
        try:
            handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.encode(entry))
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except OSError as error:
            raise InputError(
                f"the undo journal {path} cannot be written: {error.strerror}; nothing was changed"
            ) from None
        for old in self._entry_ids()[MAX_ENTRIES:]:
            self.forget(old)

    def forget(self, entry_id: str) -> None:
        with contextlib.suppress(OSError):
            self._entry_path(entry_id).unlink()

    def discard_failed(self, entry: JournalEntry) -> None:
        """Delete the entry of a failed edit, unless a file could not be restored."""
        with contextlib.suppress(KeystrokeError):
            if not any(self._current_digest(inverse.path) == inverse.after for inverse in entry.files):
                self.forget(entry.id)

    def entries(self) -> Iterator[JournalEntry]:
        """Newest first."""
        return (self._load(entry_id) for entry_id in self._entry_ids())

    def undo(self) -> JournalEntry:
        """Revert the newest edit and delete its entry. NotFound if there is none; InputError, with nothing
        changed, if a file changed since."""
        for entry in self.entries():
            if self.revert(entry):
                return entry
            # All files are as before: the edit was never applied. Try the one before.
        raise NotFound("there is nothing to undo in this workspace")

    def revert(self, entry: JournalEntry) -> bool:
        """Revert one edit completely and delete its entry. Returns whether there was anything to revert."""
        writes = [write for inverse in entry.files if (write := self._inverse_write(inverse)) is not None]
        if writes:
            self._workspace.write(writes, entry.id)
        self.forget(entry.id)
        return bool(writes)

    def _inverse_write(self, inverse: InverseChange) -> FileWrite | None:
        path = inverse.path
        data = self._workspace.read_bytes(path)
        now = None if data is None else digest(data)
        if now == inverse.before:
            return None
        if now != inverse.after:
            raise InputError(
                f"{path} was changed after the edit; undo would lose that, so nothing was undone"
            )
        if inverse.before is None:
            return FileWrite(path, None, now)
        if data is None:
            restored = inverse.data or b""
        else:
            old = decode(data, path)
            restored = old.encode(apply_edits(old.text, [Edit(*edit) for edit in inverse.edits]), path)
        if digest(restored) != inverse.before:
            raise InputError(f"the undo journal does not fit {path}; nothing was undone")
        return FileWrite(path, restored, now, inverse.mode)

    def _current_digest(self, path: str) -> str | None:
        data = self._workspace.read_bytes(path)
        return None if data is None else digest(data)

    def _entry_path(self, entry_id: str) -> Path:
        return self._folder / f"{entry_id}.json"

    def _entry_ids(self) -> list[str]:
        return sorted((path.stem for path in self._folder.glob("*.json")), reverse=True)

    def _load(self, entry_id: str) -> JournalEntry:
        path = self._entry_path(entry_id)
        try:
            return msgspec.json.decode(path.read_bytes(), type=JournalEntry)
        except (OSError, msgspec.MsgspecError) as error:
            raise InputError(f"the undo entry {path} cannot be read ({error}); delete it to go on") from None

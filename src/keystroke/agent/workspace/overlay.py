"""File changes in memory, over the workspace as it was when each file was first read.

Nothing on disk changes before `plan().apply(journal)`, which applies all changes as one edit that `undo`
reverts, or none where a file was changed meanwhile. A path out of the workspace, into the
repository's own files or to a secret is Forbidden. Links are resolved, so a file has one name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from keystroke.agent.workspace.listing import list_files
from keystroke.assist.edit import EditPlan, FileChange, Workspace
from keystroke.assist.edit.operations import Operation
from keystroke.assist.edit.resolve import Resolution, resolve
from keystroke.assist.edit.workspace import WorkspaceFile
from keystroke.errors import InputError
from keystroke.text import minimal_diff
from keystroke.text.compare import Budget
from keystroke.text.encoding import decode

_COMPARISONS = 1_000_000  # of words, over all files of a task: a fraction of a second


class SavedOverlay(msgspec.Struct, frozen=True):
    """An overlay in a task's record: new texts (None: removed), digests of the original files, and the files
    that are as commands left them."""

    texts: dict[str, str | None]
    digests: dict[str, str | None]
    by_command: frozenset[str] = frozenset()


class Overlay:
    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self._base: dict[str, WorkspaceFile | None] = {}  # as first read; shared with forks
        self._texts: dict[str, str | None] = {}
        self._changes: dict[str, FileChange] = {}  # as last compared
        self._by_command: dict[str, str | None] = {}  # of files that only commands had changed until then
        self._budget = Budget(_COMPARISONS)

    def fork(self) -> Overlay:
        """A copy with the same changes; later changes are independent."""
        other = Overlay(self.workspace)
        other._base, other._texts, other._changes = self._base, dict(self._texts), dict(self._changes)
        other._by_command = dict(self._by_command)
        return other

    def name(self, path: str) -> str:
        """The canonical name of a file. Forbidden where it may not be touched."""
        return self.workspace.locate(path).relative_to(self.workspace.root).as_posix()

    def read(self, path: str) -> str | None:
        """A file's text with the changes so far; None where there is no file. Forbidden, InputError."""
        path = self.name(path)
        if path not in self._texts:
            base = self._read_original(path)
            return None if base is None else base.text
        return self._texts[path]

    def peek(self, path: str) -> str | None:
        """Like `read`, for one of `files()`, and the file may change on disk until it is read."""
        known = self.name(path) if self._texts else path
        if known in self._texts:
            return self._texts[known]
        data = self.workspace.read_bytes(path)
        return None if data is None else decode(data, path).text

    def write(self, path: str, text: str | None) -> None:
        """Change one file; None removes it. Forbidden where it may not be touched."""
        path = self.name(path)
        base = self._read_original(path)
        self._texts[path] = text
        if text == (None if base is None else base.text):
            del self._texts[path]

    def write_by_command(self, path: str, text: str | None) -> None:
        """Adopt a command's change of one file. Forbidden where it may not be touched."""
        path = self.name(path)
        base = self._read_original(path)
        left = self._by_command.get(path, None if base is None else base.text)
        if self.read(path) == left:  # a model did not change it before
            self._by_command[path] = text
        self.write(path, text)

    def check_writable(self, path: str) -> None:
        """Raise Forbidden where the file is read-only, before work is spent on it."""
        self.workspace.check_writable(path)

    def resolve(self, operations: Sequence[Operation]) -> Resolution:
        """Apply operations, all or none; the result names failures."""
        found = resolve(operations, self.read)
        if not found.failures:
            for path in found.texts:
                self._read_original(self.name(path))  # raises for a forbidden path before the first write
            for path, text in found.texts.items():
                self.write(path, text)
        return found

    def replace_with(self, other: Overlay) -> None:
        """Replace all changes with those of another overlay of the same workspace."""
        self._texts, self._by_command = dict(other._texts), dict(other._by_command)

    @property
    def texts(self) -> Mapping[str, str | None]:
        """The files that differ from the workspace."""
        return self._texts

    def files(self) -> list[str]:
        """The project's files with the changes so far."""
        names = {name for name in list_files(self.workspace.root) if self._texts.get(name, "") is not None}
        return sorted(names | {name for name, text in self._texts.items() if text is not None})

    def plan(self, instruction: str) -> EditPlan:
        """The changes as one edit, with minimal hunks."""
        return EditPlan(self.workspace, instruction, tuple(map(self._change, sorted(self._texts))))

    def text_after_command(self, path: str, otherwise: str = "") -> str:
        """A file's text after the last command that changed it; `otherwise` where the model changed it
        first."""
        return self._by_command.get(path, otherwise) or ""

    def encode(self, path: str) -> bytes | None:
        """A changed file's bytes, in the encoding of the file it replaces; None where it is removed."""
        return self._change(path).data()

    def _change(self, path: str) -> FileChange:
        before, after = self._base[path], self._texts[path]
        known = self._changes.get(path)
        if known is None or known.after is not after or known.before is not before:
            edits = minimal_diff(before.text if before else "", after or "", self._budget)
            known = self._changes[path] = FileChange(path, before, after, edits)
        return known

    def diff(self) -> str:
        return self.plan("").diff()

    def snapshot(self) -> SavedOverlay:
        digests = {path: base.digest if (base := self._base[path]) else None for path in self._texts}
        left = self._by_command
        kept = frozenset(path for path, text in self._texts.items() if path in left and left[path] == text)
        return SavedOverlay(dict(self._texts), digests, kept)

    @classmethod
    def restore(cls, workspace: Workspace, saved: SavedOverlay) -> Overlay:
        """The overlay of a task that continues. InputError where a file was changed since."""
        overlay = cls(workspace)
        for path, text in saved.texts.items():
            base = overlay._read_original(path)
            if (base.digest if base else None) != saved.digests.get(path):
                raise InputError(
                    f"{path} was changed since the task stopped; start the task again to work on the new text"
                )
            (overlay.write_by_command if path in saved.by_command else overlay.write)(path, text)
        return overlay

    def _read_original(self, path: str) -> WorkspaceFile | None:
        if path not in self._base:
            there = self.workspace.read_bytes(path) is not None
            self._base[path] = self.workspace.read(path) if there else None
        return self._base[path]

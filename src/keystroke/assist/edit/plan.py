"""From an instruction to a plan: which files change, by which smallest edits, and nothing else.

A plan is a value until `apply`. It is complete or it is empty with named failures: nothing is half done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from keystroke.assist.edit.journal import Inverse, Journal, JournalEntry
from keystroke.assist.edit.operations import Failure
from keystroke.assist.edit.propose import propose_edit
from keystroke.assist.edit.resolve import Resolution, parse_answer, resolve
from keystroke.assist.edit.rewrite import Region
from keystroke.assist.edit.task import EditTask
from keystroke.assist.edit.workspace import SourceFile, Workspace, Write, runs_by_itself
from keystroke.assist.edit.writer import Writer
from keystroke.errors import InputError
from keystroke.text import Edit, invert, minimal_diff, unified_diff
from keystroke.text.encoding import Decoded, digest


@dataclass(frozen=True, slots=True)
class FileChange:
    """One file's part in a plan. `before` is None for a new file, `after` for one to be removed."""

    path: str
    before: SourceFile | None
    after: str | None
    edits: tuple[Edit, ...]
    moved_from: SourceFile | None = None

    def data(self) -> bytes | None:
        """The bytes to write, in the manner of the file they replace."""
        if self.after is None:
            return None
        manner = self.before or self.moved_from
        return (manner.decoded if manner else Decoded("")).encode(self.after, self.path)


@dataclass(frozen=True)
class EditPlan:
    """What would change. `failures` is empty exactly if there is something to apply."""

    workspace: Workspace
    instruction: str
    changes: tuple[FileChange, ...]
    failures: tuple[Failure, ...] = ()
    answers: tuple[str, ...] = ()  # what the model wrote, question by question

    @cached_property
    def _writes(self) -> tuple[Write, ...]:
        return tuple(
            Write(
                change.path,
                change.data(),
                change.before.digest if change.before else None,
                change.moved_from.mode if change.moved_from else None,
            )
            for change in self.changes
        )

    def diff(self) -> str:
        """The change as a unified diff, as `git apply` takes it."""
        parts = []
        for change in self.changes:
            old, new = change.before.text if change.before else "", change.after or ""
            old_name = f"a/{change.path}" if change.before else "/dev/null"
            new_name = f"b/{change.path}" if change.after is not None else "/dev/null"
            parts.append(unified_diff(old, new, old_name, new_name))
        return "".join(parts)

    def summary(self) -> tuple[str, ...]:
        """One line a file: what happens to it."""
        lines = []
        gone = {change.moved_from.path for change in self.changes if change.moved_from}
        for change in self.changes:
            if change.moved_from is not None:
                lines.append(f"move {change.moved_from.path} to {change.path}")
            elif change.before is None:
                lines.append(f"add {change.path}")
            elif change.after is not None:
                lines.append(
                    f"change {change.path} in {len(change.edits)} place{'s'[: len(change.edits) > 1]}"
                )
            elif change.path not in gone:
                lines.append(f"remove {change.path}")
        return tuple(lines)

    def self_running(self) -> tuple[str, ...]:
        """Files of the change that an editor, a shell or a server runs by itself once they are there."""
        return tuple(change.path for change in self.changes if runs_by_itself(change.path))

    def explain(self) -> str:
        """The failures, one line each; empty if there are none."""
        return "\n".join(f"{f.path or 'answer'}: {f.message} ({f.reason})" for f in self.failures)

    def apply(self, journal: Journal | None = None) -> JournalEntry | None:
        """Write all files or none, and note in the journal how to undo it. InputError or Forbidden if a file
        changed since it was read, is read-only or cannot be written: then nothing was changed."""
        if self.failures:
            first = self.failures[0]
            raise InputError(f"nothing was changed: {first.path or 'the answer'}: {first.message}")
        if journal is None:
            self.workspace.write(self._writes)
            return None
        with journal.recording(self.instruction, self._inverses()) as entry:
            self.workspace.write(self._writes, entry.id)
        return entry

    def _inverses(self) -> list[Inverse]:
        result = []
        for change, write in zip(self.changes, self._writes, strict=True):
            before = change.before
            edits = invert(before.text, change.edits) if before and change.after is not None else ()
            result.append(
                Inverse(
                    change.path,
                    write.expected,
                    None if write.data is None else digest(write.data),
                    tuple((edit.start, edit.end, edit.text) for edit in edits),
                    before.decoded.encode(before.text) if before and write.data is None else None,
                    before.mode if before and write.data is None else None,
                )
            )
        return result


def plan_edit(
    workspace: Workspace,
    paths: Sequence[str],
    instruction: str,
    writer: Writer,
    *,
    region: Region | None = None,
    rules: str = "",
    blocks: bool = False,
    retries: int = 1,
    on_text: Callable[[str], None] | None = None,
) -> EditPlan:
    """Plan a change of files on disk. `paths` are workspace names (`workspace.name` makes them)."""
    sources = {source.path: source for source in (workspace.read(path) for path in paths)}
    texts = {path: source.text for path, source in sources.items()}
    proposal = propose_edit(
        EditTask(texts, instruction, region, rules),
        writer,
        blocks=blocks,
        retries=retries,
        on_text=on_text,
        exists=lambda path: workspace.locate(path).exists(),
    )
    resolution = Resolution(proposal.texts, proposal.moves, proposal.failures)
    return _planned(workspace, instruction, resolution, sources, proposal.answers)


def plan_patch(workspace: Workspace, patch: str, instruction: str = "apply a patch") -> EditPlan:
    """Plan a patch somebody wrote: search/replace blocks, an `apply_patch` envelope or a unified diff."""
    sources: dict[str, SourceFile] = {}

    def read(path: str) -> str | None:
        if workspace.read_bytes(path) is None:
            return None
        sources[path] = workspace.read(path)
        return sources[path].text

    operations = parse_answer(patch, ())
    if isinstance(operations, Failure):
        return EditPlan(workspace, instruction, (), (operations,), (patch,))
    return _planned(workspace, instruction, resolve(operations, read), sources, (patch,))


def _planned(
    workspace: Workspace,
    instruction: str,
    resolution: Resolution,
    sources: Mapping[str, SourceFile],
    answers: tuple[str, ...],
) -> EditPlan:
    came_from = {new: old for old, new in resolution.moves.items()}
    changes = []
    for path, after in resolution.texts.items():
        workspace.locate(path)  # an answer that names a path outside is refused as a whole
        before = sources.get(path)
        edits = minimal_diff(before.text if before else "", after or "")
        changes.append(FileChange(path, before, after, edits, sources.get(came_from.get(path, ""))))
    return EditPlan(workspace, instruction, tuple(changes), resolution.failures, answers)

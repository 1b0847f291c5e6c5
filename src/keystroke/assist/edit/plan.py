"""Plans a change of files: which ones change, by which smallest edits.

A plan changes nothing until `apply`. It is complete, or empty with named failures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from keystroke.assist.edit.journal import InverseChange, Journal, JournalEntry
from keystroke.assist.edit.operations import EditFailure
from keystroke.assist.edit.resolve import Resolution, parse_answer, resolve
from keystroke.assist.edit.rewrite import Region
from keystroke.assist.edit.rule_checks import find_violation
from keystroke.assist.edit.steps import Checks, propose_edit
from keystroke.assist.edit.task import EditTask
from keystroke.assist.edit.workspace import FileWrite, Workspace, WorkspaceFile, is_auto_executed
from keystroke.assist.edit.writer import Writer
from keystroke.errors import InputError
from keystroke.text import Edit, invert, minimal_diff, unified_diff
from keystroke.text.encoding import Decoded, digest

_MOST_NAMED = 8  # files that a sentence names


@dataclass(frozen=True)
class FileChange:
    """One file's part in a plan. `before` is None for a new file, `after` for one to be removed."""

    path: str
    before: WorkspaceFile | None
    after: str | None
    edits: tuple[Edit, ...]
    moved_from: WorkspaceFile | None = None

    def data(self) -> bytes | None:
        """The bytes to write, in the encoding of the file they replace."""
        if self.after is None:
            return None
        replaced = self.before or self.moved_from
        return (replaced.decoded if replaced else Decoded("")).encode(self.after, self.path)

    @cached_property
    def diff(self) -> str:
        """The change as a unified diff, as `git apply` takes it."""
        old_name = f"a/{self.path}" if self.before else "/dev/null"
        new_name = f"b/{self.path}" if self.after is not None else "/dev/null"
        return unified_diff(self.before.text if self.before else "", self.after or "", old_name, new_name)


@dataclass(frozen=True)
class EditPlan:
    """The changes to make. `failures` is empty exactly if there is something to apply."""

    workspace: Workspace
    instruction: str
    changes: tuple[FileChange, ...]
    failures: tuple[EditFailure, ...] = ()
    answers: tuple[str, ...] = ()  # of the model, in order
    agreement: tuple[int, int] | None = None  # how many of how many candidates are this change
    warnings: tuple[str, ...] = ()  # rules of the project that the change breaks

    @cached_property
    def _writes(self) -> tuple[FileWrite, ...]:
        return tuple(
            FileWrite(
                change.path,
                change.data(),
                change.before.digest if change.before else None,
                change.moved_from.mode if change.moved_from else None,
            )
            for change in self.changes
        )

    def diff(self) -> str:
        """All changes as one unified diff."""
        return "".join(change.diff for change in self.changes)

    def summary(self) -> tuple[str, ...]:
        """One line a file: what happens to it."""
        lines = []
        moved = {change.moved_from.path for change in self.changes if change.moved_from}
        for change in self.changes:
            if change.moved_from is not None:
                lines.append(f"move {change.moved_from.path} to {change.path}")
            elif change.before is None:
                lines.append(f"add {change.path}")
            elif change.after is not None:
                lines.append(
                    f"change {change.path} in {len(change.edits)} place{'s'[: len(change.edits) > 1]}"
                )
            elif change.path not in moved:
                lines.append(f"remove {change.path}")
        return tuple(lines)

    def sentence(self) -> str:
        """The summary in one line."""
        lines = self.summary()
        if len(lines) <= _MOST_NAMED:
            return ", ".join(lines)
        return f"{', '.join(lines[: _MOST_NAMED - 1])} and {len(lines) - _MOST_NAMED + 1:,} files more"

    def confidence(self) -> str:
        """How many candidates agree, in words; empty where only one answer was asked for."""
        if self.agreement is None:
            return ""
        votes, count = self.agreement
        sure = "sure" if votes >= 2 * count / 3 and count > 2 else "fairly sure" if votes > 1 else "unsure"
        return f"{sure}: {votes} of {count} usable answers agree"

    def auto_executed(self) -> tuple[str, ...]:
        """Files of the change that an editor, a shell or a server executes automatically."""
        return tuple(change.path for change in self.changes if is_auto_executed(change.path))

    def explain(self) -> str:
        """The failures, one line each; empty if there are none."""
        return "\n".join(f"{f.path or 'answer'}: {f.message} ({f.reason})" for f in self.failures)

    def apply(self, journal: Journal | None = None) -> JournalEntry | None:
        """Write all files or none, and record in the journal how to undo it. InputError or Forbidden, with
        nothing changed, if a file changed since it was read, is read-only or cannot be written."""
        if self.failures:
            first = self.failures[0]
            raise InputError(f"nothing was changed: {first.path or 'the answer'}: {first.message}")
        if journal is None:
            self.workspace.write(self._writes)
            return None
        with journal.recording(self.instruction, self._inverse_changes()) as entry:
            self.workspace.write(self._writes, entry.id)
        return entry

    def _inverse_changes(self) -> list[InverseChange]:
        result = []
        for change, write in zip(self.changes, self._writes, strict=True):
            before = change.before
            edits = invert(before.text, change.edits) if before and change.after is not None else ()
            result.append(
                InverseChange(
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
    checks: Checks | None = None,
) -> EditPlan:
    """Plan a change of files on disk. `paths` are workspace names (`workspace.name` makes them)."""
    for path in paths:
        workspace.check_writable(path)
    sources = {source.path: source for source in (workspace.read(path) for path in paths)}
    texts = {path: source.text for path, source in sources.items()}
    proposal = propose_edit(
        EditTask(texts, instruction, region, rules),
        writer,
        blocks=blocks,
        retries=retries,
        on_text=on_text,
        exists=lambda path: workspace.locate(path).exists(),
        checks=checks,
    )
    resolution = Resolution(proposal.texts, proposal.moves, proposal.failures)
    plan = _build_plan(workspace, instruction, resolution, sources, proposal.answers)
    return replace(plan, agreement=proposal.agreement, warnings=rule_warnings(plan, rules))


def rule_warnings(plan: EditPlan, rules: str) -> tuple[str, ...]:
    """The rules of the project that a plan breaks, one sentence for each file."""
    found = []
    for change in plan.changes:
        old = change.before.text if change.before is not None else ""
        if change.after is not None and (what := find_violation(old, change.after, change.path, rules)):
            found.append(f"{change.path}: {what.replace('your code', 'the change')}")
    return tuple(found)


def plan_patch(workspace: Workspace, patch: str) -> EditPlan:
    """Plan a patch from elsewhere: search/replace blocks, an `apply_patch` envelope or a unified diff."""
    instruction = "apply a patch"
    sources: dict[str, WorkspaceFile] = {}

    def read(path: str) -> str | None:
        if workspace.read_bytes(path) is None:
            return None
        sources[path] = workspace.read(path)
        return sources[path].text

    operations = parse_answer(patch, ())
    if isinstance(operations, EditFailure):
        return EditPlan(workspace, instruction, (), (operations,), (patch,))
    return _build_plan(workspace, instruction, resolve(operations, read), sources, (patch,))


def _build_plan(
    workspace: Workspace,
    instruction: str,
    resolution: Resolution,
    sources: Mapping[str, WorkspaceFile],
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

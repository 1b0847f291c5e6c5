"""Tasks on disk, for the server: their owners, their proposals, and how changes are applied and undone.

Blocking: called on worker threads. A task exists for its owner only. Folders are checked every time,
because the settings may have changed since the task began.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from keystroke.agent.chat.receipt import TaskReceipts
from keystroke.agent.loop import TaskRecord, TaskStore
from keystroke.agent.loop.hunks import select_hunks
from keystroke.agent.loop.record import all_records, find_record
from keystroke.agent.workspace import Overlay
from keystroke.agent.workspace.overlay import SavedOverlay
from keystroke.assist.edit import EditPlan, Journal, Workspace
from keystroke.config import Settings
from keystroke.errors import Forbidden, InputError, NotFound
from keystroke.gateway.access.keys import LOCAL
from keystroke.gateway.access.security import is_loopback
from keystroke.gateway.tasks.run import to_wire_receipt
from keystroke.protocol import tasks as wire
from keystroke.protocol.faults import TaskNotFound

PREFIX = "task_"
_SHOWN = 500  # tasks in a list
_OPEN = ("proposed", "interrupted", "failed")


class TaskArchive:
    def __init__(self, settings: Settings) -> None:
        self._settings, self._state = settings, settings.paths.state

    def check_folder(self, folder: str) -> Path:
        """The folder that a task may work in. Forbidden, NotFound, InputError."""
        path = Path(folder)
        if "\0" in folder or not path.is_absolute():
            raise InputError(
                "the workspace must be an absolute path of the server's machine", param="workspace"
            )
        try:
            root = path.resolve()
            exists = root.is_dir()
        except (OSError, RuntimeError):
            exists = False
        if not exists:
            raise NotFound(f"there is no folder {folder:.200} on the server's machine", param="workspace")
        server = self._settings.server
        allowed = [Path(name).expanduser().resolve() for name in server.workspaces]
        if allowed and not any(root.is_relative_to(parent) for parent in allowed):
            raise Forbidden(f"tasks may not work in {root}; server.workspaces names the folders they may")
        if not allowed and not is_loopback(server.host):
            raise Forbidden(
                "tasks change files of the server's machine, and others can reach this server; "
                "name the folders they may work in as server.workspaces"
            )
        if not allowed and root in (Path(root.anchor), Path.home()):
            raise Forbidden(f"{root} is too large for a task; name the project's own folder")
        return root

    def open_workspace(self, root: Path) -> tuple[Workspace, Journal, TaskStore]:
        """What a task works with. Edits that a crash left incomplete are reverted first."""
        workspace = Workspace(root, exclude=self._settings.assist.exclude)
        journal = Journal(self._state, workspace)
        journal.recover()
        return workspace, journal, TaskStore(self._state, workspace.root)

    def record(self, task_id: str, owner: str) -> TaskRecord:
        """A task's record. TaskNotFound where there is none, or it has another owner."""
        missing = TaskNotFound(f"There is no task {task_id:.80}.", param="task_id")
        if not task_id.startswith(PREFIX):
            raise missing
        try:
            record = find_record(self._state, task_id.removeprefix(PREFIX))
        except NotFound:
            raise missing from None
        if owner_of(record) != owner:
            raise missing
        return record

    def all(self, owner: str, workspace: str | None) -> list[wire.Task]:
        """Newest first."""
        root = str(Path(workspace).resolve()) if workspace and "\0" not in workspace else workspace
        mine = (record for record in all_records(self._state) if owner_of(record) == owner)
        found = [task_from_record(record) for record in mine if not root or record.workspace == root]
        return found[:_SHOWN]

    def proposed_plan(self, record: TaskRecord) -> EditPlan:
        """The change that a task proposes. InputError where a file was changed since."""
        workspace, _, _ = self.open_workspace(self.check_folder(record.workspace))
        overlay = Overlay.restore(workspace, record.overlay)
        return overlay.plan((record.instruction.strip().splitlines() or [""])[0][:200])

    def apply(self, record: TaskRecord, hunks: Sequence[int] | None) -> TaskRecord:
        """Apply the change, or some of its hunks. InputError where there is none."""
        if record.status not in _OPEN or not record.overlay.texts:
            raise InputError("this task proposes no change; nothing was done")
        plan = self.proposed_plan(record)
        plan = plan if hunks is None else select_hunks(plan, hunks)
        if not plan.changes:
            raise InputError("no hunk was chosen; nothing was done", param="hunks")
        _, journal, records = self.open_workspace(plan.workspace.root)
        entry = plan.apply(journal)
        applied = msgspec.structs.replace(
            record,
            status="done",
            overlay=SavedOverlay({}, {}),
            diff=plan.diff(),
            entry=entry.id if entry is not None else "",
            line=f"{plan.sentence()}; undo reverts it",
        )
        records.save(applied)
        return applied

    def undo(self, record: TaskRecord) -> TaskRecord:
        """Undo a task's change. InputError where it made none, or a file was changed since."""
        if not record.entry:
            raise InputError("this task has changed nothing that could be undone")
        _, journal, records = self.open_workspace(self.check_folder(record.workspace))
        entry = next((known for known in journal.entries() if known.id == record.entry), None)
        if entry is None:
            raise NotFound("the change is no longer in the undo journal; it was undone already")
        journal.revert(entry)
        undone = msgspec.structs.replace(record, status="undone", entry="", line="its change was undone")
        records.save(undone)
        return undone


def owner_of(record: TaskRecord) -> str:
    """Tasks of the command line belong to the local caller."""
    return record.owner or LOCAL.id


def task_from_record(record: TaskRecord) -> wire.Task:
    status: Any = record.status
    if status == "working" and not record.under_way:
        status = "interrupted"
    return wire.Task(
        id=f"{PREFIX}{record.id}",
        status=status,
        workspace=record.workspace,
        instruction=record.instruction,
        model=record.model,
        created_at=record.created or record.time,
        line=record.line,
        diff=record.diff,
        entry=record.entry,
        receipts=[
            to_wire_receipt(total)
            for model, total in TaskReceipts(record.receipts).by_model().items()
            if model
        ],
        check=record.check,
        files=list(record.files),
        ended_at=None if status == "working" else record.time,
    )

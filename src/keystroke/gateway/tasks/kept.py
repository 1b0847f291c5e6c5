"""Tasks on disk, as a server reads them: whose they are, what they propose, how a change lands or goes back.

Blocking; called on threads that may wait. A task is its owner's alone: for everybody else it does not
exist. Folders are checked here, every time: what was allowed when a task began may not be any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from keystroke.agent.chat import Receipt
from keystroke.agent.loop import Records, TaskRecord
from keystroke.agent.loop.hunks import part_of
from keystroke.agent.loop.record import all_records, find_record
from keystroke.agent.workspace import Overlay
from keystroke.agent.workspace.overlay import Saved
from keystroke.assist.edit import EditPlan, Journal, Workspace
from keystroke.config import Settings
from keystroke.errors import Forbidden, InputError, NotFound
from keystroke.gateway.access.keys import LOCAL
from keystroke.gateway.access.security import is_loopback
from keystroke.gateway.tasks.run import as_receipt
from keystroke.protocol import tasks as wire
from keystroke.protocol.faults import TaskNotFound

PREFIX = "task_"
_SHOWN = 500  # tasks of a list
_OPEN = ("proposed", "interrupted", "failed")


class Kept:
    def __init__(self, settings: Settings) -> None:
        self._settings, self._state = settings, settings.paths.state

    def folder(self, wanted: str) -> Path:
        """The folder that a task may work in. Forbidden, NotFound, InputError."""
        path = Path(wanted)
        if "\0" in wanted or not path.is_absolute():
            raise InputError(
                "the workspace must be an absolute path of the server's machine", param="workspace"
            )
        try:
            root = path.resolve()
            there = root.is_dir()
        except (OSError, RuntimeError):
            there = False
        if not there:
            raise NotFound(f"there is no folder {wanted:.200} on the server's machine", param="workspace")
        server = self._settings.server
        allowed = [Path(folder).expanduser().resolve() for folder in server.workspaces]
        if allowed and not any(root == folder or folder in root.parents for folder in allowed):
            raise Forbidden(f"tasks may not work in {root}; server.workspaces names the folders they may")
        if not allowed and not is_loopback(server.host):
            raise Forbidden(
                "tasks change files of the server's machine, and others can reach this server; "
                "name the folders they may work in as server.workspaces"
            )
        if not allowed and root in (Path(root.anchor), Path.home()):
            raise Forbidden(f"{root} is too much for one task; name the project's own folder")
        return root

    def workspace(self, root: Path) -> tuple[Workspace, Journal, Records]:
        """What a task works with. Edits that a crash left half made are taken back first."""
        workspace = Workspace(root, exclude=self._settings.assist.exclude)
        journal = Journal(self._state, workspace)
        journal.recover()
        return workspace, journal, Records(self._state, workspace.root)

    def record(self, task_id: str, whose: str) -> TaskRecord:
        """TaskNotFound where there is none, or it is somebody else's."""
        missing = TaskNotFound(f"There is no task {task_id:.80}.", param="task_id")
        if not task_id.startswith(PREFIX):
            raise missing
        try:
            record = find_record(self._state, task_id.removeprefix(PREFIX))
        except NotFound:
            raise missing from None
        if owner(record) != whose:
            raise missing
        return record

    def all(self, whose: str, workspace: str | None) -> list[wire.Task]:
        """Newest first."""
        root = str(Path(workspace).resolve()) if workspace and "\0" not in workspace else workspace
        mine = (record for record in all_records(self._state) if owner(record) == whose)
        found = [as_task(record) for record in mine if not root or record.workspace == root]
        return found[:_SHOWN]

    def plan(self, record: TaskRecord) -> EditPlan:
        """The change that a task proposes. InputError where a file was changed since."""
        workspace, _, _ = self.workspace(self.folder(record.workspace))
        overlay = Overlay.restored(workspace, record.overlay)
        return overlay.plan((record.instruction.strip().splitlines() or [""])[0][:200])

    def land(self, record: TaskRecord, hunks: Sequence[int] | None) -> TaskRecord:
        """Make the change, or some hunks of it. InputError where there is none: then nothing was done."""
        if record.status not in _OPEN or not record.overlay.texts:
            raise InputError("this task proposes no change; nothing was done")
        plan = self.plan(record)
        plan = plan if hunks is None else part_of(plan, hunks)
        if not plan.changes:
            raise InputError("no hunk was chosen; nothing was done", param="hunks")
        _, journal, records = self.workspace(plan.workspace.root)
        entry = plan.apply(journal)
        landed = msgspec.structs.replace(
            record,
            status="done",
            overlay=Saved({}, {}),
            diff=plan.diff(),
            entry=entry.id if entry is not None else "",
            line=f"{', '.join(plan.summary())}; undo takes it back",
        )
        records.save(landed)
        return landed

    def take_back(self, record: TaskRecord) -> TaskRecord:
        """Take a task's change back, whole. InputError where it made none, or a file was changed since."""
        if not record.entry:
            raise InputError("this task has changed nothing that could be taken back")
        _, journal, records = self.workspace(self.folder(record.workspace))
        entry = next((known for known in journal.entries() if known.id == record.entry), None)
        if entry is None:
            raise NotFound("the change is no longer in the undo journal; it was taken back already")
        journal.take_back(entry)
        undone = msgspec.structs.replace(record, status="undone", entry="", line="its change was taken back")
        records.save(undone)
        return undone


def owner(record: TaskRecord) -> str:
    """Tasks of the command line are the local caller's."""
    return record.owner or LOCAL.id


def as_task(record: TaskRecord) -> wire.Task:
    status: Any = record.status
    if status == "working" and not record.under_way:
        status = "interrupted"
    totals: dict[str, Receipt] = {}
    for known in record.receipts:
        if known.model:
            totals[known.model] = totals.get(known.model, Receipt("task", known.model)) + known
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
        receipts=[as_receipt(total) for total in totals.values()],
        check=record.check,
        files=list(record.files),
        ended_at=None if status == "working" else record.time,
    )

"""Tasks in the editor: started by a command, shown while they run, their changes accepted hunk by hunk.

The gateway runs the task. An editor with the capability `experimental.keystrokeTasks` gets every event as
`keystroke/task` and answers by commands; any other editor gets progress and message requests. A change is
never accepted while a document it touches has unsaved changes, because those would be lost.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lsprotocol import types
from msgspec import to_builtins
from pygls.lsp.server import LanguageServer
from pygls.uris import from_fs_path

from keystroke.clients.gateway_address import GatewayAddress
from keystroke.clients.lsp.documents import Documents
from keystroke.errors import InputError, KeystrokeError, UsageError
from keystroke.protocol import tasks as wire

if TYPE_CHECKING:
    from keystroke.clients.task_client import TaskClient

NOTIFICATION = "keystroke/task"
ALL, NONE, EACH = "Accept", "Reject", "One by one"
YES, NO = "Take it", "Leave it"
_ACTIONS = frozenset({"steer", "approve", "reject", "cancel", "apply", "undo", "resume"})
_MAX_LINES = 12  # of a hunk in a message


class TaskHost(Protocol):
    """The parts of our server that tasks use."""

    documents: Documents

    def spawn(self, work: Any) -> None: ...

    def show(self, message: str, kind: types.MessageType) -> None: ...

    def show_progress(
        self, title: str, message: str
    ) -> contextlib.AbstractAsyncContextManager[Callable[[str], None]]: ...


class EditorTasks:
    def __init__(
        self, host: TaskHost, server: LanguageServer, locate: Callable[[], Awaitable[GatewayAddress]]
    ) -> None:
        self._host, self._server, self._locate = host, server, locate
        self._client: TaskClient | None = None
        self.has_task_view = False  # the editor displays tasks itself

    async def start(self, instruction: str, options: dict[str, Any]) -> Any:
        """Start a task in the editor's first folder, or the one in `options`. Returns it at once; its events
        follow."""
        roots = self._host.documents.roots
        workspace = str(options.pop("workspace", "") or (roots[0] if roots else ""))
        if not workspace:
            raise InputError("no folder is open in the editor; a task needs one")
        task = await self._task_client().create(workspace, instruction, **options)
        self._host.spawn(self._watch(task.id, 0))
        return to_builtins(task)

    async def act(self, task: str, action: str, fields: dict[str, Any]) -> Any:
        """Steer, approve, reject, cancel, apply, undo or resume a task."""
        if action not in _ACTIONS:
            raise UsageError(
                f"there is no task action {action:.40}; use one of {', '.join(sorted(_ACTIONS))}"
            )
        client = self._task_client()
        before = await client.get(task)
        if action in ("approve", "apply"):
            self._check_unsaved(before)
        done = await client.act(task, action, **fields)
        if action == "resume":
            self._host.spawn(self._watch(task, before.sequence_number))
        return to_builtins(done)

    async def list_tasks(self) -> list[dict[str, Any]]:
        """The tasks of the editor's folders, newest first."""
        client, roots = self._task_client(), self._host.documents.roots
        return [to_builtins(task) for root in roots for task in await client.list_tasks(root)]

    async def diff(self, task: str) -> Any:
        return to_builtins(await self._task_client().diff(task))

    async def stop(self) -> None:
        if self._client is not None:
            await self._client.close()

    # A running task

    async def _watch(self, task: str, after: int) -> None:
        events = self._task_client().events(task, after)
        try:
            if self.has_task_view:
                async for event in events:
                    self._server.protocol.notify(NOTIFICATION, to_builtins(event))
                return
            async with self._host.show_progress("Keystroke", "task") as report:
                async for event in events:
                    if isinstance(event, wire.TaskDoing):
                        report(event.line)
                    elif isinstance(event, wire.TaskAsked):
                        await self._ask_user(task, event.question)
                    elif isinstance(event, wire.TaskEnded):
                        failed = event.task.status == "failed"
                        kind = types.MessageType.Warning if failed else types.MessageType.Info
                        self._host.show(event.task.line, kind)
        except asyncio.CancelledError:  # the user cancelled the progress
            with contextlib.suppress(KeystrokeError):
                await self._task_client().act(task, "cancel")
            raise
        except KeystrokeError as error:
            self._host.show(error.message, types.MessageType.Warning)

    # Questions as message requests

    async def _ask_user(self, task: str, question: wire.TaskQuestion) -> None:
        if question.kind == "command":
            yes = await self._ask_choice(question.text, "Run", "Do not run") == "Run"
            hunks = None
        else:
            self._server.window_log_message(types.LogMessageParams(types.MessageType.Info, question.diff))
            yes, hunks = await self._choose_hunks(question)
        fields: dict[str, Any] = {"question": question.id, **({"hunks": hunks} if hunks is not None else {})}
        try:
            if yes:
                self._check_unsaved(await self._task_client().get(task))
            await self._task_client().act(task, "approve" if yes else "reject", **fields)
        except InputError as error:
            self._host.show(error.message, types.MessageType.Warning)
            with contextlib.suppress(KeystrokeError):  # the proposal is kept and can be applied later
                await self._task_client().act(task, "reject")

    async def _choose_hunks(self, question: wire.TaskQuestion) -> tuple[bool, list[int] | None]:
        several = (ALL, EACH, NONE) if len(question.hunks) > 1 else (ALL, NONE)
        first = question.text if len(question.hunks) > 1 else f"{question.text}\n{_preview(question.hunks)}"
        choice = await self._ask_choice(first, *several)
        if choice != EACH:
            return choice == ALL, None
        taken = []
        for hunk in question.hunks:
            answer = await self._ask_choice(_preview([hunk]), YES, NO)
            if answer is None:
                return False, None
            if answer == YES:
                taken.append(hunk.number)
        return bool(taken), taken

    async def _ask_choice(self, message: str, *titles: str) -> str | None:
        actions = [types.MessageActionItem(title) for title in titles]
        kind = types.MessageType.Info
        chosen = await self._server.window_show_message_request_async(
            types.ShowMessageRequestParams(kind, f"Keystroke: {message}", actions)
        )
        return chosen.title if chosen is not None else None

    def _check_unsaved(self, task: wire.Task) -> None:
        """Raise InputError if a document that the change touches differs from its file."""
        paths = {hunk.path for hunk in task.question.hunks} if task.question is not None else set()
        for name in paths:
            file = Path(task.workspace, name)
            document = self._host.documents.get(from_fs_path(str(file)) or "")
            if document is not None and _on_disk(file) != document.text:
                raise InputError(f"{name} has unsaved changes; save it, then accept the change")

    def _task_client(self) -> TaskClient:
        if self._client is None:
            from keystroke.clients.task_client import TaskClient  # here: most sessions need no HTTP client

            self._client = TaskClient(self._locate)
        return self._client


def _on_disk(file: Path) -> str | None:
    try:
        return file.read_bytes().decode()
    except (OSError, ValueError):
        return None


def _preview(hunks: list[wire.TaskHunk]) -> str:
    """The first lines of each hunk, as a diff."""
    out = []
    for hunk in hunks:
        lines = [f"-{line}" for line in hunk.before.splitlines()]
        lines += [f"+{line}" for line in hunk.after.splitlines()]
        more = [f"… {len(lines) - _MAX_LINES} more lines"] if len(lines) > _MAX_LINES else []
        out += [f"{hunk.path}:{hunk.first}", *lines[:_MAX_LINES], *more]
    return "\n".join(out)

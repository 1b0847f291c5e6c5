"""A task of `keystroke do` at the gateway that all commands share, told as one done here.

Runs on the thread that a task runs on, and speaks the same events, questions and steering, so nobody who
watches can tell the difference; only the model was loaded before, by whoever needed it first. Stopping stops
the task, never the gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from keystroke.agent.chat import Receipt, Steering
from keystroke.agent.loop import Answer, Ended, Question, Status
from keystroke.agent.loop.events import Began, Changed, Doing, Event, Noted, Printed, Spent, Wrote
from keystroke.agent.loop.record import FINISHED
from keystroke.clients.tasks import TaskClient
from keystroke.engine.base import Interrupt
from keystroke.errors import KeystrokeError, NotFound, Unavailable, UsageError
from keystroke.protocol import tasks as wire

if TYPE_CHECKING:
    from keystroke.clients.cli.do_view import TaskView
    from keystroke.clients.place import Place

# Options that a task begun without them would not learn of; to ignore --dry-run is worse than to refuse it.
_KEPT = ("dry_run", "check", "types", "review", "network", "mcp")
_LOOK = 0.05  # seconds between looks at what was typed


class GatewayTask:
    """`fields` are a task's, as the wire has them; `go_on`: the newest of the folder is gone on with."""

    def __init__(
        self,
        locate: Callable[[], Awaitable[Place]],
        workspace: str,
        fields: dict[str, Any],
        view: TaskView,
        interrupt: Interrupt,
        *,
        go_on: bool = False,
    ) -> None:
        self._locate, self._workspace, self._fields = locate, workspace, fields
        self._view, self._interrupt, self._go_on = view, interrupt, go_on

    def run(self, instruction: str) -> Ended:
        """Do it to its end. Raises what the gateway refuses it with."""
        return asyncio.run(self._run(instruction))

    async def _run(self, instruction: str) -> Ended:
        client = TaskClient(self._locate)
        try:
            task, after = await self._begun(client, instruction)
            loop, stopped = asyncio.get_running_loop(), asyncio.Event()

            def wake() -> None:
                loop.call_soon_threadsafe(stopped.set)

            self._interrupt.add_callback(wake)
            helpers = [
                asyncio.create_task(_steered(client, task, self._view.steering)),
                asyncio.create_task(_stopped(client, task, stopped)),
            ]
            try:
                return await self._followed(client, task, after)
            finally:
                self._interrupt.remove_callback(wake)
                for helper in helpers:
                    helper.cancel()
        finally:
            await client.close()

    async def _begun(self, client: TaskClient, instruction: str) -> tuple[str, int]:
        if not self._go_on:
            return (await client.create(self._workspace, instruction, **self._fields)).id, 0
        for known in await client.all(self._workspace):
            if known.status == "done" and not instruction.strip():
                raise UsageError(FINISHED)
            if lost := [f"--{name.replace('_', '-')}" for name in _KEPT if self._fields.get(name)]:
                raise UsageError(
                    "a task that is gone on with keeps the options it was begun with; "
                    f"leave out {', '.join(lost)}, or begin a new one"
                )
            await client.act(known.id, "resume", instruction=instruction)
            return known.id, known.sequence_number
        raise NotFound("there is no task in this workspace to go on with; say what to do")

    async def _followed(self, client: TaskClient, task: str, after: int) -> Ended:
        async with contextlib.aclosing(client.events(task, after)) as events:
            async for event in events:
                if isinstance(event, wire.TaskAsked):
                    await self._answered(client, task, event.question)
                elif isinstance(event, wire.TaskEnded):
                    ended = _ended(event.task)
                    self._view.sink(ended)
                    return ended
                elif (told := _told(task, event)) is not None:
                    self._view.sink(told)
        raise Unavailable("The gateway lost the task; `keystroke tasks` says what became of it.")

    async def _answered(self, client: TaskClient, task: str, asked: wire.TaskQuestion) -> None:
        answer = Answer(False)
        if self._view.ask is not None:
            question = Question(asked.text, asked.command, diff=asked.diff)
            answer = await asyncio.to_thread(self._view.ask, question)
        with contextlib.suppress(KeystrokeError):  # it was stopped, or answered from elsewhere
            await client.act(task, "approve" if answer.yes else "reject", question=asked.id)


async def _steered(client: TaskClient, task: str, steering: Steering) -> None:
    while True:
        line = steering.take()
        if line is None:
            await asyncio.sleep(_LOOK)
        else:
            with contextlib.suppress(KeystrokeError):  # it has ended meanwhile
                await client.act(task, "steer", line=line)


async def _stopped(client: TaskClient, task: str, stopped: asyncio.Event) -> None:
    await stopped.wait()
    with contextlib.suppress(KeystrokeError):
        await client.act(task, "cancel")


def _told(task: str, event: wire.TaskEvent) -> Event | None:
    """The event as a task done here tells it; None for what is told otherwise."""
    if isinstance(event, wire.TaskBegan):
        return Began(task, "", event.model, event.sandbox)
    if isinstance(event, wire.TaskDoing):
        return Doing(event.line)
    if isinstance(event, wire.TaskText):
        return Wrote(event.delta)
    if isinstance(event, wire.TaskOutput):
        return Printed(event.delta)
    if isinstance(event, wire.TaskNoted):
        return Noted(event.line, event.failed)
    if isinstance(event, wire.TaskChanged):
        return Changed(event.diff)
    if isinstance(event, wire.TaskSpent):
        return Spent(_receipt(event.receipt))
    if isinstance(event, wire.TaskQueued) and event.position:
        return Noted(f"waits, number {event.position} in the queue")
    return None


def _ended(task: wire.Task) -> Ended:
    return Ended(Status(task.status), task.line, task.diff, task.entry, tuple(map(_receipt, task.receipts)))


def _receipt(known: wire.TaskReceipt) -> Receipt:
    return Receipt(
        known.what,
        known.model,
        known.prompt_tokens,
        known.reused_tokens,
        known.tokens,
        known.seconds,
        known.cost,
        known.attempts,
    )

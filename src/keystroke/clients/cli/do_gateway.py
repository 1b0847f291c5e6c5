"""Runs a task of `keystroke do` in the gateway that all commands share.

Events, questions and steering are the same as those of a task in this process. Stopping stops the task,
never the gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from keystroke.agent.chat.receipt import StepReceipt
from keystroke.agent.chat.steering import Steering
from keystroke.agent.loop import ApprovalDecision, ApprovalRequest, EndedEvent, EndStatus, Event, events
from keystroke.agent.loop.record import ALREADY_DONE
from keystroke.clients.task_client import TaskClient
from keystroke.engine.base import Interrupt
from keystroke.errors import KeystrokeError, NotFound, Unavailable, UsageError
from keystroke.protocol import tasks as wire

if TYPE_CHECKING:
    from keystroke.clients.cli.do_view import TerminalTaskView
    from keystroke.clients.gateway_address import GatewayAddress

# A continued task keeps the options it was created with; ignoring these would be worse than refusing them.
_FIXED_OPTIONS = ("dry_run", "check", "types", "review", "network", "mcp")
_POLL_SECONDS = 0.05  # between looks at what was typed


class GatewayTask:
    """`fields` are the task's wire fields; `go_on`: continue the folder's newest task; `on_created` is called
    once the gateway has recorded a new one."""

    def __init__(
        self,
        locate: Callable[[], Awaitable[GatewayAddress]],
        workspace: str,
        fields: dict[str, Any],
        view: TerminalTaskView,
        interrupt: Interrupt,
        *,
        go_on: bool = False,
        on_created: Callable[[], None] = lambda: None,
    ) -> None:
        self._locate, self._workspace, self._fields = locate, workspace, fields
        self._view, self._interrupt, self._go_on = view, interrupt, go_on
        self._on_created = on_created

    def run(self, instruction: str) -> EndedEvent:
        """Run the task to its end. Raises the gateway's refusals."""
        return asyncio.run(self._run(instruction))

    async def _run(self, instruction: str) -> EndedEvent:
        client = TaskClient(self._locate)
        try:
            task, after = await self._start(client, instruction)
            loop, stopped = asyncio.get_running_loop(), asyncio.Event()

            def wake() -> None:
                loop.call_soon_threadsafe(stopped.set)

            self._interrupt.add_callback(wake)
            helpers = [
                asyncio.create_task(_send_steering(client, task, self._view.steering)),
                asyncio.create_task(_cancel_when_stopped(client, task, stopped)),
            ]
            try:
                return await self._follow(client, task, after)
            finally:
                self._interrupt.remove_callback(wake)
                for helper in helpers:
                    helper.cancel()
        finally:
            await client.close()

    async def _start(self, client: TaskClient, instruction: str) -> tuple[str, int]:
        if not self._go_on:
            created = await client.create(self._workspace, instruction, **self._fields)
            self._on_created()
            return created.id, 0
        for known in await client.list_tasks(self._workspace):
            if known.status == "done" and not instruction.strip():
                raise UsageError(ALREADY_DONE)
            if lost := [f"--{name.replace('_', '-')}" for name in _FIXED_OPTIONS if self._fields.get(name)]:
                raise UsageError(
                    "a continued task keeps the options it was created with; "
                    f"leave out {', '.join(lost)}, or start a new one"
                )
            await client.act(known.id, "resume", instruction=instruction)
            return known.id, known.sequence_number
        raise NotFound("there is no task in this workspace to continue; say what to do")

    async def _follow(self, client: TaskClient, task: str, after: int) -> EndedEvent:
        async with contextlib.aclosing(client.events(task, after)) as stream:
            async for event in stream:
                if isinstance(event, wire.TaskAsked):
                    await self._answer(client, task, event.question)
                elif isinstance(event, wire.TaskEnded) and event.task.status == "working":
                    break  # another gateway runs it
                elif isinstance(event, wire.TaskEnded):
                    ended = _to_ended_event(event.task)
                    self._view.handle_event(ended)
                    return ended
                elif (translated := _to_event(event)) is not None:
                    self._view.handle_event(translated)
        raise Unavailable("The gateway lost the task; `keystroke tasks` shows its state.")

    async def _answer(self, client: TaskClient, task: str, question: wire.TaskQuestion) -> None:
        answer = ApprovalDecision(False)
        if self._view.ask is not None:
            request = ApprovalRequest(question.text, question.command, diff=question.diff)
            answer = await asyncio.to_thread(self._view.ask, request)
        with contextlib.suppress(KeystrokeError):  # stopped, or answered by another client
            await client.act(task, "approve" if answer.approved else "reject", question=question.id)


async def _send_steering(client: TaskClient, task: str, steering: Steering) -> None:
    while True:
        line = steering.next_line()
        if line is None:
            await asyncio.sleep(_POLL_SECONDS)
        else:
            with contextlib.suppress(KeystrokeError):  # it has ended
                await client.act(task, "steer", line=line)


async def _cancel_when_stopped(client: TaskClient, task: str, stopped: asyncio.Event) -> None:
    await stopped.wait()
    with contextlib.suppress(KeystrokeError):
        await client.act(task, "cancel")


_EVENTS: dict[type, Callable[[Any], Event]] = {
    wire.TaskBegan: lambda event: events.StartedEvent(event.task_id, "", event.model, event.sandbox),
    wire.TaskDoing: lambda event: events.StepEvent(event.line),
    wire.TaskText: lambda event: events.TextEvent(event.delta),
    wire.TaskOutput: lambda event: events.OutputEvent(event.delta),
    wire.TaskNoted: lambda event: events.NoteEvent(event.line, event.failed),
    wire.TaskChanged: lambda event: events.DiffEvent(event.diff),
    wire.TaskSpent: lambda event: events.CostEvent(_to_receipt(event.receipt)),
}


def _to_event(event: wire.TaskEvent) -> Event | None:
    """A wire event as an event of the agent; None for those without a counterpart."""
    if isinstance(event, wire.TaskQueued) and event.position:
        return events.NoteEvent(f"waiting, number {event.position} in the queue")
    make = _EVENTS.get(type(event))
    return None if make is None else make(event)


def _to_ended_event(task: wire.Task) -> EndedEvent:
    return EndedEvent(
        EndStatus(task.status), task.line, task.diff, task.entry, tuple(map(_to_receipt, task.receipts))
    )


def _to_receipt(receipt: wire.TaskReceipt) -> StepReceipt:
    return msgspec.convert(receipt, StepReceipt, from_attributes=True)

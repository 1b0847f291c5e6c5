"""The tasks of a server: made, found again, steered, answered, stopped, made good or taken back.

Belongs to the event loop; what touches files goes to other threads (`kept`). So many tasks work at a
time, the next ones wait in order. What is not in memory is read from disk, so a task outlives its server.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from keystroke.agent.chat import Chat
from keystroke.agent.loop import AgentTask, Answer, Approvals, Approve, TaskOptions, TaskRecord
from keystroke.agent.loop.hunks import hunks_of
from keystroke.agent.loop.record import new_id
from keystroke.agent.sandbox import Limits, find_sandbox
from keystroke.agent.tools.mcp import named_servers
from keystroke.assist.edit import Workspace
from keystroke.config import Settings
from keystroke.errors import Forbidden, InputError, NotFound, QueueFull, Unavailable
from keystroke.gateway.access.keys import LOCAL, Caller
from keystroke.gateway.access.security import is_loopback
from keystroke.gateway.tasks.bridge import Bridge
from keystroke.gateway.tasks.chat import ServedChat
from keystroke.gateway.tasks.kept import PREFIX, Kept, as_task
from keystroke.gateway.tasks.log import EventLog
from keystroke.gateway.tasks.run import TaskRun, as_hunk
from keystroke.gateway.work.priority import Priority
from keystroke.gateway.work.routing import Task as Routed
from keystroke.gateway.work.service import SHUTTING_DOWN, Service
from keystroke.protocol import tasks as wire
from keystroke.protocol.faults import TaskNotFound

_AT_ONCE = 8  # tasks that work (or ask) at a time
_WAITING = 64
_KEPT = 50  # ended tasks whose events are kept in memory


class Tasks:
    """`whose` names the owner of what a caller makes."""

    def __init__(
        self, service: Service, settings: Settings, whose: Callable[[Caller], str] = lambda caller: caller.id
    ) -> None:
        self._service, self._settings, self._whose = service, settings, whose
        self._kept = Kept(settings)
        self._own = is_loopback(settings.server.host)  # whoever asks is this machine's user
        self._runs: dict[str, TaskRun] = {}  # newest last; ended ones too, up to a number
        self._logs: dict[str, EventLog] = {}
        self._waiting: deque[tuple[TaskRun, Callable[[TaskRun], object]]] = deque()
        self._acting = asyncio.Lock()  # held while something is done with a task that has ended

    @property
    def under_way(self) -> int:
        return sum(not run.over.is_set() for run in self._runs.values())

    # ── making ────────────────────────────────────────────────────────────────────────────────

    async def create(self, wanted: wire.TaskCreate, caller: Caller) -> wire.Task:
        """Forbidden for a folder that tasks may not work in, QueueFull, and what routing raises."""
        if not wanted.instruction.strip():
            raise InputError("the instruction is empty; say what to do", param="instruction")
        root = await asyncio.to_thread(self._kept.folder, wanted.workspace)
        return await self._begin(new_id(), root, wanted, caller, None)

    async def resume(self, task_id: str, caller: Caller, instruction: str) -> wire.Task:
        """Go on with a task that has ended. InputError where it has not."""
        async with self._settled(task_id, caller, "steer it instead") as record:
            return await self._go_on(record, caller, instruction)

    async def _go_on(self, record: TaskRecord, caller: Caller, instruction: str) -> wire.Task:
        root = await asyncio.to_thread(self._kept.folder, record.workspace)
        given = {
            "instruction": record.instruction,
            "check": record.check,
            "files": list(record.files),
            **record.given,
            "workspace": record.workspace,
        }
        wanted = msgspec.convert(given, wire.TaskCreate)
        if instruction.strip():
            wanted.instruction = instruction
        return await self._begin(record.id, root, wanted, caller, record)

    async def _begin(
        self,
        identity: str,
        root: Path,
        wanted: wire.TaskCreate,
        caller: Caller,
        previous: TaskRecord | None,
    ) -> wire.Task:
        if self._service.draining:
            raise Unavailable(SHUTTING_DOWN)
        if not self._own and (wanted.network or wanted.mcp):
            raise Forbidden("tasks of a server that others reach get neither the network nor MCP servers")
        if len(self._waiting) >= _WAITING:
            raise QueueFull(f"{_WAITING} tasks already wait; try again shortly.", retry_after=5.0)
        routing = self._service.choose(
            wanted.model,
            lambda: Routed(
                Priority.BACKGROUND if wanted.background else Priority.CHAT,
                wanted.instruction,
                background=wanted.background,
                converses=True,
            ),
        )
        deep = self._deep(wanted.deep, routing.model)
        name = f"{PREFIX}{identity}"
        log = self._logs.setdefault(name, EventLog(name))
        log.closed = False
        task = wire.Task(
            id=name,
            status="queued",
            workspace=str(root),
            instruction=wanted.instruction.strip(),
            model=routing.model,
            created_at=previous.created if previous is not None and previous.created else time.time(),
            check=wanted.check,
            files=list(wanted.files),
        )
        run = TaskRun(task, self._whose(caller), log, self._ended)
        run.can_hand_over = deep is not None
        self._runs.pop(name, None)
        self._runs[name] = run
        log.tell(wire.TaskCreated, task=run.snapshot(1))
        work = self._work(wanted, root, routing.model, deep, caller, previous)
        if sum(r.thread is not None and not r.over.is_set() for r in self._runs.values()) < _AT_ONCE:
            run.start(work)
        else:
            self._waiting.append((run, work))
            self._tell_positions()
        return run.snapshot()

    def _deep(self, wanted: str | None, worker: str) -> str | None:
        """The model that takes over: the one named, else the server's deep one, if it is another."""
        registry = self._service.registry
        try:
            found = registry.find(wanted or "deep")
        except NotFound:
            if wanted is not None:
                raise
            return None
        return found if found != worker else None

    def _work(
        self,
        wanted: wire.TaskCreate,
        root: Path,
        model: str,
        deep: str | None,
        caller: Caller,
        previous: TaskRecord | None,
    ) -> Callable[[TaskRun], object]:
        """What the task's thread does."""
        settings, loop = self._settings, asyncio.get_running_loop()
        priority = Priority.BACKGROUND if wanted.background else Priority.CHAT
        bridge = Bridge(self._service, loop, caller, priority)

        def opened(name: str, run: TaskRun) -> Chat:
            loading = asyncio.run_coroutine_threadsafe(self._service.ready(name), loop)
            return ServedChat(bridge, loading.result(), run.moved)

        def work(run: TaskRun) -> object:
            workspace, journal, records = self._kept.workspace(root)
            sandbox = find_sandbox()
            if not self._own and not sandbox.confines and (wanted.check or wanted.types or wanted.run):
                raise Forbidden("no sandbox holds on the server's machine, so no command runs for others")
            task = AgentTask(
                workspace,
                journal,
                opened(model, run),
                sandbox,
                Approvals(Approve(wanted.approve), run.ask),
                deep=(lambda: opened(deep, run)) if deep is not None else None,
                options=_options(wanted, workspace),
                records=records,
                limits=Limits(seconds=wanted.seconds),
                network=wanted.network,
                sink=run.sink,
                interrupt=run.interrupt,
                steering=run.steering,
                exclude=settings.assist.exclude,
                servers=named_servers(settings.assist.mcp_servers, wanted.mcp),
                identity=run.task.id.removeprefix(PREFIX),
                owner="" if run.owner == LOCAL.id else run.owner,
                given=msgspec.to_builtins(wanted),
            )
            return task.run(wanted.instruction, previous)

        return work

    def _ended(self, _run: TaskRun) -> None:
        if self._waiting:
            run, work = self._waiting.popleft()
            run.start(work)
            self._tell_positions()
        ended = [name for name, run in self._runs.items() if run.over.is_set()]
        for name in ended[: max(0, len(ended) - _KEPT)]:
            del self._runs[name]
            self._logs.pop(name, None)

    def _tell_positions(self) -> None:
        for position, (run, _) in enumerate(self._waiting, 1):
            run.moved(position)

    # ── looking ───────────────────────────────────────────────────────────────────────────────

    async def get(self, task_id: str, caller: Caller) -> wire.Task:
        run = self._mine(task_id, caller)
        if run is not None:
            return run.snapshot()
        return as_task(await self._record(task_id, caller))

    async def all(self, caller: Caller, workspace: str | None) -> list[wire.Task]:
        """Newest first."""
        whose = self._whose(caller)
        found = {task.id: task for task in await asyncio.to_thread(self._kept.all, whose, workspace)}
        for name, run in self._runs.items():
            if run.owner == whose and (workspace is None or name in found or run.asked_in(workspace)):
                found[name] = run.snapshot()
        return sorted(found.values(), key=lambda task: task.id, reverse=True)

    async def events(self, task_id: str, caller: Caller, after: int) -> AsyncIterator[list[wire.TaskEvent]]:
        """Its events after a number. Of a task that an earlier server did, how it ended."""
        run = self._mine(task_id, caller)
        if run is not None:
            return run.log.after(after)
        task = as_task(await self._record(task_id, caller))
        task.sequence_number = 1

        async def told() -> AsyncIterator[list[wire.TaskEvent]]:
            if after < 1:
                yield [wire.TaskEnded(task_id=task.id, sequence_number=1, task=task)]

        return told()

    async def diff(self, task_id: str, caller: Caller) -> wire.TaskDiff:
        """The change so far, or of a task that has ended."""
        run = self._mine(task_id, caller)
        if run is not None and run.task.question is not None and run.task.question.kind == "change":
            return wire.TaskDiff(diff=run.task.question.diff, hunks=run.task.question.hunks)
        record = await self._record(task_id, caller)
        if not record.overlay.texts:
            return wire.TaskDiff(diff=run.task.diff if run is not None else record.diff, hunks=[])
        plan = await asyncio.to_thread(self._kept.plan, record)
        return wire.TaskDiff(diff=plan.diff(), hunks=[as_hunk(hunk) for hunk in hunks_of(plan)])

    # ── acting ────────────────────────────────────────────────────────────────────────────────

    async def steer(self, task_id: str, caller: Caller, wanted: wire.TaskSteer) -> wire.Task:
        run = await self._live(task_id, caller)
        if not wanted.line.strip() and not wanted.deep:
            raise InputError("say something: the line is empty", param="line")
        run.steer(wanted.line, deep=wanted.deep)
        return run.snapshot()

    async def answer(self, task_id: str, caller: Caller, wanted: wire.TaskAnswer, *, yes: bool) -> wire.Task:
        run = await self._live(task_id, caller)
        hunks = frozenset(wanted.hunks) if yes and wanted.hunks is not None else None
        run.answer(wanted.question, Answer(yes, hunks))
        return run.snapshot()

    async def cancel(self, task_id: str, caller: Caller) -> wire.Task:
        """Stop it, and wait until it has. Harmless after the end."""
        run = self._mine(task_id, caller)
        if run is None:
            return as_task(await self._record(task_id, caller))
        run.stop()
        if run.thread is None:  # it waited for its turn
            self._waiting = deque(pair for pair in self._waiting if pair[0] is not run)
            self._tell_positions()
            run.start(lambda run: run.interrupt.check())
        await run.over.wait()
        return run.snapshot()

    async def apply(self, task_id: str, caller: Caller, hunks: list[int] | None) -> wire.Task:
        """Make a change that was only proposed. InputError where there is none, or a file changed since."""
        async with self._settled(task_id, caller) as record:
            landed = await asyncio.to_thread(self._kept.land, record, hunks)
            return self._changed(task_id, landed, wire.TaskLanded)

    async def undo(self, task_id: str, caller: Caller) -> wire.Task:
        """Take its change back, whole. InputError where it made none, or a file was changed since."""
        async with self._settled(task_id, caller) as record:
            undone = await asyncio.to_thread(self._kept.take_back, record)
            return self._changed(task_id, undone, wire.TaskUndone)

    async def stop(self, seconds: float = 2.0) -> None:
        """End every task: each is `interrupted` and can be gone on with."""
        self._waiting.clear()
        ends = []
        for run in self._runs.values():
            run.stop()
            if run.thread is not None:
                ends.append(asyncio.ensure_future(run.over.wait()))
        if ends:
            _, late = await asyncio.wait(ends, timeout=seconds)
            for wait in late:
                wait.cancel()

    # ── whose, and where ──────────────────────────────────────────────────────────────────────

    def _mine(self, task_id: str, caller: Caller) -> TaskRun | None:
        """The run of a task, if this server knows one. TaskNotFound where it is somebody else's."""
        run = self._runs.get(task_id)
        if run is not None and run.owner != self._whose(caller):
            raise TaskNotFound(f"There is no task {task_id:.80}.", param="task_id")
        return run

    async def _live(self, task_id: str, caller: Caller) -> TaskRun:
        run = self._mine(task_id, caller)
        if run is None:
            await self._record(task_id, caller)
        if run is None or run.task.ended_at is not None:
            raise InputError("the task has ended; go on with it by /resume")
        return run

    @asynccontextmanager
    async def _settled(
        self, task_id: str, caller: Caller, instead: str = "stop it or wait for its end"
    ) -> AsyncIterator[TaskRecord]:
        """The record of a task that has ended; nobody else acts on an ended one meanwhile. One that has just
        told its end is waited for: its thread is still leaving, and whoever read "done" may act on it."""
        run = self._mine(task_id, caller)
        if run is not None and run.task.ended_at is not None:
            await run.over.wait()
        async with self._acting:
            record = await self._record(task_id, caller)
            run = self._mine(task_id, caller)  # it may have been begun again
            if (run is not None and not run.over.is_set()) or (run is None and record.under_way):
                raise InputError(f"the task is still under way; {instead}")
            yield record

    async def _record(self, task_id: str, caller: Caller) -> TaskRecord:
        return await asyncio.to_thread(self._kept.record, task_id, self._whose(caller))

    def _changed(self, task_id: str, record: TaskRecord, event: Any) -> wire.Task:
        task = as_task(record)
        run = self._runs.get(task_id)
        if run is None:
            return task
        task.sandbox = run.task.sandbox
        run.task = task
        run.log.tell(event, task=run.snapshot(1))
        return run.snapshot()


def _options(wanted: wire.TaskCreate, workspace: Workspace) -> TaskOptions:
    for name in wanted.files:
        workspace.locate(name)
    return TaskOptions(
        check=wanted.check,
        types=wanted.types,
        files=tuple(wanted.files),
        may_run=wanted.run,
        attempts=wanted.attempts,
        tries=wanted.tries,
        max_tokens=wanted.max_tokens,
        workers=max(1, min(wanted.attempts, os.cpu_count() or 1)),
        dry_run=wanted.dry_run,
        review=wanted.review,
    )

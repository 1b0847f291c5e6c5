"""Creates, lists, steers, answers, stops, applies and undoes the tasks of a server.

Used on the event loop only; file access runs on other threads (`archive`). A limited number of tasks run
at a time, the others wait in order. Tasks that are not in memory are read from disk, so a task outlives
its server.
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

from keystroke.agent.chat.model import ChatModel
from keystroke.agent.loop import (
    AgentTask,
    ApprovalDecision,
    ApprovalLevel,
    Approvals,
    TaskControl,
    TaskFiles,
    TaskIdentity,
    TaskModels,
    TaskOptions,
    TaskPermissions,
    TaskRecord,
)
from keystroke.agent.loop.hunks import split_hunks
from keystroke.agent.loop.record import new_id
from keystroke.agent.loop.task import waiting_record
from keystroke.agent.sandbox import CommandLimits, find_sandbox
from keystroke.agent.tools.mcp import load_servers
from keystroke.assist.edit import Workspace
from keystroke.config import Settings
from keystroke.errors import Forbidden, InputError, NotFound, QueueFull, Unavailable
from keystroke.gateway.access.keys import LOCAL, Caller
from keystroke.gateway.access.security import is_loopback
from keystroke.gateway.tasks.archive import PREFIX, TaskArchive, task_from_record
from keystroke.gateway.tasks.bridge import SchedulerBridge
from keystroke.gateway.tasks.chat import ServedChatModel
from keystroke.gateway.tasks.log import EventLog
from keystroke.gateway.tasks.run import TaskRun, to_wire_hunk
from keystroke.gateway.work.priority import Priority
from keystroke.gateway.work.routing import RoutingRequest as Routed
from keystroke.gateway.work.service import Service
from keystroke.gateway.work.ticket import SHUTTING_DOWN
from keystroke.protocol import tasks as wire
from keystroke.protocol.faults import TaskNotFound

_MAX_RUNNING = 8
_MAX_WAITING = 64
_MAX_ENDED = 50  # ended tasks whose events stay in memory


class TaskManager:
    """`owner_of` names the owner of a caller's tasks."""

    def __init__(
        self,
        service: Service,
        settings: Settings,
        owner_of: Callable[[Caller], str] = lambda caller: caller.id,
    ) -> None:
        self._service, self._settings, self._owner_of = service, settings, owner_of
        self._archive = TaskArchive(settings)
        self._is_local = is_loopback(settings.server.host)  # callers are this machine's user
        self._runs: dict[str, TaskRun] = {}  # newest last; ended ones too, up to a number
        self._logs: dict[str, EventLog] = {}
        self._waiting: deque[tuple[TaskRun, Callable[[TaskRun], object]]] = deque()
        self._acting = asyncio.Lock()  # held while an ended task is changed

    @property
    def active_count(self) -> int:
        return sum(not run.over.is_set() for run in self._runs.values())

    async def create(self, request: wire.TaskCreate, caller: Caller) -> wire.Task:
        """Create a task. Forbidden for a folder tasks may not use, QueueFull, and what routing raises."""
        if not request.instruction.strip():
            raise InputError("the instruction is empty; say what to do", param="instruction")
        root = await asyncio.to_thread(self._archive.check_folder, request.workspace)
        return await self._start(new_id(), root, request, caller, None)

    async def resume(self, task_id: str, caller: Caller, request: wire.TaskResume) -> wire.Task:
        """Continue a task that has ended. InputError where it has not."""
        async with self._lock_ended(task_id, caller, "steer it instead") as record:
            root = await asyncio.to_thread(self._archive.check_folder, record.workspace)
            given = {
                "instruction": record.instruction,
                "check": record.check,
                "files": list(record.files),
                **record.given,
                "workspace": record.workspace,
            }
            task = msgspec.convert(given, wire.TaskCreate)
            if request.instruction.strip():
                task.instruction = request.instruction
            return await self._start(record.id, root, task, caller, record)

    async def _start(
        self,
        identity: str,
        root: Path,
        request: wire.TaskCreate,
        caller: Caller,
        previous: TaskRecord | None,
    ) -> wire.Task:
        if self._service.draining:
            raise Unavailable(SHUTTING_DOWN)
        if not self._is_local and (request.network or request.mcp):
            raise Forbidden("tasks of a server that others reach get neither the network nor MCP servers")
        if len(self._waiting) >= _MAX_WAITING:
            raise QueueFull(f"{_MAX_WAITING} tasks already wait; try again shortly.", retry_after=5.0)
        routing = self._service.choose(
            request.model,
            lambda: Routed(
                Priority.BACKGROUND if request.background else Priority.CHAT,
                request.instruction,
                background=request.background,
                converses=True,
            ),
        )
        deep = self._deep_model(request.deep, routing.model)
        name = f"{PREFIX}{identity}"
        log = self._logs.setdefault(name, EventLog(name))
        log.closed = False
        task = wire.Task(
            id=name,
            status="queued",
            workspace=str(root),
            instruction=request.instruction.strip(),
            model=routing.model,
            created_at=previous.created if previous is not None and previous.created else time.time(),
            check=request.check,
            files=list(request.files),
        )
        run = TaskRun(task, self._owner_of(caller), log, self._on_end)
        run.can_hand_over = deep is not None
        self._runs.pop(name, None)
        self._runs[name] = run
        log.append(wire.TaskCreated, task=run.snapshot(1))
        work = self._make_work(request, root, routing.model, deep, caller, previous)
        if sum(r.thread is not None and not r.over.is_set() for r in self._runs.values()) < _MAX_RUNNING:
            run.start(work)
        else:
            self._waiting.append((run, work))
            self._report_positions()
        return run.snapshot()

    def _deep_model(self, requested: str | None, worker: str) -> str | None:
        """The model that takes over: the one named, else the server's deep model, unless it is the worker."""
        registry = self._service.registry
        try:
            found = registry.resolve(requested or "deep")
        except NotFound:
            if requested is not None:
                raise
            return None
        return found if found != worker else None

    def _make_work(
        self,
        request: wire.TaskCreate,
        root: Path,
        model: str,
        deep: str | None,
        caller: Caller,
        previous: TaskRecord | None,
    ) -> Callable[[TaskRun], object]:
        """The work of the task's thread."""
        settings, loop = self._settings, asyncio.get_running_loop()
        priority = Priority.BACKGROUND if request.background else Priority.CHAT
        bridge = SchedulerBridge(self._service, loop, caller, priority)

        def open_model(name: str, run: TaskRun) -> ChatModel:
            loading = asyncio.run_coroutine_threadsafe(self._service.ensure_loaded(name), loop)
            return ServedChatModel(bridge, loading.result(), run.set_queue_position)

        def work(run: TaskRun) -> object:
            workspace, journal, store = self._archive.open_workspace(root)
            sandbox = find_sandbox()
            runs_commands = request.check or request.types or request.run
            if runs_commands and not self._is_local and not sandbox.confines:
                raise Forbidden("no sandbox works on the server's machine, so no command runs for others")
            options = _options(request, workspace)
            identity = TaskIdentity(
                id=run.task.id.removeprefix(PREFIX),
                owner="" if run.owner == LOCAL.id else run.owner,
                given=msgspec.to_builtins(request),
            )
            if previous is None:  # recorded before the model is loaded, so that a stop loses nothing
                store.save(waiting_record(identity, request.instruction, model, options, root))
            task = AgentTask(
                files=TaskFiles(
                    workspace=workspace, journal=journal, store=store, exclude=settings.assist.exclude
                ),
                models=TaskModels(
                    model=open_model(model, run),
                    open_deep=(lambda: open_model(deep, run)) if deep is not None else None,
                ),
                permissions=TaskPermissions(
                    sandbox=sandbox,
                    approvals=Approvals(ApprovalLevel(request.approve), run.ask_user),
                    limits=CommandLimits(seconds=request.seconds),
                    network=request.network,
                    servers=load_servers(settings.assist.mcp_servers, request.mcp),
                ),
                options=options,
                control=TaskControl(
                    on_event=run.handle_event, interrupt=run.interrupt, steering=run.steering
                ),
                identity=identity,
            )
            return task.run(request.instruction, previous)

        return work

    def _on_end(self, _run: TaskRun) -> None:
        if self._waiting:
            run, work = self._waiting.popleft()
            run.start(work)
            self._report_positions()
        ended = [name for name, run in self._runs.items() if run.over.is_set()]
        for name in ended[: max(0, len(ended) - _MAX_ENDED)]:
            del self._runs[name]
            self._logs.pop(name, None)

    def _report_positions(self) -> None:
        for position, (run, _) in enumerate(self._waiting, 1):
            run.set_queue_position(position)

    async def get(self, task_id: str, caller: Caller) -> wire.Task:
        run = self._find_run(task_id, caller)
        if run is not None:
            return run.snapshot()
        return task_from_record(await self._record(task_id, caller))

    async def all(self, caller: Caller, workspace: str | None) -> list[wire.Task]:
        """Newest first."""
        owner = self._owner_of(caller)
        found = {task.id: task for task in await asyncio.to_thread(self._archive.all, owner, workspace)}
        for name, run in self._runs.items():
            if run.owner == owner and (
                workspace is None or name in found or run.task.workspace == workspace.rstrip("/")
            ):
                found[name] = run.snapshot()
        return sorted(found.values(), key=lambda task: task.id, reverse=True)

    async def events(self, task_id: str, caller: Caller, after: int) -> AsyncIterator[list[wire.TaskEvent]]:
        """The events of a task after a number. Of a task of an earlier server, only its end."""
        run = self._find_run(task_id, caller)
        if run is not None:
            return run.log.events_after(after)
        task = task_from_record(await self._record(task_id, caller))
        task.sequence_number = 1

        async def end_event() -> AsyncIterator[list[wire.TaskEvent]]:
            if after < 1:
                yield [wire.TaskEnded(task_id=task.id, sequence_number=1, task=task)]

        return end_event()

    async def diff(self, task_id: str, caller: Caller) -> wire.TaskDiff:
        """The current change, or that of a task that has ended."""
        run = self._find_run(task_id, caller)
        if run is not None and run.task.question is not None and run.task.question.kind == "change":
            return wire.TaskDiff(diff=run.task.question.diff, hunks=run.task.question.hunks)
        record = await self._record(task_id, caller)
        if not record.overlay.texts:
            return wire.TaskDiff(diff=run.task.diff if run is not None else record.diff, hunks=[])
        plan = await asyncio.to_thread(self._archive.proposed_plan, record)
        return wire.TaskDiff(diff=plan.diff(), hunks=[to_wire_hunk(hunk) for hunk in split_hunks(plan)])

    async def steer(self, task_id: str, caller: Caller, request: wire.TaskSteer) -> wire.Task:
        run = await self._find_active_run(task_id, caller)
        if not request.line.strip() and not request.deep:
            raise InputError("the line is empty; say something", param="line")
        run.steer(request.line, deep=request.deep)
        return run.snapshot()

    async def approve(self, task_id: str, caller: Caller, request: wire.TaskAnswer) -> wire.Task:
        run = await self._find_active_run(task_id, caller)
        hunks = None if request.hunks is None else frozenset(request.hunks)
        run.answer(request.question, ApprovalDecision(True, hunks))
        return run.snapshot()

    async def reject(self, task_id: str, caller: Caller, request: wire.TaskAnswer) -> wire.Task:
        run = await self._find_active_run(task_id, caller)
        run.answer(request.question, ApprovalDecision(False))
        return run.snapshot()

    async def cancel(self, task_id: str, caller: Caller) -> wire.Task:
        """Stop a task and wait until it has stopped. No effect after the end."""
        run = self._find_run(task_id, caller)
        if run is None:
            return task_from_record(await self._record(task_id, caller))
        run.stop()
        if run.thread is None:  # it has not started
            self._waiting = deque(pair for pair in self._waiting if pair[0] is not run)
            self._report_positions()
            run.start(lambda run: run.interrupt.check())
        await run.over.wait()
        return run.snapshot()

    async def apply(self, task_id: str, caller: Caller, request: wire.TaskApply) -> wire.Task:
        """Apply a proposed change. InputError where there is none, or a file changed since."""
        async with self._lock_ended(task_id, caller) as record:
            applied = await asyncio.to_thread(self._archive.apply, record, request.hunks)
            return self._publish(task_id, applied, wire.TaskLanded)

    async def undo(self, task_id: str, caller: Caller) -> wire.Task:
        """Undo a task's change. InputError where it made none, or a file changed since."""
        async with self._lock_ended(task_id, caller) as record:
            undone = await asyncio.to_thread(self._archive.undo, record)
            return self._publish(task_id, undone, wire.TaskUndone)

    async def stop(self, seconds: float = 2.0) -> None:
        """Interrupt every task; each can be continued."""
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

    def _find_run(self, task_id: str, caller: Caller) -> TaskRun | None:
        """The run of a task, if this server has one. TaskNotFound where it has another owner."""
        run = self._runs.get(task_id)
        if run is not None and run.owner != self._owner_of(caller):
            raise TaskNotFound(f"There is no task {task_id:.80}.", param="task_id")
        return run

    async def _find_active_run(self, task_id: str, caller: Caller) -> TaskRun:
        run = self._find_run(task_id, caller)
        if run is None:
            await self._record(task_id, caller)
        if run is None or run.task.ended_at is not None:
            raise InputError("the task has ended; continue it with /resume")
        return run

    @asynccontextmanager
    async def _lock_ended(
        self, task_id: str, caller: Caller, instead: str = "stop it or wait for its end"
    ) -> AsyncIterator[TaskRecord]:
        """The record of an ended task, locked against other actions. A run that has just published its end
        is waited for, because its thread is still finishing."""
        run = self._find_run(task_id, caller)
        if run is not None and run.task.ended_at is not None:
            await run.over.wait()
        async with self._acting:
            record = await self._record(task_id, caller)
            run = self._find_run(task_id, caller)  # it may have been continued
            if (run is not None and not run.over.is_set()) or (run is None and record.under_way):
                raise InputError(f"the task is still running; {instead}")
            yield record

    async def _record(self, task_id: str, caller: Caller) -> TaskRecord:
        return await asyncio.to_thread(self._archive.record, task_id, self._owner_of(caller))

    def _publish(self, task_id: str, record: TaskRecord, event: Any) -> wire.Task:
        task = task_from_record(record)
        run = self._runs.get(task_id)
        if run is None:
            return task
        task.sandbox = run.task.sandbox
        run.task = task
        run.log.append(event, task=run.snapshot(1))
        return run.snapshot()


def _options(request: wire.TaskCreate, workspace: Workspace) -> TaskOptions:
    for name in request.files:
        workspace.locate(name)
    return TaskOptions(
        check=request.check,
        types=request.types,
        files=tuple(request.files),
        may_run=request.run,
        attempts=request.attempts,
        tries=request.tries,
        max_tokens=request.max_tokens,
        workers=max(1, min(request.attempts or 8, os.cpu_count() or 1)),
        dry_run=request.dry_run,
        review=request.review,
    )

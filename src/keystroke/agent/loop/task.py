"""One task, from an instruction to a change that is applied, or to the reason why there is none.

The order of work: a strategy for the task's model, the deep model where that one fails, a review, one
edit of the workspace that `undo` reverts. However a task ends, its record says how far it came, its
temporary copies are removed, and one `EndedEvent` is the last event.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from keystroke.agent.chat.model import ChatModel
from keystroke.agent.chat.receipt import StepReceipt, TaskReceipts
from keystroke.agent.chat.steering import HandoverRequested
from keystroke.agent.loop import prompts
from keystroke.agent.loop.events import EndedEvent, EndStatus, StartedEvent
from keystroke.agent.loop.hunks import select_hunks
from keystroke.agent.loop.record import TaskRecord
from keystroke.agent.loop.region_rewriting import RewriteStrategy
from keystroke.agent.loop.state import (
    AgentStrategy,
    TaskControl,
    TaskFiles,
    TaskIdentity,
    TaskModels,
    TaskOptions,
    TaskPermissions,
    TaskState,
)
from keystroke.agent.loop.tool_calling import ToolCallingStrategy
from keystroke.agent.loop.tool_probe import calls_tools
from keystroke.agent.sandbox.busy_clock import BusyClock
from keystroke.agent.tools import Runner
from keystroke.agent.tools.mcp import McpTools
from keystroke.agent.workspace import Overlay, WorkspaceReplicas
from keystroke.agent.workspace.scratch import task_folder
from keystroke.analysis.failures.tally import PassFailTally, count_tests
from keystroke.analysis.rules import project_rules
from keystroke.assist.edit.plan import rule_warnings
from keystroke.assist.edit.rule_checks import command_for_tests
from keystroke.errors import InputError, Interrupted, KeystrokeError


class AgentTask:
    def __init__(
        self,
        *,
        files: TaskFiles,
        models: TaskModels,
        permissions: TaskPermissions,
        options: TaskOptions | None = None,
        control: TaskControl | None = None,
        identity: TaskIdentity | None = None,
    ) -> None:
        self._files, self._models, self._permissions = files, models, permissions
        self._options, self._control = options or TaskOptions(), control or TaskControl()
        self._identity = identity or TaskIdentity()
        self._created = time.time()
        self._started: float  # of `run`, by time.perf_counter()
        self._deep: ChatModel | None = None
        self._runner: Runner | None = None
        self._mcp = (
            McpTools(permissions.servers, permissions.approvals.approve_command, self._control.interrupt)
            if permissions.servers
            else None
        )
        self.overlay = Overlay(files.workspace)

    def run(self, instruction: str, previous: TaskRecord | None = None) -> EndedEvent:
        """Do the task, or continue `previous`. Every ending is sent as an `EndedEvent`; a KeystrokeError
        is raised after it."""
        if not instruction.strip() and previous is None:
            raise InputError("the task is empty; say what to do")
        self._started = time.perf_counter()
        with task_folder(self._files.scratch) as folder:
            copies = WorkspaceReplicas(
                self._files.workspace.root,
                folder,
                self._permissions.sandbox,
                exclude=self._files.exclude,
                most=max(1, self._options.workers),
            )
            try:
                task = self._prepare(instruction, copies, previous)
                sandbox = str(self._permissions.sandbox.kind)
                name = self._models.model.name
                self._control.on_event(StartedEvent(self._identity.id, task.instruction, name, sandbox))
                return self._run(task)
            finally:
                if self._mcp is not None:
                    self._mcp.close()
                if self._runner is not None:
                    self._runner.close()
                copies.close()
                if self._deep is not None:
                    self._deep.close()

    def _run(self, task: TaskState) -> EndedEvent:
        try:
            return self._work(task)
        except Interrupted:
            line = "stopped; `keystroke do --continue` continues it" if self._files.store else "stopped"
            return self._end(task, EndStatus.INTERRUPTED, line)
        except KeystrokeError as error:
            self._end(task, EndStatus.FAILED, str(error))
            raise

    def _work(self, task: TaskState) -> EndedEvent:
        if self._mcp is not None:
            task.tools = tuple(self._mcp.start())
        model, has_deep = self._models.model, self._models.open_deep is not None
        try:
            done = _choose_strategy(model, task).run(task)
        except HandoverRequested:
            done = False
            task.note(f"{model.name} hands over")
            task.instruction = "\n".join([task.instruction, *self._control.steering.drain()])
        if not done and has_deep:
            done = _choose_strategy(self._open_deep(task, "takes over"), task).run(task)
        if not done:
            return self._end(task, EndStatus.FAILED, self._failure_line(task))
        if self._options.review and has_deep and task.overlay.texts:
            self._review(task, self._open_deep(task, "reviews the change"))
        return self._apply(task, time.perf_counter() - self._started)

    def _open_deep(self, task: TaskState, purpose: str) -> ChatModel:
        if self._deep is None:
            assert self._models.open_deep is not None
            self._deep = self._models.open_deep()
        task.begin_step(f"{self._deep.name} {purpose}")
        return self._deep

    def _failure_line(self, task: TaskState) -> str:
        lines = [line.strip() for line in (task.failure or task.refused).splitlines() if line.strip()]
        reason = f": {lines[-1]:.120}" if lines else ""  # the last line usually names the error
        if not task.overlay.texts or self._files.store is None:
            return f"no change that passes was found{reason}; nothing was changed"
        counts = count_tests(task.last_check.output) if task.last_check is not None else PassFailTally()
        reached = f", with the one above {counts}" if counts.passed else reason
        return (
            f"no change that passes was found{reached}; nothing was changed: `keystroke do --continue` "
            "continues from it, `keystroke tasks apply` applies it as it is"
        )

    def _review(self, task: TaskState, model: ChatModel) -> None:
        messages = prompts.review(task.instruction, task.overlay.diff())
        with task.busy:
            reply = model.reply(messages, task.answer_options(512))
        task.add_receipt(reply.receipt)
        problems = prompts.parse_review(reply.text)
        for problem in problems:
            task.note(f"review: {problem:.200}", failed=True)
        if not problems:
            task.note("review: OK")

    def _apply(self, task: TaskState, seconds: float) -> EndedEvent:
        if damage := task.find_damage(complete=False):
            return self._end(
                task, EndStatus.FAILED, f"the change is refused: {damage[0]}; nothing was written"
            )
        plan = task.overlay.plan(task.instruction.strip().splitlines()[0][:200])
        if not plan.changes:
            return self._end(task, EndStatus.DONE, "done; nothing had to be changed")
        for warning in rule_warnings(plan, task.rules):
            task.note(warning, failed=True)
        if not self._options.check and (command := command_for_tests(task.rules)) is not None:
            task.note(f"the project's rules name the tests `{command:.100}`; --check runs them")
        if self._options.dry_run:
            line = f"would {plan.sentence()}; nothing was written"
            return self._end(task, EndStatus.PROPOSED, line, plan.diff())
        decision = self._permissions.approvals.approve_change(plan)
        self._control.interrupt.check()
        if decision.approved and decision.hunks is not None:
            plan = select_hunks(plan, decision.hunks)
        if not decision.approved or not plan.changes:
            return self._end(task, EndStatus.PROPOSED, "not approved; nothing was written", plan.diff())
        diff, summary = plan.diff(), plan.sentence()
        entry = plan.apply(self._files.journal)
        tokens = task.receipts.total().tokens
        line = f"{summary} ({tokens:,} tokens, {seconds:.1f} s); `keystroke undo` reverts it"
        return self._end(task, EndStatus.DONE, line, diff, entry.id if entry else "")

    def _end(
        self, task: TaskState, status: EndStatus, line: str, diff: str = "", entry: str = ""
    ) -> EndedEvent:
        diff = diff or task.overlay.diff()
        if status is EndStatus.DONE:  # the changes are the workspace's now
            self.overlay = task.overlay = Overlay(self._files.workspace)
        receipts = tuple(receipt for model, receipt in task.receipts.by_model().items() if model)
        spent = task.busy.seconds + self._permissions.approvals.seconds
        overhead = max(0.0, time.perf_counter() - self._started - spent)
        ended = EndedEvent(status, line, diff, entry, receipts, round(overhead, 3))
        try:
            self._save(task, ended)
        except KeystrokeError as error:  # the work is done; only continuing it later is impossible
            task.note(str(error), failed=True)
        self._control.on_event(ended)
        return ended

    def _prepare(self, instruction: str, copies: WorkspaceReplicas, previous: TaskRecord | None) -> TaskState:
        workspace, permissions, control = self._files.workspace, self._permissions, self._control
        if previous is not None:
            self._identity = replace(self._identity, id=previous.id)
            self._created = previous.created or self._created
            self.overlay = Overlay.restore(workspace, previous.overlay)
            instruction = _combine_instructions(instruction, previous)
        busy = BusyClock()
        runner = self._runner = Runner(
            permissions.sandbox,
            self.overlay,
            copies,
            permissions.approvals.approve_command,
            limits=permissions.limits,
            network=permissions.network,
            interrupt=control.interrupt,
            busy=busy,
        )
        first = self._options.files[0] if self._options.files else "."
        task = TaskState(
            instruction,
            self._options,
            self.overlay,
            runner,
            project_rules(workspace.root / first, workspace.root).prompt_header(),
            control,
            save=lambda: self._save(task),
            busy=busy,
        )
        if previous is not None:
            task.messages, task.tries = list(previous.messages), previous.tries
            task.files = previous.found
            task.receipts = TaskReceipts(previous.receipts)
        runner.on_output = task.add_output
        self._save(task)
        return task

    def _save(self, task: TaskState, ended: EndedEvent | None = None) -> None:
        if self._files.store is None:
            return
        name, root = self._models.model.name, self._files.workspace.root
        record = msgspec.structs.replace(
            waiting_record(self._identity, task.instruction, name, self._options, root),
            messages=[dict(message) for message in task.messages],
            overlay=task.overlay.snapshot(),
            receipts=tuple(task.receipts.receipts),
            tries=task.tries,
            found=task.files,
            created=self._created,
        )
        if ended is not None:
            status, line, diff, entry = str(ended.status), ended.line, ended.diff, ended.entry
            record = msgspec.structs.replace(record, status=status, line=line, diff=diff, entry=entry)
        self._files.store.save(record)


def waiting_record(
    identity: TaskIdentity, instruction: str, model: str, options: TaskOptions, root: Path
) -> TaskRecord:
    """The record of a task whose model is not loaded yet."""
    return TaskRecord(
        id=identity.id,
        owner=identity.owner,
        given=identity.given,
        instruction=instruction,
        status="working",
        model=model,
        check=options.check,
        files=options.files,
        time=time.time(),
        created=time.time(),
        workspace=str(root),
        pid=os.getpid(),
    )


def _combine_instructions(instruction: str, previous: TaskRecord) -> str:
    """The instruction of a continued task: a new instruction is added to that of an unfinished task."""
    added = instruction.strip()
    if previous.status == EndStatus.DONE and added:
        return added
    if not added or added == previous.instruction.strip():
        return previous.instruction
    return f"{previous.instruction.strip()}\n{added}"


def _choose_strategy(model: ChatModel, task: TaskState) -> AgentStrategy:
    if not model.is_small and model.probe_tools and not calls_tools(model, task.control.interrupt):
        task.note(f"{model.name} does not call tools reliably; it rewrites regions instead")
        return RewriteStrategy(model)
    return RewriteStrategy(model) if model.is_small else ToolCallingStrategy(model)


def describe_receipts(receipts: Sequence[StepReceipt]) -> str:
    """One line for each model: its cost."""
    return "\n".join(f"{receipt.model}: {receipt.describe()}" for receipt in receipts)

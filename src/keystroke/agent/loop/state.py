"""The inputs of a task and its state; both strategies of the agent share them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keystroke.agent.attempts import StopPolicy
from keystroke.agent.chat.model import AnswerOptions, ChatModel
from keystroke.agent.chat.receipt import StepReceipt, TaskReceipts
from keystroke.agent.chat.steering import Message, Steering
from keystroke.agent.loop import events
from keystroke.agent.loop.approvals import Approvals
from keystroke.agent.loop.record import TaskStore, new_id
from keystroke.agent.sandbox import CommandLimits, CompletedCommand, Sandbox
from keystroke.agent.sandbox.busy_clock import BusyClock
from keystroke.agent.tools import AgentTool, Runner
from keystroke.agent.tools.mcp import McpServer
from keystroke.agent.workspace import Overlay
from keystroke.assist.edit import EditFailure, Journal, Workspace
from keystroke.assist.edit.validation import syntax_failure, validate_change
from keystroke.engine.base import Interrupt
from keystroke.engine.generation import GenerationParams

_PARALLEL, _MOST_AUTO, _SERIAL = 4, 8, 3  # attempts at a time; of them all; one after the other


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """The user's options besides the instruction."""

    check: str = ""  # a shell command that must pass; naming it is the permission to run it
    types: str = ""  # likewise, for types
    files: tuple[str, ...] = ()  # what the task is about; empty: the program finds it
    may_run: bool = False  # the model may run commands, each approved as the approval level says
    attempts: int = 1  # 0: as many as cost about as much as one
    policy: StopPolicy = StopPolicy.FIRST
    tries: int = 2  # rounds of one model, each shown how the one before failed
    max_tokens: int = 2048
    max_steps: int = 30  # answers of a model with tools
    temperature: float = 0.8
    seed: int = 0
    workers: int = 2  # checks at a time
    dry_run: bool = False
    review: bool = False  # the deep model reviews the diff


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFiles:
    """The files of a task. Without a `store` no record is kept; `scratch` holds temporary copies."""

    workspace: Workspace
    journal: Journal
    store: TaskStore | None = None
    exclude: tuple[str, ...] = ()
    scratch: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskModels:
    """`open_deep` opens the model that takes over where `model` fails, and that reviews. It is called when
    the deep model is first needed; the task closes that model."""

    model: ChatModel
    open_deep: Callable[[], ChatModel] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPermissions:
    """The permissions of commands and tools. `servers` are the MCP servers that a model with tools may
    call."""

    sandbox: Sandbox
    approvals: Approvals
    limits: CommandLimits | None = None
    network: bool = False
    servers: Mapping[str, McpServer] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskControl:
    """How the caller follows, stops and steers a task."""

    on_event: events.EventHandler = lambda event: None
    interrupt: Interrupt = field(default_factory=Interrupt)
    steering: Steering = field(default_factory=Steering)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskIdentity:
    """Names a task's record. `owner` and `given` are kept there for a server of tasks."""

    id: str = field(default_factory=new_id)
    owner: str = ""
    given: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class TaskState:
    """A task in progress. `messages` is the conversation so far; `save` writes the task's record."""

    instruction: str
    options: TaskOptions
    overlay: Overlay
    runner: Runner
    rules: str
    control: TaskControl
    save: Callable[[], None]
    receipts: TaskReceipts = field(default_factory=TaskReceipts)
    messages: list[Message] = field(default_factory=list)
    tools: tuple[AgentTool, ...] = ()  # of MCP servers
    last_check: CompletedCommand | None = None  # of the named check, on the change so far
    failure: str = ""  # what the check reports
    refused: str = ""  # what was wrong with the last answer
    tries: int = 0
    files: tuple[str, ...] = ()  # that the program found for the task
    asked: set[str] = field(default_factory=set)  # questions so far
    busy: BusyClock = field(default_factory=BusyClock)  # while models compute or commands run

    def answer_options(self, max_tokens: int = 0, **fields: Any) -> AnswerOptions:
        params = GenerationParams(max_tokens or self.options.max_tokens)
        return AnswerOptions(params, interrupt=self.control.interrupt, **fields)

    def begin_step(self, line: str) -> None:
        self.control.interrupt.check()
        self.control.on_event(events.StepEvent(line))

    def note(self, line: str, *, failed: bool = False) -> None:
        self.control.on_event(events.NoteEvent(line, failed))

    def add_text(self, text: str) -> None:
        self.control.on_event(events.TextEvent(text))

    def add_output(self, text: str) -> None:
        self.control.on_event(events.OutputEvent(text))

    def attempts(self, model: ChatModel) -> int:
        """How many attempts to make: where the user leaves it open, up to 8 that cost about as much as one;
        elsewhere one, and more where a check can refuse it: as many as run together, at least two."""
        if self.options.attempts:
            return self.options.attempts
        if model.parallel_attempts >= _PARALLEL:
            return min(_MOST_AUTO, model.parallel_attempts)
        if not self.options.check and not self.options.types:
            return 1
        return min(_MOST_AUTO, max(_SERIAL, model.joint_attempts))

    def add_receipt(self, receipt: StepReceipt) -> None:
        self.receipts.add(receipt)
        self.control.on_event(events.CostEvent(receipt))

    def report_change(self) -> None:
        self.control.on_event(events.DiffEvent(self.overlay.diff()))
        self.save()

    def find_damage(self, *, complete: bool) -> list[str]:
        """The faults of the change so far, one sentence for each file; unambiguous ones are repaired.
        `complete`: the change should be the whole task. A command may rewrite a file in any way, as long as
        it still parses."""
        problems = []
        for change in self.overlay.plan("").changes:
            if change.after is None:
                continue
            before = change.before.text if change.before is not None else ""
            old = self.overlay.text_after_command(change.path, before)
            if old == change.after:
                if (broken := syntax_failure(before, old, change.path)) is not None:
                    problems.append(f"{change.path}: {broken.message}")
                continue
            found = validate_change(old, change.after, change.path, self.instruction, complete=complete)
            if isinstance(found, EditFailure):
                problems.append(f"{change.path}: {found.message}")
            elif not complete and found != change.after:
                self.overlay.write(change.path, found)
        return problems

    def run_check(self) -> CompletedCommand:
        """Run the named check on the task's changes so far."""
        check = self.options.check
        self.begin_step(f"run `{check}`")
        result = self.last_check = self.runner.run_check(check)
        self.add_receipt(StepReceipt(f"run {check}", seconds=result.seconds))
        self.note(f"`{check}` {result.describe(self.runner.limits)}", failed=not result.ok)
        return result


class AgentStrategy:
    """How a model works on a task. `run` returns whether the task is done, as far as can be checked."""

    def __init__(self, model: ChatModel) -> None:
        self.model = model

    def run(self, task: TaskState) -> bool:
        raise NotImplementedError

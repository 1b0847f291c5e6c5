"""What every part of a task works with: its options, its changes, its commands, its books.

Holds things together and tells events; decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from keystroke.agent.attempts import Policy
from keystroke.agent.chat import Account, Chat, Message, Receipt, Steering
from keystroke.agent.loop.events import Changed, Doing, Noted, Printed, Sink, Spent, Wrote
from keystroke.agent.sandbox import Ended
from keystroke.agent.tools import Runner, Tool
from keystroke.agent.workspace import Overlay
from keystroke.engine.base import Interrupt


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """What the user asked for besides the instruction."""

    check: str = ""  # a shell line that must pass; naming it is asking for it to be run
    types: str = ""  # likewise, for types
    files: tuple[str, ...] = ()  # what the task is about; empty: the program finds it
    may_run: bool = False  # the model may run commands (each asked for unless approvals say otherwise)
    attempts: int = 1
    policy: Policy = Policy.FIRST
    tries: int = 2  # rounds for one model, each told how the one before failed
    max_tokens: int = 2048
    max_steps: int = 30  # answers of a model with tools
    temperature: float = 0.8
    seed: int = 0
    workers: int = 2  # checks at a time
    dry_run: bool = False
    review: bool = False  # the deep model looks at the diff


@dataclass(slots=True)
class Working:
    """A task under way. `messages` is the conversation so far; `keep` writes the task's record."""

    instruction: str
    options: TaskOptions
    overlay: Overlay
    runner: Runner
    rules: str
    sink: Sink
    interrupt: Interrupt
    steering: Steering
    keep: Callable[[], None]
    account: Account = field(default_factory=Account)
    messages: list[Message] = field(default_factory=list)
    tools: tuple[Tool, ...] = ()  # of the user's own, besides ours
    checked: Ended | None = None  # how the named check ended with the change so far
    failure: str = ""  # what has to be mended of it
    refused: str = ""  # what was wrong with the last answer
    tries: int = 0

    def doing(self, line: str) -> None:
        self.interrupt.check()
        self.sink(Doing(line))

    def note(self, line: str, *, failed: bool = False) -> None:
        self.sink(Noted(line, failed))

    def wrote(self, text: str) -> None:
        self.sink(Wrote(text))

    def printed(self, text: str) -> None:
        self.sink(Printed(text))

    def spent(self, receipt: Receipt) -> None:
        self.account.add(receipt)
        self.sink(Spent(receipt))

    def changed(self) -> None:
        self.sink(Changed(self.overlay.diff()))
        self.keep()

    def check(self) -> Ended:
        """Run the named check on what the task has changed so far."""
        self.doing(f"run `{self.options.check}`")
        ended = self.runner.check(self.options.check)
        self.checked = ended
        self.spent(Receipt(f"run {self.options.check}", seconds=ended.seconds))
        self.note(f"`{self.options.check}` {ended.sentence(self.runner.limits)}", failed=not ended.ok)
        return ended


class Hands:
    """A model at work on a task. `work` returns whether the task is done as far as can be told."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat

    def work(self, task: Working) -> bool:
        raise NotImplementedError


def as_records(messages: list[Message]) -> list[dict[str, Any]]:
    return [dict(message) for message in messages]

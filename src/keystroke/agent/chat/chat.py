"""What a task asks of a model: one answer, or several attempts at one.

An interface and its values. One thread asks; `Steering.say` and interrupts may come from any. A line
said while an answer is being made takes effect at the next token, and what was written so far stays part of
the conversation.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keystroke.agent.attempts import Attempt, Judge, Outcome, Policy
from keystroke.agent.chat.receipt import Price, Receipt
from keystroke.agent.tools import Call
from keystroke.engine.base import Interrupt
from keystroke.engine.generation import Finish

Message = Mapping[str, Any]
SMALL = 3_000_000_000  # parameters; below, a model gets a region to rewrite instead of tools to call


class HandOver(Exception):
    """The user wants the deep model to go on. Not an error: the task catches it."""


class Steering:
    """What the user says while the model works: lines, and that the deep model is to take over."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque()
        self._lock = threading.Lock()
        self._deep = False

    def hand_over(self) -> None:
        """At the next token the deep model takes over, with whatever was said until then."""
        self._deep = True

    def say(self, line: str) -> None:
        with self._lock:
            self._lines.append(line)

    def take(self) -> str | None:
        """The next line, if there is one. Costs nothing while there is none. Raises HandOver, once."""
        if self._deep:
            self._deep = False
            raise HandOver
        if not self._lines:
            return None
        with self._lock:
            return self._lines.popleft() if self._lines else None

    def rest(self) -> list[str]:
        """Every line that nobody has taken yet."""
        with self._lock:
            lines = list(self._lines)
            self._lines.clear()
        return lines


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer. `said` are the messages it adds to the conversation: its own, and between two parts of it
    whatever the user said meanwhile."""

    text: str
    calls: tuple[Call, ...]
    finish: Finish
    said: tuple[Message, ...]
    receipt: Receipt


@dataclass(frozen=True, slots=True)
class Asked:
    """What goes with a question for attempts. `opening` is text that every answer begins with; `prediction`
    is what it will mostly repeat; `retry` makes the conversation that shows a failure to another attempt."""

    messages: Sequence[Message]
    judge: Judge
    attempts: int = 1
    opening: str = ""
    stop: tuple[str, ...] = ()
    prediction: str = ""
    policy: Policy = Policy.FIRST
    max_tokens: int = 2048
    temperature: float = 0.8
    seed: int = 0
    workers: int = 2
    retry: Callable[[Attempt], Sequence[Message] | None] | None = None
    on_attempt: Callable[[Attempt], None] | None = None


@dataclass(slots=True)
class Steered:
    """What was said in the course of attempts: lines of the user, in order."""

    lines: list[str] = field(default_factory=list)


class Chat(ABC):
    """`small` models get a region and no tools."""

    name: str
    small: bool = False
    price: Price = Price()

    @abstractmethod
    def reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        max_tokens: int = 2048,
        interrupt: Interrupt | None = None,
        steering: Steering | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> Reply:
        """One answer. Interrupted, ContextOverflow, and what an engine or a server raises."""

    @abstractmethod
    def attempts(
        self, asked: Asked, *, interrupt: Interrupt | None = None, steering: Steering | None = None
    ) -> tuple[Outcome, Receipt, Steered]:
        """Several attempts at one answer, judged."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Give back what is held. Idempotent."""

"""Who says what an attempt is worth, while it grows and when it has ended.

A protocol and the signs that cross it. Watching happens on the engine's thread, once a step, and must
cost next to nothing; checking may take seconds and happens on threads of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from keystroke.agent.attempts.attempt import Verdict
from keystroke.engine.base import Interrupt


class Go(Enum):
    ON = "on"
    COMPLETE = "complete"  # nothing of use can follow
    HOPELESS = "hopeless"


@dataclass(frozen=True, slots=True)
class Sign:
    go: Go
    reason: str = ""


ON, COMPLETE = Sign(Go.ON), Sign(Go.COMPLETE)
Watch = Callable[[str], Sign]  # hears each new piece of one attempt


class Judge(Protocol):
    def watch(self) -> Watch:
        """A watch for one attempt, from its first character on."""

    def check(self, text: str, interrupt: Interrupt) -> Verdict | None:
        """What a finished attempt is worth; None where there is nothing to check it by. Called on another
        thread, several at a time; ends soon once `interrupt` is set, and what it says then does not count."""

    def key(self, text: str) -> str:
        """Attempts that mean the same have the same key."""

"""The interface that checks attempts, while they are written and when they have finished.

A watch runs on the engine's thread once per step and must be cheap; a check may take seconds and runs on
its own thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from keystroke.agent.attempts.attempt import CheckResult
from keystroke.engine.base import Interrupt


class WatchState(Enum):
    CONTINUE = "on"
    COMPLETE = "complete"  # nothing useful can follow
    HOPELESS = "hopeless"


@dataclass(frozen=True, slots=True)
class WatchResult:
    state: WatchState
    reason: str = ""


CONTINUE, COMPLETE = WatchResult(WatchState.CONTINUE), WatchResult(WatchState.COMPLETE)
AttemptWatch = Callable[[str], WatchResult]  # called with each new piece of one attempt


class AttemptChecker(Protocol):
    def watch(self) -> AttemptWatch:
        """A watch for one attempt, from its first character."""

    def check(self, text: str, interrupt: Interrupt) -> CheckResult | None:
        """Check a finished attempt; None where there is nothing to check it with. Called on other threads,
        several at a time. Returns soon once `interrupt` is set; that result is ignored."""

    def key(self, text: str) -> str:
        """Equivalent attempts have the same key."""

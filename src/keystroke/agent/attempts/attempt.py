"""One attempt at an answer, what its check said, and what came of all of them together.

Values. An attempt is told apart from others by its number; why it ended and why one was taken are named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from keystroke.agent.sandbox import Ended
from keystroke.engine.base import GREEDY, Sampling


class End(StrEnum):
    FINISHED = "finished"
    HOPELESS = "hopeless"  # ended early: nothing that could follow would mend it
    LENGTH = "length"
    BEATEN = "beaten"  # another one had won
    INTERRUPTED = "interrupted"


class Policy(StrEnum):
    """When to stop looking."""

    FIRST = "first"  # the first that passes its check wins and ends the others
    AGREE = "agree"  # all are finished; of those that pass, what most of them agree on


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check said. `score` is the share of it that passed; `message` is what a model can act on;
    `ended` is how the user's own check ended, if it was run."""

    score: float
    message: str = ""
    ended: Ended | None = None

    @property
    def passed(self) -> bool:
        return self.score >= 1.0


@dataclass(slots=True)
class Attempt:
    number: int
    sampling: Sampling = GREEDY
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    prompt: Sequence[int] = ()
    begins: int = 0  # tokens that were written before the user said otherwise
    end: End | None = None
    reason: str = ""  # why it was ended early
    verdict: Verdict | None = None
    seconds: float = 0.0  # from the start of the race to its end or its verdict
    likelihood: float | None = None  # mean log probability of its tokens, asked for only where it decides
    retry_of: int | None = None  # the attempt whose failure it was shown

    @property
    def usable(self) -> bool:
        return self.end is End.FINISHED

    @property
    def score(self) -> float:
        return self.verdict.score if self.verdict is not None else 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """`winner` is None where no attempt came to an end. `why` says in one sentence why it was this one."""

    attempts: tuple[Attempt, ...]
    winner: Attempt | None
    why: str
    seconds: float
    prompt_tokens: int
    prefill_seconds: float
    reused_tokens: int = 0

    @property
    def passed(self) -> bool:
        return self.winner is not None and self.winner.verdict is not None and self.winner.verdict.passed

    @property
    def tokens(self) -> int:
        return sum(len(attempt.tokens) for attempt in self.attempts)

    def report(self) -> str:
        """One line for a person."""
        made = len(self.attempts)
        early = sum(attempt.end is End.HOPELESS for attempt in self.attempts)
        beaten = sum(attempt.end is End.BEATEN for attempt in self.attempts)
        parts = [f"{made} attempt{'s'[: made > 1]}"]
        if early or beaten:
            parts.append(f"{early + beaten} ended early")
        rate = f" ({self.tokens / self.seconds:.0f} a second)" if self.seconds > 0 else ""
        parts += [f"{self.tokens:,} tokens{rate}", f"{self.seconds:.1f} s"]
        taken = f"; number {self.winner.number + 1} was taken: {self.why}" if self.winner else f"; {self.why}"
        return ", ".join(parts) + taken

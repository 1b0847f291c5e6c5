"""One attempt at an answer, the result of its check, and the result of all attempts together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from keystroke.agent.sandbox import CompletedCommand
from keystroke.engine.base import GREEDY, Sampling


class AttemptEnd(StrEnum):
    FINISHED = "finished"
    HOPELESS = "hopeless"  # ended early: no continuation could repair it
    LENGTH = "length"
    BEATEN = "beaten"  # another attempt won
    INTERRUPTED = "interrupted"


class StopPolicy(StrEnum):
    """When to stop sampling."""

    FIRST = "first"  # the first that passes its check wins and ends the others
    AGREE = "agree"  # all finish; of those that pass, the answer most agree on wins


@dataclass(frozen=True, slots=True)
class CheckResult:
    """`score` is the share of the check that passed; `message` is text a model can act on; `command` is the
    result of the user's check command, if it was run."""

    score: float
    message: str = ""
    command: CompletedCommand | None = None

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
    redirected_at: int = 0  # tokens written before the last redirection
    end: AttemptEnd | None = None
    reason: str = ""  # why it was ended early
    check_result: CheckResult | None = None
    seconds: float = 0.0  # from the start of the race to its end or its check
    likelihood: float | None = None  # mean log probability of its tokens, computed only where it decides
    retry_of: int | None = None  # the attempt whose failure its prompt shows

    @property
    def usable(self) -> bool:
        return self.end is AttemptEnd.FINISHED

    @property
    def passed(self) -> bool:
        return self.check_result is not None and self.check_result.passed

    @property
    def score(self) -> float:
        return self.check_result.score if self.check_result is not None else 0.0


@dataclass(frozen=True, slots=True)
class RaceResult:
    """`winner` is None where no attempt finished. `reason` says in one clause why it was selected."""

    attempts: tuple[Attempt, ...]
    winner: Attempt | None
    reason: str
    seconds: float
    prompt_tokens: int
    prefill_seconds: float
    reused_tokens: int = 0

    @property
    def passed(self) -> bool:
        return self.winner is not None and self.winner.passed

    @property
    def tokens(self) -> int:
        return sum(len(attempt.tokens) for attempt in self.attempts)

    def summary(self) -> str:
        """One line for the user."""
        count = len(self.attempts)
        early = sum(attempt.end is AttemptEnd.HOPELESS for attempt in self.attempts)
        beaten = sum(attempt.end is AttemptEnd.BEATEN for attempt in self.attempts)
        parts = [f"{count} attempt{'s'[: count > 1]}"]
        if early or beaten:
            parts.append(f"{early + beaten} ended early")
        rate = f" ({self.tokens / self.seconds:.0f} a second)" if self.seconds > 0 else ""
        parts += [f"{self.tokens:,} tokens{rate}", f"{self.seconds:.1f} s"]
        selected = f"attempt {self.winner.number + 1} was taken: " if self.winner else ""
        return f"{', '.join(parts)}; {selected}{self.reason}"

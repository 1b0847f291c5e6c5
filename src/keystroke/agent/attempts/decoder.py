"""The interface that generates attempts: a decoder reads the shared prompt once and starts streams that step
together. One thread calls it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from keystroke.agent.attempts.attempt import Attempt
from keystroke.engine.base import Interrupt, Sampling
from keystroke.engine.generation import Finish


class AttemptStream(ABC):
    """One attempt as it is generated. `prompt` precedes the answer; `redirected_at` counts the tokens written
    before the last redirection; `text` is the answer since then."""

    prompt: Sequence[int]
    redirected_at: int = 0

    @property
    @abstractmethod
    def text(self) -> str: ...

    @property
    @abstractmethod
    def tokens(self) -> list[int]: ...

    @abstractmethod
    def redirect(self, tokens: Sequence[int]) -> None:
        """End the answer, append `tokens`, and start a new answer after them; computed tokens are kept."""

    @abstractmethod
    def close(self) -> None:
        """Stop generating and release the session. Idempotent."""


AttemptChunk = tuple[AttemptStream, str, Finish | None]


class Decoder(ABC):
    """`width` streams at a time take about as long as two in sequence, or less."""

    width: int
    slows: bool = False  # whether a stream is noticeably slower in company
    context: int
    has_likelihood: bool = False

    @abstractmethod
    def prefill(self, prompt: Sequence[int], interrupt: Interrupt) -> int:
        """Read the shared prompt; returns how many of its tokens were cached. Raises Interrupted, and what an
        engine raises."""

    @abstractmethod
    def start(self, prompt: Sequence[int], sampling: Sampling, *, alone: bool) -> AttemptStream:
        """Start a stream; `alone` where no other runs at the same time. A retry's `prompt` differs from the
        prefilled one; their common prefix is reused."""

    @abstractmethod
    def step(self, streams: Sequence[AttemptStream], timeout: float | None) -> Iterable[AttemptChunk]:
        """The next text of some or all streams, with the reason where one finished. A decoder that waits
        for a scheduler returns nothing after `timeout` seconds. Raises Interrupted."""

    def likelihood(self, attempt: Attempt, interrupt: Interrupt) -> float:
        """The mean log probability of an attempt's tokens. Only where `has_likelihood`."""
        raise NotImplementedError

    @abstractmethod
    def close(self) -> None:
        """Release the prompt. Idempotent."""

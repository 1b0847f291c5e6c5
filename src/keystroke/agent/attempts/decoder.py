"""What writes attempts: an engine driven from here, or whatever else can write several texts at once.

An interface. One thread calls it. A decoder reads the shared prompt once; writers come of it, step
together, can be turned in mid-answer with all they computed kept, and give everything back when closed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from keystroke.agent.attempts.attempt import Attempt
from keystroke.engine.base import Interrupt, Sampling
from keystroke.engine.generation import Finish


class Writer(ABC):
    """One attempt as it is written. `prompt` is what its answer stands behind, `begins` how many of its
    tokens were written before it was turned, `text` the answer since then."""

    prompt: Sequence[int]
    begins: int = 0

    @property
    @abstractmethod
    def text(self) -> str: ...

    @property
    @abstractmethod
    def tokens(self) -> list[int]: ...

    @abstractmethod
    def turn(self, tokens: Sequence[int]) -> None:
        """End the answer where it is, say `tokens`, and begin it anew; what was computed is kept."""

    @abstractmethod
    def close(self) -> None:
        """Stop writing and give back what is held. Idempotent."""


Piece = tuple[Writer, str, Finish | None]


class Decoder(ABC):
    """`width` writers at a time cost about as much as one. `scores`: likelihoods can be asked for."""

    width: int
    context: int
    scores: bool = False

    @abstractmethod
    def read(self, prompt: Sequence[int], interrupt: Interrupt) -> int:
        """Read the prompt that attempts share; how many of its tokens were known already. Interrupted, and
        what an engine raises."""

    @abstractmethod
    def begin(self, prompt: Sequence[int], sampling: Sampling, *, alone: bool) -> Writer:
        """A writer; `alone` where no other will write at the same time."""

    @abstractmethod
    def step(self, writers: Sequence[Writer], patience: float | None) -> Iterable[Piece]:
        """What some or all of `writers` wrote next, and why one ended. A decoder that waits for others comes
        back empty-handed after `patience` seconds, if there is a limit. Interrupted."""

    def likelihood(self, attempt: Attempt, interrupt: Interrupt) -> float:
        """The mean log probability of an attempt's tokens, of a decoder that `scores`."""
        raise NotImplementedError

    @abstractmethod
    def close(self) -> None:
        """Give back what is held for the prompt. Idempotent."""

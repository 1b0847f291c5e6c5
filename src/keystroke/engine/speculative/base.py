"""The interface of drafters, which propose tokens for the engine to verify in one step.

A drafter never changes what is generated, only how many steps that takes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from keystroke.engine.base import Sampling

MAX_DRAFT = 32  # tokens; beyond this no engine verifies for less than it decodes


class Drafter(ABC):
    # The evidence for the last proposal, such as how many tokens matched. `AdaptiveDrafter` learns how often
    # proposals of a given strength are accepted.
    strength: int = 0

    @abstractmethod
    def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        """At most `limit` tokens that may follow `tokens`, the whole sequence so far. Empty: no proposal."""

    def set_sampling(self, sampling: Sampling) -> None:  # noqa: B027 - optional
        """The sampling of the next sequence, for drafters that sample themselves."""

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a sequence. A drafter may serve many in turn, and learn from all of them."""
        self.observe(prompt)

    def observe(self, tokens: Sequence[int]) -> None:  # noqa: B027 - optional
        """Add tokens to the sequence."""

    def record_result(self, drafted: int, accepted: int, seconds: float) -> None:  # noqa: B027 - optional
        """Report how much of the last proposal was accepted and how long the step took. Called after every
        step, also those without a draft, before `observe`."""

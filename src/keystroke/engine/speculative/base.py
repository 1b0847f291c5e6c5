"""What a drafter is: a guess at the tokens to come, checked by the engine in one step.

A drafter may be wrong at no cost but time. It sees tokens, never text, and it can never change
what is generated, only how many steps that takes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from keystroke.engine.base import Sampling

MAX_DRAFT = 32  # tokens; beyond this no engine verifies for less than it decodes


class Drafter(ABC):
    # How much spoke for the last proposal (say, how many tokens matched): proposals of like strength tend to
    # do alike, which is what `AdaptiveDrafter` learns from.
    strength: int = 0

    @abstractmethod
    def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        """At most `limit` tokens guessed to follow `tokens`, the whole sequence so far. Empty: no guess."""

    def choose_by(self, sampling: Sampling) -> None:  # noqa: B027 - optional
        """How the sequence about to begin chooses its tokens: a drafter that chooses does the same."""

    def begin(self, prompt: Sequence[int]) -> None:
        """A sequence begins. A drafter may serve many, one after the other, and learn from all of them."""
        self.observe(prompt)

    def observe(self, tokens: Sequence[int]) -> None:  # noqa: B027 - optional
        """Tokens newly part of the sequence."""

    def verified(self, drafted: int, accepted: int, seconds: float) -> None:  # noqa: B027 - optional
        """What became of the last proposal: how much of it was right, and how long the step took.
        Called after every step, also those without a draft, before `observe`."""

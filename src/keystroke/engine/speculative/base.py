"""What a drafter is: a guess at the tokens to come, checked by the engine in one step.

Law: a drafter may be wrong at no cost but time. It sees tokens, never text, and it can never change
what is generated, only how many steps that takes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class Drafter(ABC):
    @abstractmethod
    def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        """At most `limit` tokens guessed to follow `tokens`, the whole sequence so far. Empty: no guess."""

    def observe(self, tokens: Sequence[int]) -> None:  # noqa: B027 - optional
        """Tokens newly part of the sequence. The first call brings the prompt."""

    def verified(self, drafted: int, accepted: int, seconds: float) -> None:  # noqa: B027 - optional
        """What became of the last proposal: how much of it was right, and how long the step took.
        Called after every step, also those without a draft, before `observe`."""

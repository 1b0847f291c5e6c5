"""Several drafters in order of preference: the first that has a guess is heard.

Every drafter sees the whole sequence; only the one that spoke hears what became of its draft.
"""

from __future__ import annotations

from collections.abc import Sequence

from keystroke.engine.base import Sampling
from keystroke.engine.speculative.base import Drafter


class CombinedDrafter(Drafter):
    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = tuple(drafters)
        self.speaker: int | None = None  # which drafter made the last proposal

    def choose_by(self, sampling: Sampling) -> None:
        for drafter in self._drafters:
            drafter.choose_by(sampling)

    def begin(self, prompt: Sequence[int]) -> None:
        for drafter in self._drafters:
            drafter.begin(prompt)

    def observe(self, tokens: Sequence[int]) -> None:
        for drafter in self._drafters:
            drafter.observe(tokens)

    def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        for index, drafter in enumerate(self._drafters):
            draft = drafter.propose(tokens, limit)
            if len(draft):
                self.speaker = index
                self.strength = drafter.strength
                return draft
        self.speaker = None
        return ()

    def verified(self, drafted: int, accepted: int, seconds: float) -> None:
        if self.speaker is not None:
            self._drafters[self.speaker].verified(drafted, accepted, seconds)

"""Several drafters in order of preference: the first that has a proposal is used.

Every drafter observes the whole sequence; only the one whose draft was used receives its result.
"""

from __future__ import annotations

from collections.abc import Sequence

from keystroke.engine.base import Sampling
from keystroke.engine.speculative.base import Drafter


class CombinedDrafter(Drafter):
    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = tuple(drafters)
        self.chosen_index: int | None = None  # which drafter made the last proposal

    def set_sampling(self, sampling: Sampling) -> None:
        for drafter in self._drafters:
            drafter.set_sampling(sampling)

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
                self.chosen_index = index
                self.strength = drafter.strength
                return draft
        self.chosen_index = None
        return ()

    def record_result(self, drafted: int, accepted: int, seconds: float) -> None:
        if self.chosen_index is not None:
            self._drafters[self.chosen_index].record_result(drafted, accepted, seconds)

"""Drafts from the engine itself, such as those of a draft head, computed after its last step.

Tracks how many guesses are accepted. If they cost more than they save, it stops asking for a while, and the
engine then computes none.
"""

from __future__ import annotations

from collections.abc import Sequence

from keystroke.engine.base import Engine
from keystroke.engine.speculative.base import Drafter

_LEAST = 0.35  # mean accepted tokens per guess, below which guesses do not pay
_HOPED = 0.35  # how far above that another attempt starts
_PACE = 0.05
_REST = 64  # proposals


class EngineDrafter(Drafter):
    """Its drafts are used whole or not at all: the engine may already be verifying one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._accepted = 2.0  # running mean per guess
        self._resting = 0
        self._least = _LEAST
        self.ahead = False  # whether the engine is already verifying the last proposal

    def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        if self._is_resting():
            return ()
        guess = self._engine.guess(tokens)
        if guess is None or limit < 1:
            return ()
        self.strength = len(guess.tokens)  # the engine ends a guess when it becomes unlikely
        self.ahead = guess.ahead
        return guess.tokens[:limit]

    @property
    def seconds(self) -> float:
        """The time of a guess."""
        return self._engine.guess_seconds

    def require(self, accepted: float) -> None:
        """Guesses pay if so many tokens of each are accepted on average."""
        self._least = max(_LEAST, accepted)

    def keep_up(self, tokens: Sequence[int]) -> None:
        """Tell the engine that another drafter is used this time, so that it prepares for the next step."""
        if not self._is_resting():
            self._engine.guess(tokens, wanted=False)

    def record_result(self, drafted: int, accepted: int, seconds: float) -> None:
        self._accepted += _PACE * (accepted - self._accepted)
        if self._accepted < self._least:
            self._accepted, self._resting = self._least + _HOPED, _REST

    def _is_resting(self) -> bool:
        self._resting -= self._resting > 0
        return self._resting > 0

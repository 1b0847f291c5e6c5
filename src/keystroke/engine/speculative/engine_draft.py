"""The engine's own guesses, made behind its last step while the caller was busy with that.

Asks the engine and keeps a record of what came true. Where guesses do not pay for the time they take,
it stops asking for a while, and the engine then spends none on them.
"""

from __future__ import annotations

from collections.abc import Sequence

from keystroke.engine.base import Engine
from keystroke.engine.speculative.base import Drafter

_LEAST = 0.35  # tokens accepted of a guess, on average, below which it costs more than it brings
_HOPED = 0.7  # what another try begins with
_PACE = 0.05
_REST = 64  # proposals


class EngineDrafter(Drafter):
    """Its drafts are taken whole or not at all: the engine may be verifying one already."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._accepted = 2.0  # of a guess, a running mean
        self._resting = 0
        self.ahead = False  # whether the last proposal is being verified already

    def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        if self._rests():
            return ()
        guess = self._engine.guess(tokens)
        if guess is None or limit < 1:
            return ()
        self.strength = len(guess.tokens)  # a guess goes on as long as it is likely
        self.ahead = guess.ahead
        return guess.tokens[:limit]

    def follow(self, tokens: Sequence[int]) -> None:
        """Somebody else is heard this time: the engine shall keep up, and need not guess."""
        if not self._rests():
            self._engine.guess(tokens, wanted=False)

    def verified(self, drafted: int, accepted: int, seconds: float) -> None:
        self._accepted += _PACE * (accepted - self._accepted)
        if self._accepted < _LEAST:
            self._accepted, self._resting = _HOPED, _REST

    def _rests(self) -> bool:
        self._resting -= self._resting > 0
        return self._resting > 0

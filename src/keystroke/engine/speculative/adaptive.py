"""How long a draft is worth its verification.

Law: knows a table of costs (what verifying n rows takes, in single-row steps) and learns how often drafts of
each strength come true. It drafts what promises the most tokens per second, and it keeps an account: a draft
may cost at most what earlier drafts have gained plus a small allowance, so text that nobody can predict is
decoded at about its plain speed.
"""

from __future__ import annotations

from collections.abc import Sequence

from keystroke.engine.speculative.base import Drafter
from keystroke.engine.speculative.combined import CombinedDrafter

ALLOWANCE = 0.012  # of each plain step, saved up for trying: the most that hopeless drafting can cost
OPENING = 3.0  # steps an account starts with, for a first try
SAVINGS = 24.0  # the most that gains are remembered
_DECAY = 0.9
_FORGET = 0.98
_PRIOR_WEIGHT = 2.0
_HOPED = 0.8  # what a try assumes of its draft, and so how long it is


class AdaptiveDrafter(Drafter):
    """`cost[n]` is the time of a step over n rows, in steps over one; see `measure_verify_cost`.
    Serves many sequences one after the other and keeps what it learned."""

    def __init__(self, drafters: Sequence[Drafter], cost: Sequence[float]) -> None:
        self._inner = CombinedDrafter(drafters)
        self._cost = tuple(cost)
        self._longest = len(self._cost) - 2  # a draft of n tokens is a step over n + 1 rows
        self._account = OPENING
        self._hits: dict[tuple[int, int], float] = {}
        self._misses: dict[tuple[int, int], float] = {}
        self._asked: tuple[int, int] | None = None

    def begin(self, prompt: Sequence[int]) -> None:
        self._inner.begin(prompt)

    def observe(self, tokens: Sequence[int]) -> None:
        self._inner.observe(tokens)

    def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        self._asked = None
        affordable = self._affordable(min(limit, self._longest))
        if affordable < 1:
            return ()
        draft = self._inner.propose(tokens, affordable)
        if self._inner.speaker is None:
            return ()
        self._asked = (self._inner.speaker, _bucket(self._inner.strength))
        length = self._best(self.likelihood(*self._asked), len(draft))
        if length == 0 and self._account >= OPENING:  # enough is saved to see whether it would do better now
            length = self._best(_HOPED, len(draft))
        return draft[:length]

    def verified(self, drafted: int, accepted: int, seconds: float) -> None:
        key = self._asked
        if drafted == 0 or key is None:
            self._account = min(self._account + ALLOWANCE, SAVINGS)
            if key is not None:  # a draft was held back: slowly forget why, so that it is tried again
                self._hits[key] = self._hits.get(key, 0.0) * _FORGET
                self._misses[key] = self._misses.get(key, 0.0) * _FORGET
            return
        self._account = min(self._account + accepted + 1 - self._cost[drafted + 1], SAVINGS)
        self._hits[key] = self._hits.get(key, 0.0) * _DECAY + accepted
        self._misses[key] = self._misses.get(key, 0.0) * _DECAY + (accepted < drafted)
        self._inner.verified(drafted, accepted, seconds)

    def likelihood(self, speaker: int, bucket: int) -> float:
        """How likely the next drafted token is right, given that those before it were."""
        prior = _PRIOR[bucket]
        hits = self._hits.get((speaker, bucket), 0.0) + _PRIOR_WEIGHT * prior
        misses = self._misses.get((speaker, bucket), 0.0) + _PRIOR_WEIGHT * (1.0 - prior)
        return hits / (hits + misses)

    def _affordable(self, limit: int) -> int:
        """The longest draft whose total loss the account can bear."""
        length = 0
        while length < limit and self._cost[length + 2] - 1.0 <= self._account:
            length += 1
        return length

    def _best(self, likelihood: float, limit: int) -> int:
        """The length with the most expected tokens per second; 0 where none beats plain steps."""
        best, best_rate = 0, 1.0
        expected, power = 1.0, 1.0
        for length in range(1, limit + 1):
            power *= likelihood
            expected += power
            rate = expected / self._cost[length + 1]
            if rate > best_rate:
                best, best_rate = length, rate
        return best


# What to expect of a draft by the bucket of its strength, before anything is learned.
_PRIOR = (0.5, 0.6, 0.75, 0.85, 0.92, 0.96)


def _bucket(strength: int) -> int:
    """0, 1-2, 3-4, 5-8, 9-16, more."""
    return 0 if strength <= 0 else min(max((strength - 1).bit_length(), 1), 5)

"""How long a draft is worth its verification.

Knows a table of costs (what verifying n rows takes, in single-row steps) and learns how often drafts of
each strength come true. It drafts what promises the most tokens per second, and it keeps an account: a draft
may cost at most what earlier drafts have gained plus a small allowance, so text that nobody can predict is
decoded at about its plain speed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from keystroke.engine.base import Engine, Sampling
from keystroke.engine.speculative.base import Drafter
from keystroke.engine.speculative.combined import CombinedDrafter
from keystroke.engine.speculative.cost import verify_cost
from keystroke.engine.speculative.draft_model import ModelDrafter
from keystroke.engine.speculative.engine_draft import EngineDrafter
from keystroke.engine.speculative.file_draft import FileDrafter
from keystroke.engine.speculative.suffix_automaton import SuffixDrafter

ALLOWANCE = 0.012  # of each plain step, saved up for trying: the most that hopeless drafting can cost
OPENING = 3.0  # steps an account starts with, for a first try
SAVINGS = 24.0  # the most that gains are remembered
_DECAY = 0.9
_FORGET = 0.98
_PRIOR_WEIGHT = 2.0
_PACE = 0.1
_UNIT_EVERY = 64
_ENGINE = -1  # stands for the engine's own guesses where a drafter's index is expected
_ENGINES_MOST = 6  # tokens that such a guess has, at most
_HOPED = 0.8  # what a try assumes of its draft, and so how long it is


class AdaptiveDrafter(Drafter):
    """`cost[n]` is the time of a step over n rows, in steps over one; see `measure_verify_cost`.
    Serves many sequences one after the other and keeps what it learned."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        cost: Sequence[float],
        engine: EngineDrafter | None = None,
    ) -> None:
        """The engine's guess is compared with the first drafter's; the likelier is used."""
        self._inner = CombinedDrafter(drafters)
        self._engine = engine
        self._cost = tuple(cost)
        self._clock = _Clock(self._cost, _UNIT_EVERY if engine is None else 8 * _UNIT_EVERY)
        self._longest = len(self._cost) - 2  # a draft of n tokens is a step over n + 1 rows
        self._account = OPENING
        self._hits: dict[tuple[int, int], float] = {}
        self._misses: dict[tuple[int, int], float] = {}
        self._asked: tuple[int, int] | None = None

    def hear(self, engine: Engine) -> None:
        """Compare with the guesses of `engine` from now on, if it makes any: for who was made elsewhere."""
        self._engine = EngineDrafter(engine) if engine.drafts else None

    def choose_by(self, sampling: Sampling) -> None:
        self._inner.choose_by(sampling)

    def begin(self, prompt: Sequence[int]) -> None:
        self._inner.begin(prompt)

    def observe(self, tokens: Sequence[int]) -> None:
        self._inner.observe(tokens)

    def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        self._asked = None
        if self._clock.wants_a_plain_step:
            return ()
        affordable = self._affordable(min(limit, self._longest))
        if affordable < 1:
            return ()
        draft = self._inner.propose(tokens, affordable)
        length, rate = 0, 1.0
        if self._inner.speaker is not None:
            self._asked = (self._inner.speaker, _bucket(self._inner.strength))
            length, rate = self._best(self.likelihood(*self._asked), len(draft))
        if self._engine is not None and (guess := self._engines(self._engine, tokens, limit, rate)):
            return guess
        if self._asked is None:
            return ()
        if length == 0 and self._account >= OPENING:  # enough is saved to see whether it would do better now
            length, _ = self._best(_HOPED, len(draft))
        return draft[:length]

    def _engines(
        self, engine: EngineDrafter, tokens: Sequence[int], limit: int, rate: float
    ) -> Sequence[int]:
        """What the engine guesses, if that promises more than `rate`; not asked where it cannot."""
        if rate >= (1 + _ENGINES_MOST) / self._clock.cost(1 + _ENGINES_MOST):
            engine.follow(tokens)
            return ()
        guess = engine.propose(tokens, limit)
        if not guess:
            return ()
        key = (_ENGINE, _bucket(engine.strength))
        promised = self._promised(self.likelihood(*key), len(guess))
        if promised <= (
            rate / 2.0 if engine.ahead else rate
        ):  # what is under way would be a step for nothing
            return ()
        self._asked = key
        return guess

    def verified(self, drafted: int, accepted: int, seconds: float) -> None:
        self._clock.saw(drafted + 1, seconds)
        key = self._asked
        if drafted == 0 or key is None:
            self._account = min(self._account + ALLOWANCE, SAVINGS)
            if key is not None:  # a draft was held back: slowly forget why, so that it is tried again
                self._hits[key] = self._hits.get(key, 0.0) * _FORGET
                self._misses[key] = self._misses.get(key, 0.0) * _FORGET
            return
        self._account = min(self._account + accepted + 1 - self._clock.cost(drafted + 1), SAVINGS)
        self._hits[key] = self._hits.get(key, 0.0) * _DECAY + accepted
        self._misses[key] = self._misses.get(key, 0.0) * _DECAY + (accepted < drafted)
        if key[0] == _ENGINE and self._engine is not None:
            self._engine.verified(drafted, accepted, seconds)
        else:
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
        while length < limit and self._clock.cost(length + 2) - 1.0 <= self._account:
            length += 1
        return length

    def _promised(self, likelihood: float, length: int) -> float:
        """Expected tokens of a draft of this length, in the time of a plain step."""
        return sum(likelihood**i for i in range(length + 1)) / self._clock.cost(length + 1)

    def _best(self, likelihood: float, limit: int) -> tuple[int, float]:
        """The length with the most expected tokens per second, and how many plain steps that is worth; 0
        where none beats those."""
        best, best_rate = 0, 1.0
        expected, power = 1.0, 1.0
        for length in range(1, limit + 1):
            power *= likelihood
            expected += power
            rate = expected / self._clock.cost(length + 1)
            if rate > best_rate:
                best, best_rate = length, rate
        return best, best_rate


class _Clock:
    """Corrects the table of costs by what steps take here and now. A step held up by something else counts
    for little: each observation is bounded and moves its estimate by a tenth."""

    def __init__(self, table: tuple[float, ...], every: int) -> None:
        self._table = table
        self._every = every
        self.unit = 0.0  # seconds of a step over one row
        self._scale: dict[int, float] = {}  # real cost against the table's, by size of step
        self._latest = 1.0  # for sizes not seen yet
        self._since = 0  # steps since the unit was seen

    @property
    def wants_a_plain_step(self) -> bool:
        """Whether it is time to see again what one row takes."""
        return self._since > self._every or (self._since > 1 and not self.unit)

    def cost(self, rows: int) -> float:
        if rows < 2:
            return self._table[rows]
        return max(1.0, self._table[rows] * self._scale.get(rows.bit_length(), self._latest))

    def saw(self, rows: int, seconds: float) -> None:
        if seconds <= 0.0 or rows >= len(self._table):
            return
        self._since = 0 if rows == 1 else self._since + 1
        if rows == 1:
            self.unit += _PACE * (min(seconds, 3.0 * self.unit) - self.unit) if self.unit else seconds
        elif self.unit:
            known = self._scale.get(rows.bit_length(), self._latest)
            ratio = min(max(seconds / self.unit / self._table[rows], known / 8.0), known * 8.0)
            self._latest = self._scale[rows.bit_length()] = known + _PACE * (ratio - known)


# What to expect of a draft by the bucket of its strength, before anything is learned.
_PRIOR = (0.5, 0.6, 0.75, 0.85, 0.92, 0.96)


def _bucket(strength: int) -> int:
    """0, 1-2, 3-4, 5-8, 9-16, more."""
    return 0 if strength <= 0 else min(max((strength - 1).bit_length(), 1), 5)


def guesses_of(engine: Engine) -> AdaptiveDrafter | None:
    """A drafter over the engine's own guesses alone, which learns nothing of the prompt; None if it makes
    none."""
    return AdaptiveDrafter((), verify_cost(engine), EngineDrafter(engine)) if engine.drafts else None


def drafter_for(
    engine: Engine,
    source: Sequence[int] | None = None,
    history: Iterable[Sequence[int]] = (),
    draft: Engine | None = None,
) -> AdaptiveDrafter:
    """The drafter for `engine`: first the original file, where the answer is an edit of one (`source`),
    then what was seen before: in the prompt, in `history` and in the answer itself; then what the smaller
    model `draft` would say, if there is one. Where the engine guesses by itself, the likelier of the two."""
    drafters: list[Drafter] = [SuffixDrafter(history)]
    if draft is not None:
        drafters.append(ModelDrafter.shared(draft, engine))
    if source:
        drafters.insert(0, FileDrafter(source))
    own = EngineDrafter(engine) if engine.drafts else None
    return AdaptiveDrafter(drafters, verify_cost(engine), own)

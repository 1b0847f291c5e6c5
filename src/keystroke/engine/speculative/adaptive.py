"""Chooses the draft length with the most expected tokens per second.

Uses the cost of verifying n rows and the acceptance rate of drafts of each strength. A budget limits losses:
a draft may cost at most what earlier drafts saved plus a small allowance, so that unpredictable text is
decoded at about plain speed.
"""

from __future__ import annotations

from collections.abc import Sequence

from keystroke.engine.base import Engine, Sampling
from keystroke.engine.speculative.base import Drafter
from keystroke.engine.speculative.combined import CombinedDrafter
from keystroke.engine.speculative.cost import verify_cost
from keystroke.engine.speculative.draft_model import ModelDrafter
from keystroke.engine.speculative.engine_draft import EngineDrafter
from keystroke.engine.speculative.file_draft import FileDrafter
from keystroke.engine.speculative.suffix_automaton import SuffixDrafter

ALLOWANCE = 0.012  # of each plain step, added to the budget: the most that useless drafts can cost
INITIAL_BUDGET = 3.0  # steps of budget at the start, for a first attempt
LARGEST_BUDGET = 24.0  # largest budget in steps
_DECAY = 0.9
_FORGET = 0.98
_PRIOR_WEIGHT = 2.0
_PACE = 0.1
_UNIT_EVERY = 64
_ENGINE = -1  # stands for the engine's own guesses where a drafter's index is expected
_LONGEST_GUESS = 6  # longest guess of an engine, in tokens
_ASSUMED = 0.8  # acceptance rate that an attempt assumes


class AdaptiveDrafter(Drafter):
    """`cost[n]` is the time of a step over n rows relative to one row; see `measure_verify_cost`. Serves many
    sequences in turn, and keeps what it learned."""

    def __init__(
        self, drafters: Sequence[Drafter], cost: Sequence[float], engine: EngineDrafter | None = None
    ) -> None:
        """The engine's guess is compared with the first drafter's; the likelier is used."""
        self._inner = CombinedDrafter(drafters)
        self._engine = engine
        table = tuple(cost)
        self._costs = _StepCosts(table, _UNIT_EVERY if engine is None else 8 * _UNIT_EVERY)
        self._longest = len(table) - 2  # a draft of n tokens is a step over n + 1 rows
        self._budget = INITIAL_BUDGET
        self._hits: dict[tuple[int, int], float] = {}
        self._misses: dict[tuple[int, int], float] = {}
        self._proposed: tuple[int, int] | None = None

    def use_engine(self, engine: Engine) -> None:
        """Use the guesses of `engine`, if it makes any. For a drafter that was created in another process."""
        self._engine = EngineDrafter(engine) if engine.drafts else None

    def set_sampling(self, sampling: Sampling) -> None:
        self._inner.set_sampling(sampling)

    def begin(self, prompt: Sequence[int]) -> None:
        self._inner.begin(prompt)

    def observe(self, tokens: Sequence[int]) -> None:
        self._inner.observe(tokens)

    def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        self._proposed = None
        if self._costs.needs_plain_step:
            return ()
        affordable = self._affordable(min(limit, self._longest))
        if affordable < 1:
            return ()
        draft = self._inner.propose(tokens, affordable)
        length, rate = 0, 1.0
        if self._inner.chosen_index is not None:
            self._proposed = (self._inner.chosen_index, _bucket(self._inner.strength))
            length, rate = self._best(self.likelihood(*self._proposed), len(draft))
        if self._engine is not None and (guess := self._engine_guess(self._engine, tokens, limit, rate)):
            return guess
        if self._proposed is None:
            return ()
        if length == 0 and self._budget >= INITIAL_BUDGET:  # there is budget for another attempt
            length, _ = self._best(_ASSUMED, len(draft))
        return draft[:length]

    def _engine_guess(
        self, engine: EngineDrafter, tokens: Sequence[int], limit: int, rate: float
    ) -> Sequence[int]:
        """The engine's guess if it promises more than `rate`; not requested if it cannot."""
        if rate >= (1 + _LONGEST_GUESS) / self._costs.cost(1 + _LONGEST_GUESS):
            engine.keep_up(tokens)
            return ()
        guess = engine.propose(tokens, limit)
        if not guess:
            return ()
        key = (_ENGINE, _bucket(engine.strength))
        promised = self._expected_rate(self.likelihood(*key), len(guess), self._guess_cost(engine))
        # Another draft would waste the step that the engine has already started.
        if promised <= (rate / 2.0 if engine.ahead else rate):
            return ()
        self._proposed = key
        return guess

    def record_result(self, drafted: int, accepted: int, seconds: float) -> None:
        self._costs.record(drafted + 1, seconds)
        key = self._proposed
        if drafted == 0 or key is None:
            self._budget = min(self._budget + ALLOWANCE, LARGEST_BUDGET)
            if key is not None:  # the draft was withheld: decay its record, so that it is tried again
                self._hits[key] = self._hits.get(key, 0.0) * _FORGET
                self._misses[key] = self._misses.get(key, 0.0) * _FORGET
            return
        self._budget = min(self._budget + accepted + 1 - self._costs.cost(drafted + 1), LARGEST_BUDGET)
        self._hits[key] = self._hits.get(key, 0.0) * _DECAY + accepted
        self._misses[key] = self._misses.get(key, 0.0) * _DECAY + (accepted < drafted)
        if key[0] == _ENGINE and self._engine is not None:
            if extra := self._guess_cost(self._engine):
                self._engine.require(self._costs.cost(drafted + 1) - 1.0 + extra)
            self._engine.record_result(drafted, accepted, seconds)
        else:
            self._inner.record_result(drafted, accepted, seconds)

    def likelihood(self, index: int, bucket: int) -> float:
        """The probability that the next drafted token is accepted if those before it were."""
        prior = _PRIOR[bucket]
        hits = self._hits.get((index, bucket), 0.0) + _PRIOR_WEIGHT * prior
        misses = self._misses.get((index, bucket), 0.0) + _PRIOR_WEIGHT * (1.0 - prior)
        return hits / (hits + misses)

    def _affordable(self, limit: int) -> int:
        """The longest draft whose total loss the budget covers."""
        length = 0
        while length < limit and self._costs.cost(length + 2) - 1.0 <= self._budget:
            length += 1
        return length

    def _expected_rate(self, likelihood: float, length: int, extra: float = 0.0) -> float:
        """Expected tokens of a draft of this length, per time of a plain step; `extra`: of making it."""
        return sum(likelihood**i for i in range(length + 1)) / (self._costs.cost(length + 1) + extra)

    def _guess_cost(self, engine: EngineDrafter) -> float:
        """The time of the engine's guesses, in plain steps."""
        return engine.seconds / self._costs.unit if self._costs.unit else 0.0

    def _best(self, likelihood: float, limit: int) -> tuple[int, float]:
        """The length with the most expected tokens per second, and that rate relative to plain steps; length
        0 if plain steps are faster."""
        best, best_rate = 0, 1.0
        expected, power = 1.0, 1.0
        for length in range(1, limit + 1):
            power *= likelihood
            expected += power
            rate = expected / self._costs.cost(length + 1)
            if rate > best_rate:
                best, best_rate = length, rate
        return best, best_rate


class _StepCosts:
    """Corrects the table of costs by the measured time of steps. Each measurement is bounded and moves its
    estimate by a tenth, so that a delayed step has little effect."""

    def __init__(self, table: tuple[float, ...], every: int) -> None:
        self._table = table
        self._every = every
        self.unit = 0.0  # seconds of a step over one row
        self._scale: dict[int, float] = {}  # measured cost relative to the table, by size class
        self._latest = 1.0  # for sizes not measured yet
        self._since = 0  # steps since the unit was measured

    @property
    def needs_plain_step(self) -> bool:
        """Whether it is time to measure a step over one row again."""
        return self._since > self._every or (self._since > 1 and not self.unit)

    def cost(self, rows: int) -> float:
        if rows < 2:
            return self._table[rows]
        return max(1.0, self._table[rows] * self._scale.get(rows.bit_length(), self._latest))

    def record(self, rows: int, seconds: float) -> None:
        if seconds <= 0.0 or rows >= len(self._table):
            return
        self._since = 0 if rows == 1 else self._since + 1
        if rows == 1:
            self.unit += _PACE * (min(seconds, 3.0 * self.unit) - self.unit) if self.unit else seconds
        elif self.unit:
            known = self._scale.get(rows.bit_length(), self._latest)
            ratio = min(max(seconds / self.unit / self._table[rows], known / 8.0), known * 8.0)
            self._latest = self._scale[rows.bit_length()] = known + _PACE * (ratio - known)


# Assumed acceptance rate by bucket of strength, before anything is learned.
_PRIOR = (0.5, 0.6, 0.75, 0.85, 0.92, 0.96)


def _bucket(strength: int) -> int:
    """0, 1-2, 3-4, 5-8, 9-16, more."""
    return 0 if strength <= 0 else min(max((strength - 1).bit_length(), 1), 5)


def engine_drafter(engine: Engine) -> AdaptiveDrafter | None:
    """A drafter that uses only the engine's own guesses; None if it makes none."""
    return AdaptiveDrafter((), verify_cost(engine), EngineDrafter(engine)) if engine.drafts else None


def drafter_for(
    engine: Engine, source: Sequence[int] | None = None, draft: Engine | None = None
) -> AdaptiveDrafter:
    """The drafter for `engine`. Drafts come from the original file if the answer is an edit of one
    (`source`), else from repetitions in the prompt and in the answer, else from the smaller model `draft`.
    They are compared with the engine's own guess, if it has one, and the likelier is used."""
    drafters: list[Drafter] = [SuffixDrafter()]
    if draft is not None:
        drafters.append(ModelDrafter.shared(draft, engine))
    if source:
        drafters.insert(0, FileDrafter(source))
    own = EngineDrafter(engine) if engine.drafts else None
    return AdaptiveDrafter(drafters, verify_cost(engine), own)

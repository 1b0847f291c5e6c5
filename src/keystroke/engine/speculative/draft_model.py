"""A smaller model of the same vocabulary drafts for a larger one.

It samples with the same noise at the same positions as the large model, so that both choose the same token
wherever their distributions rank it first. A paced drafter limits its drafts to the length that pays, from
the measured time of its steps and of a verification, and its acceptance rate.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

from keystroke.engine.base import GREEDY, Engine, Sampling, Session
from keystroke.engine.speculative.base import MAX_DRAFT, Drafter
from keystroke.errors import ContextOverflow, NotEnoughMemory, UsageError

_ASSUMED = 0.8  # assumed acceptance rate before anything is measured
_RATE = 0.05
_RETRY = 64  # proposals withheld before the next attempt

# One session per draft engine serves all answers; it reuses their common prefixes.
_sessions: WeakKeyDictionary[Engine, Session] = WeakKeyDictionary()


class ModelDrafter(Drafter):
    def __init__(
        self,
        engine: Engine,
        target: Engine,
        sampling: Sampling = GREEDY,
        *,
        session: Session | None = None,
        paced: bool = False,
    ) -> None:
        check_draft(engine, target)
        self._session = session or engine.session()
        self._sampling = sampling
        self._paced = paced
        self._eos = engine.info.eos
        self._acceptance = _ASSUMED
        self._step_seconds = 0.0  # seconds for each token drafted
        self._verify_seconds = 0.0  # seconds for a verification
        self._withheld = 0

    @classmethod
    def shared(cls, engine: Engine, target: Engine) -> ModelDrafter:
        """A paced drafter over the one session that `engine` keeps for drafting; never close it."""
        if engine not in _sessions:
            _sessions[engine] = engine.session()
        return cls(engine, target, session=_sessions[engine], paced=True)

    def set_sampling(self, sampling: Sampling) -> None:
        self._sampling = replace(sampling, logprobs=None)  # drafts need none

    def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        limit = self._best_length(limit) if self._paced else limit
        if limit == 0:
            return ()
        draft: list[int] = []
        started = time.perf_counter()
        try:
            self._session.extend(tokens)
            while len(draft) < limit:
                draft.extend(self._session.step((), self._sampling).tokens)
                if draft[-1] in self._eos:
                    break
        except (ContextOverflow, NotEnoughMemory):
            pass  # the small model may have less room; continue without its draft
        if draft:
            self._step_seconds = _running_mean(
                self._step_seconds, (time.perf_counter() - started) / len(draft)
            )
        return draft

    def record_result(self, drafted: int, accepted: int, seconds: float) -> None:
        self._verify_seconds = _running_mean(self._verify_seconds, seconds)
        for right in [1.0] * accepted + [0.0] * (accepted < drafted):
            self._acceptance += _RATE * (right - self._acceptance)

    def close(self) -> None:
        self._session.close()

    def _best_length(self, limit: int) -> int:
        """The draft length with the most expected tokens per second; 0 if plain steps are faster."""
        if not self._step_seconds or not self._verify_seconds:
            return min(limit, 4)  # a first measurement
        best, best_rate = 0, 1.0 / self._verify_seconds
        expected, power = 1.0, 1.0
        for length in range(1, min(limit, MAX_DRAFT) + 1):
            power *= self._acceptance
            expected += power
            rate = expected / (self._verify_seconds + length * self._step_seconds)
            if rate > best_rate:
                best, best_rate = length, rate
        self._withheld = 0 if best else self._withheld + 1
        if self._withheld > _RETRY:  # the text may have become easier to predict
            self._withheld, self._acceptance = 0, _ASSUMED
        return best


def check_draft(engine: Engine, target: Engine) -> None:
    """Raises UsageError unless both engines have a vocabulary of the same size."""
    if engine.info.vocab_size != target.info.vocab_size:
        raise UsageError(
            f"'{engine.info.name}' cannot draft for '{target.info.name}': their vocabularies differ "
            f"({engine.info.vocab_size:,} and {target.info.vocab_size:,} tokens)"
        )


def _running_mean(known: float, seen: float) -> float:
    """A running mean that one slow step hardly moves."""
    return known + 0.1 * (min(seen, 3.0 * known) - known) if known else seen

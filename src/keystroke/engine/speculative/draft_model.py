"""A smaller model drafts for a larger one.

Owns a session of the small engine and nothing else. It chooses with the same noise at the same positions
as the large model will, so the two agree whenever their distributions put the same token first. A paced one
drafts as far as that pays: it knows what its steps and a verification take, and how often it was right.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

from keystroke.engine.base import GREEDY, Engine, Sampling, Session
from keystroke.engine.speculative.base import MAX_DRAFT, Drafter
from keystroke.errors import ContextOverflow, NotEnoughMemory, UsageError

_HOPED = 0.8  # how often a drafted token is right, before anything is known
_PACE = 0.05
_RETRY = 64  # proposals held back before it is tried again

# One session serves all answers that a small engine drafts for: it finds their common text again by itself.
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
        self._right = _HOPED
        self._own = 0.0  # seconds for each token drafted
        self._verify = 0.0  # seconds for a verification
        self._silent = 0

    @classmethod
    def shared(cls, engine: Engine, target: Engine) -> ModelDrafter:
        """A paced drafter over the one session that `engine` keeps for drafting; never close it."""
        if engine not in _sessions:
            _sessions[engine] = engine.session()
        return cls(engine, target, session=_sessions[engine], paced=True)

    def choose_by(self, sampling: Sampling) -> None:
        self._sampling = replace(sampling, logprobs=None)  # of drafts nobody asks

    def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        limit = self._worth(limit) if self._paced else limit
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
            pass  # the small model may have less room; the large one goes on without it
        if draft:
            self._own = _toward(self._own, (time.perf_counter() - started) / len(draft))
        return draft

    def verified(self, drafted: int, accepted: int, seconds: float) -> None:
        self._verify = _toward(self._verify, seconds)
        for right in [1.0] * accepted + [0.0] * (accepted < drafted):
            self._right += _PACE * (right - self._right)

    def close(self) -> None:
        self._session.close()

    def _worth(self, limit: int) -> int:
        """The length with the most tokens a second, 0 if plain steps give more."""
        if not self._own or not self._verify:
            return min(limit, 4)  # a first look
        best, best_rate = 0, 1.0 / self._verify
        expected, power = 1.0, 1.0
        for length in range(1, min(limit, MAX_DRAFT) + 1):
            power *= self._right
            expected += power
            rate = expected / (self._verify + length * self._own)
            if rate > best_rate:
                best, best_rate = length, rate
        self._silent = 0 if best else self._silent + 1
        if self._silent > _RETRY:  # text changes: what could not be guessed may be guessed now
            self._silent, self._right = 0, _HOPED
        return best


def check_draft(engine: Engine, target: Engine) -> None:
    """Raises UsageError unless `engine` speaks the same tokens as `target`."""
    if engine.info.vocab_size != target.info.vocab_size:
        raise UsageError(
            f"'{engine.info.name}' cannot draft for '{target.info.name}': their vocabularies differ "
            f"({engine.info.vocab_size:,} and {target.info.vocab_size:,} tokens)"
        )


def _toward(known: float, seen: float) -> float:
    """A running mean that one slow step hardly moves."""
    return known + 0.1 * (min(seen, 3.0 * known) - known) if known else seen

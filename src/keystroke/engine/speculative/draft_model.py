"""A smaller model drafts for a larger one.

Law: owns a session of the small engine and nothing else. It chooses with the same noise at the same positions
as the large model will, so the two agree whenever their distributions put the same token first.
"""

from __future__ import annotations

from collections.abc import Sequence

from keystroke.engine.base import GREEDY, Engine, Sampling
from keystroke.engine.speculative.base import Drafter
from keystroke.errors import ContextOverflow, NotEnoughMemory, UsageError


class ModelDrafter(Drafter):
    def __init__(self, engine: Engine, target: Engine, sampling: Sampling = GREEDY) -> None:
        if engine.info.vocab_size != target.info.vocab_size:
            raise UsageError(
                f"'{engine.info.name}' cannot draft for '{target.info.name}': their vocabularies differ "
                f"({engine.info.vocab_size:,} and {target.info.vocab_size:,} tokens)"
            )
        self._session = engine.session()
        self._sampling = sampling
        self._eos = engine.info.eos

    def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        draft: list[int] = []
        try:
            self._session.extend(tokens)
            while len(draft) < limit:
                draft.extend(self._session.step((), self._sampling).tokens)
                if draft[-1] in self._eos:
                    break
        except (ContextOverflow, NotEnoughMemory):
            pass  # the small model may have less room; the large one goes on without it
        return draft

    def close(self) -> None:
        self._session.close()

"""A session whose KV is in pages on the GPU. Tokens, resident prefix and reuse work as in `HostSession`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from keystroke.engine.base import (
    GREEDY,
    AllowedTokens,
    ExtendResult,
    Interrupt,
    ModelInfo,
    Sampling,
    Session,
    Step,
    StepRequest,
)
from keystroke.engine.checkpoint.spec import ModelSpec
from keystroke.engine.cuda.pages import PagePool, PageTable
from keystroke.engine.cuda.plan import PAGE
from keystroke.engine.cuda.prefill import portion_size
from keystroke.engine.host import HostSession
from keystroke.errors import UsageError


class SessionHost(Protocol):
    """The part of `CudaEngine` that sessions use (a Protocol, so that imports stay acyclic)."""

    info: ModelInfo
    spec: ModelSpec
    pool: PagePool
    prefill_chunk: int
    prefill_work: float
    tail: int

    def cancel_ahead(self) -> None: ...
    def prefill(
        self, tokens: Sequence[int], start: int, pages: Sequence[int], after: Sequence[int]
    ) -> None: ...
    def synchronize(self) -> None: ...
    def upload_pages(self, slot: int, pages: Sequence[int], first: int) -> None: ...
    def copy_page(self, old: int, new: int) -> None: ...
    def invalidate_bounds(self, pages: Sequence[int]) -> None: ...
    def remove_session(self, session: CudaSession) -> None: ...
    def session_over(self, table: PageTable) -> CudaSession: ...
    def step_many(self, requests: Sequence[StepRequest]) -> list[Step]: ...


class CudaSession(HostSession):
    def __init__(self, engine: SessionHost, slot: int, table: PageTable) -> None:
        super().__init__(engine.info.context_length, chunk=engine.prefill_chunk, tail=engine.tail)
        self._engine = engine
        self._table = table
        self.slot = slot
        self.dense_until = 0  # tokens before which sparse attention is not tried again
        self.guess_requested = False  # whether `CudaEngine.guess` was called since the last step
        self.agreed_steps = 0  # steps in a row that verified exactly what was guessed
        self._bounded = 0  # leading pages whose key bounds are up to date

    # HostSession

    def _forward(
        self, tokens: Sequence[int], start: int, rows: int, interrupt: Interrupt | None
    ) -> np.ndarray:
        self._engine.cancel_ahead()
        end = start + len(tokens)
        after = self._tokens[end : end + 1]  # the draft head stores an entry for this token too
        self.reserve(start, end + len(after))
        self._engine.prefill(tokens, start, self._table.pages, after)
        return np.empty((0, 0), np.float32)

    def _synchronize(self) -> None:
        self._engine.synchronize()

    def _portion(self, start: int) -> int:
        return portion_size(self._engine.spec, start, self._chunk, self._engine.prefill_work)

    def _inspect(self, fresh: Sequence[int]) -> None:
        size = self._engine.info.vocab_size
        bad = next((t for t in fresh if not 0 <= t < size), None)
        if bad is not None:
            raise UsageError(f"token {bad} is not in the model's vocabulary of {size:,}")

    def _adopt(self, tokens: Sequence[int], own: int) -> int:
        self._table.record(self._held)
        run = self._engine.pool.find(tokens, self._table.records(own), self._table.scope)
        shared = len(run) * PAGE
        if shared <= own:
            return own
        self._table.adopt(run)
        self._engine.upload_pages(self.slot, self._table.pages, 0)
        self._bounded = 0
        self._held = list(tokens[:shared])
        return shared

    def _release(self) -> None:
        self._engine.cancel_ahead()
        self._table.record(self._held)
        self._table.clear()
        self._engine.remove_session(self)

    # The contract

    def extend(self, tokens: Sequence[int], interrupt: Interrupt | None = None) -> ExtendResult:
        self._check_open()
        self._engine.cancel_ahead()
        return super().extend(tokens, interrupt)

    def step(
        self,
        draft: Sequence[int] = (),
        sampling: Sampling = GREEDY,
        interrupt: Interrupt | None = None,
        allowed: AllowedTokens | None = None,
    ) -> Step:
        if interrupt is not None:
            interrupt.check()
            self.read_appended(interrupt)
        return self._engine.step_many([StepRequest(self, draft, sampling, allowed)])[0]

    def rollback(self, length: int) -> None:
        self._engine.cancel_ahead()
        super().rollback(length)

    def fork(self) -> Session:
        self._check_open()
        self._engine.cancel_ahead()
        other = self._engine.session_over(self._table.fork())
        self._copy_state_to(other)
        return other

    # For the engine

    def read_appended(self, interrupt: Interrupt | None = None) -> None:
        """Prefill appended tokens if they are more than one step may compute."""
        if len(self._tokens) - self._resident > self._tail:
            self._compute_pending(interrupt)

    def rows(self, draft: Sequence[int], most: int) -> tuple[list[int], list[int]]:
        """The pending tokens of the next step, and as much of the draft as fits."""
        pending = self._tokens[self._resident :]
        room = min(most - len(pending), self._context_length - len(self._tokens) - 1)
        limit = self._engine.info.vocab_size
        kept: list[int] = []
        for token in draft[: max(room, 0)]:
            if not 0 <= token < limit:
                break  # can never be chosen, so the draft ends here
            kept.append(token)
        return pending, kept

    def reserve(self, start: int, end: int) -> None:
        """Make the pages of positions start ... end - 1 writable: allocate, or copy what is shared."""
        first, end = start // PAGE, min(end, self._context_length)
        before = self._table.pages[first:]
        for _, old, new in self._table.reserve(start, end):
            self._engine.copy_page(old, new)
        self._bounded = min(self._bounded, first)
        touched = self._table.pages[first:]
        self._engine.invalidate_bounds(touched)
        if touched != before:
            self._engine.upload_pages(self.slot, self._table.pages, first)

    def take_unbounded_pages(self) -> Sequence[int]:
        """Full pages written since the last call; their key bounds must be computed."""
        first, self._bounded = self._bounded, self._resident // PAGE
        return self._table.pages[first : self._bounded]

    def apply_step(self, computed: Sequence[int], chosen: Sequence[int], accepted: int) -> None:
        """Record a finished step: KV of `computed` is stored, `chosen` are the new tokens."""
        base = len(self._tokens)
        del self._held[self._resident :]
        self._held.extend(computed)
        self._tokens.extend(chosen)
        self._resident = base + accepted

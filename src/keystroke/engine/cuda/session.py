"""A sequence whose KV lives in pages on the GPU.

Bookkeeping of one sequence. Tokens, residency and reuse follow `HostSession`; arithmetic is the
engine's.
"""

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
from keystroke.engine.cuda.prefill import portion
from keystroke.engine.host import HostSession
from keystroke.errors import ContextOverflow, UsageError


class SessionHost(Protocol):
    """What a session asks of the engine whose memory it uses."""

    info: ModelInfo
    spec: ModelSpec
    pool: PagePool
    prefill_chunk: int
    prefill_work: float
    tail: int

    def settle(self) -> None: ...
    def prefill(
        self, tokens: Sequence[int], start: int, pages: Sequence[int], after: Sequence[int]
    ) -> None: ...
    def catch_up(self) -> None: ...
    def upload(self, slot: int, pages: Sequence[int], first: int) -> None: ...
    def copy_page(self, old: int, new: int) -> None: ...
    def changes(self, pages: Sequence[int]) -> None: ...
    def forget(self, session: CudaSession) -> None: ...
    def session_over(self, table: PageTable) -> CudaSession: ...
    def step_many(self, requests: Sequence[StepRequest]) -> list[Step]: ...


class CudaSession(HostSession):
    def __init__(self, engine: SessionHost, slot: int, table: PageTable) -> None:
        super().__init__(engine.info.context_length, chunk=engine.prefill_chunk, tail=engine.tail)
        self._engine = engine
        self._table = table
        self.slot = slot
        self.dense_until = 0  # tokens before which sparse attention is not tried again
        self.asked = False  # whether somebody wanted a guess since the last step
        self.agreed = 0  # steps in a row that verified exactly what was guessed
        self._bounded = 0  # leading pages whose bounds were asked for and whose content has not changed since

    # What HostSession asks of a backend

    def _forward(
        self, tokens: Sequence[int], start: int, rows: int, interrupt: Interrupt | None
    ) -> np.ndarray:
        self._engine.settle()
        end = start + len(tokens)
        after = self._tokens[end : end + 1]  # a draft head has an entry for it already
        self.reserve(start, end + len(after))
        self._engine.prefill(tokens, start, self._table.pages, after)
        return np.empty((0, 0), np.float32)

    def _catch_up(self) -> None:
        self._engine.catch_up()

    def _portion(self, start: int) -> int:
        return portion(self._engine.spec, start, self._chunk, self._engine.prefill_work)

    def _inspect(self, fresh: Sequence[int]) -> None:
        size = self._engine.info.vocab_size
        bad = next((t for t in fresh if not 0 <= t < size), None)
        if bad is not None:
            raise UsageError(f"token {bad} is not in the model's vocabulary of {size:,}")

    def _adopt(self, tokens: Sequence[int], own: int) -> int:
        self._table.record(self._held)
        run = self._engine.pool.find(tokens, self._table.known(own), self._table.scope)
        shared = len(run) * PAGE
        if shared <= own:
            return own
        self._table.adopt(run)
        self._engine.upload(self.slot, self._table.pages, 0)
        self._bounded = 0
        self._held = list(tokens[:shared])
        return shared

    def _release(self) -> None:
        self._engine.settle()
        self._table.record(self._held)
        self._table.clear()
        self._engine.forget(self)

    # The contract

    def extend(self, tokens: Sequence[int], interrupt: Interrupt | None = None) -> ExtendResult:
        self._check_open()
        self._engine.settle()
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
        self._engine.settle()
        super().rollback(length)

    def fork(self) -> Session:
        self._check_open()
        self._engine.settle()
        other = self._engine.session_over(self._table.fork())
        self._copy_state_to(other)
        return other

    # For the engine

    @property
    def resident(self) -> int:
        return self._resident

    def check_ready(self) -> None:
        self._check_open()
        if not self._tokens:
            raise UsageError("a step needs at least one token; extend the session first")
        if len(self._tokens) >= self._context_length:
            raise ContextOverflow(
                f"the context of {self._context_length:,} tokens is full; start a new conversation"
            )

    def read_appended(self, interrupt: Interrupt | None = None) -> None:
        """Where more was appended than a step takes along: read it as a prompt is read."""
        if len(self._tokens) - self._resident > self._tail:
            self._compute_pending(interrupt)

    def rows(self, draft: Sequence[int], most: int) -> tuple[list[int], list[int]]:
        """What the next step computes: the pending tail, and as much of the draft as fits."""
        pending = self._tokens[self._resident :]
        room = min(most - len(pending), self._context_length - len(self._tokens) - 1)
        limit = self._engine.info.vocab_size
        kept: list[int] = []
        for token in draft[: max(room, 0)]:
            if not 0 <= token < limit:
                break  # no such token can be chosen: the draft ends here
            kept.append(token)
        return pending, kept

    def reserve(self, start: int, end: int) -> None:
        """Pages for positions start ... end - 1, of this session's own."""
        first, end = start // PAGE, min(end, self._context_length)
        before = self._table.pages[first:]
        for _, old, new in self._table.reserve(start, end):
            self._engine.copy_page(old, new)
        self._bounded = min(self._bounded, first)
        touched = self._table.pages[first:]
        self._engine.changes(touched)
        if touched != before:
            self._engine.upload(self.slot, self._table.pages, first)

    def fresh_pages(self) -> Sequence[int]:
        """Whole pages whose bounds nobody has asked for since they were last written to."""
        first, self._bounded = self._bounded, self._resident // PAGE
        return self._table.pages[first : self._bounded]

    def absorb(self, computed: Sequence[int], chosen: Sequence[int], accepted: int) -> None:
        """A step ended: KV of `computed` is in place, `chosen` are the new tokens."""
        base = len(self._tokens)
        del self._held[self._resident :]
        self._held.extend(computed)
        self._tokens.extend(chosen)
        self._resident = base + accepted

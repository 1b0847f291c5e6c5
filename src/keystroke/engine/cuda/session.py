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
from keystroke.engine.cuda.plan import LOGGED_ROWS, PAGE
from keystroke.engine.cuda.prefill import portion_size
from keystroke.engine.cuda.prefill_delta import RecurrentSlot
from keystroke.engine.cuda.states import SequenceState, StatePool
from keystroke.engine.host import HostSession
from keystroke.engine.snapshots import SNAPSHOT_LEAST, run_to_border, snapshot_position
from keystroke.errors import UsageError


class SessionHost(Protocol):
    """The part of `CudaEngine` that sessions use (a Protocol, so that imports stay acyclic)."""

    info: ModelInfo
    spec: ModelSpec
    pool: PagePool
    prefill_chunk: int
    prefill_work: float
    tail: int
    steps_up_to: int
    states: StatePool | None

    def cancel_ahead(self) -> None: ...
    def prefill(
        self,
        tokens: Sequence[int],
        start: int,
        pages: Sequence[int],
        after: Sequence[int],
        slot: RecurrentSlot | None,
    ) -> None: ...
    def read_in_steps(self, table: int, tokens: Sequence[int], start: int) -> None: ...
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
        self._state = None if engine.states is None else SequenceState(engine.states, table.scope, self)

    # HostSession

    def _forward(
        self, tokens: Sequence[int], start: int, rows: int, interrupt: Interrupt | None
    ) -> np.ndarray:
        self._engine.cancel_ahead()
        end = start + len(tokens)
        after = self._tokens[end : end + 1]  # the draft head stores an entry for this token too
        self.reserve(start, end + len(after))
        state, pool = self._state, self._engine.states
        if len(tokens) <= self._engine.steps_up_to:
            self._engine.read_in_steps(self.slot, tokens, start)
            return np.empty((0, 0), np.float32)
        if state is None or pool is None:
            self._engine.prefill(tokens, start, self._table.pages, after, None)
            return np.empty((0, 0), np.float32)
        slot = pool.view(*state.prepare(self._held, start))
        try:
            self._engine.prefill(tokens, start, self._table.pages, after, slot)
        except BaseException:
            state.drop()  # some layers may be ahead of others
            raise
        state.advance(end, 0)
        ends_page = end % PAGE == 0 and end - state.newest >= SNAPSHOT_LEAST
        if ends_page or self.snapshot_due(tokens, 0):
            state.keep([*self._held, *tokens])
        return np.empty((0, 0), np.float32)

    def _synchronize(self) -> None:
        self._engine.synchronize()

    def _portion(self, start: int) -> int:
        size = portion_size(self._engine.spec, start, self._chunk, self._engine.prefill_work)
        if self._state is None:
            return size
        # To the last whole page before a border, for a snapshot: other sessions find full pages only.
        end = start + run_to_border(self._tokens, start, size, self._engine.spec.eos)
        whole = min(end, len(self._tokens) - 1) // PAGE * PAGE - start
        return whole if whole >= SNAPSHOT_LEAST else size

    def _resume(self, length: int) -> int:
        return length if self._state is None else self._state.reach(self._held, length)

    def _inspect(self, fresh: Sequence[int]) -> None:
        size = self._engine.info.vocab_size
        bad = next((t for t in fresh if not 0 <= t < size), None)
        if bad is not None:
            raise UsageError(f"token {bad} is not in the model's vocabulary of {size:,}")

    def _adopt(self, tokens: Sequence[int], own: int) -> int:
        self._table.record(self._held)
        run = self._engine.pool.find(tokens, self._table.records(own), self._table.scope)
        shared = len(run) * PAGE
        if self._state is not None:  # pages without a state are of no use
            assert self._engine.states is not None
            shared = self._engine.states.find(self._table.scope, tokens[:shared])
            own_reach = self._state.reach(self._held, own)
            if shared > own_reach:
                self._state.cut(own)
                run = run[: -(-shared // PAGE)]
            own = own_reach
        if shared <= own:
            return own
        self._table.adopt(run)
        self._engine.upload_pages(self.slot, self._table.pages, 0)
        self._bounded = 0
        self._held = list(tokens[:shared])
        return shared

    def _release(self) -> None:
        self._engine.cancel_ahead()
        if self._state is not None and self._state.position > len(self._held) // PAGE * PAGE:
            self._state.drop()  # nobody finds the page in which it ends
        self.lose_state()
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
        if self._state is not None and other._state is not None:
            self._state.copy_to(other._state)
        return other

    # For the engine

    def read_appended(self, interrupt: Interrupt | None = None) -> None:
        """Prefill appended tokens if they are more than one step may compute."""
        self._resident = self._resume(self._resident)
        if len(self._tokens) - self._resident > self._tail:
            self._compute_pending(interrupt)

    def rows(self, draft: Sequence[int], most: int) -> tuple[list[int], list[int]]:
        """The pending tokens of the next step, and as much of the draft as fits."""
        pending = self._tokens[self._resident :]
        if self._state is not None:
            most = min(most, LOGGED_ROWS)
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

    def apply_step(
        self, computed: Sequence[int], chosen: Sequence[int], accepted: int, *, alone: bool
    ) -> None:
        """Record a finished step: KV of `computed` is stored, `chosen` are the new tokens. `alone`: it had
        one row in all."""
        base, start = len(self._tokens), self._resident
        del self._held[start:]
        self._held.extend(computed)
        if self._state is not None:
            due = self.snapshot_due(computed, start + len(computed) - base)
            self._state.advance(start, len(computed), alone=alone)
            if due:
                self._state.keep(self._held)
        self._tokens.extend(chosen)
        self._resident = base + accepted

    def keep_state(self) -> None:
        """Call for all sessions of a step first, so that none of them loses its state to another."""
        if self._state is not None:
            self._state.touch()

    def prepare_state(self) -> tuple[int, int]:
        """The slot of the recurrent state for the next step, and how many rows it lacks."""
        return (0, 0) if self._state is None else self._state.prepare(self._held, self._resident)

    def step_was_run(self, *, alone: bool) -> None:
        """A step of one token was computed whose result is not used. `alone`: it had no other rows."""
        if self._state is not None:
            del self._held[self._resident :]
            self._held.append(self._tokens[self._resident])
            self._state.advance(self._resident, 1, alone=alone)

    def lose_state(self) -> None:
        """Give the slot of the recurrent state back; a snapshot remains if it is worth one."""
        if self._state is not None:
            if self._state.position - self._state.newest >= SNAPSHOT_LEAST:
                self._state.keep(self._held)
            self._state.drop()

    def snapshot_due(self, run: Sequence[int], drafted: int) -> bool:
        """Whether a snapshot is due after a run from the resident tokens on. A step's is taken before its
        rows: those fit into a step."""
        if self._state is None:
            return False
        at = snapshot_position(
            self._resident,
            run,
            drafted,
            length=len(self._tokens),
            newest=self._state.newest,
            ends=self._engine.spec.eos,
        )
        return at is not None

"""Recurrent states of hybrid models on the device: slots for sequences at work, snapshots by content.

The kernel leaves a state as it was before a step's rows and their inputs in a log (kernels/delta.cuh), so a
sequence can go on from any position that its last step covered; from earlier ones only at a snapshot. Some
slots have a second state, where a step of one row leaves what is behind it: going on there costs least.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from keystroke.engine.cuda.plan import Plan, second_states
from keystroke.engine.cuda.prefill_delta import RecurrentSlot
from keystroke.engine.snapshots import Snapshot, SnapshotStore

# The states of all layers, and the log's rows that the convolution looks back to.
Arrays = tuple[Tensor, Tensor]


class StateOwner(Protocol):
    def lose_state(self) -> None:
        """Called before its slot is given to another sequence."""


@dataclass(frozen=True, slots=True)
class KnownState:
    """A snapshot behind the tokens in `content`."""

    scope: str
    content: bytes
    position: int
    snapshot: Snapshot[Arrays]


class StatePool:
    def __init__(self, plan: Plan, slots: int, device: torch.device, budget: int) -> None:
        """`budget`: bytes that all snapshots may take."""
        assert plan.spec.delta is not None
        state, log = plan.state_sizes
        self.slots, self.seconds = slots, second_states(slots)
        self.states = torch.zeros(slots + self.seconds, *state, device=device)
        self.logs = torch.zeros(slots, *log, device=device)
        self._tail = plan.spec.delta.kernel - 1
        self._free = list(range(slots - 1, -1, -1))  # the first ones, which have second states, first
        self._owners: OrderedDict[int, StateOwner] = OrderedDict()  # least recently used first
        self._store: SnapshotStore[Arrays] = SnapshotStore(budget)
        self._known: list[KnownState] = []

    @property
    def snapshot_bytes(self) -> int:
        return self._store.nbytes

    def acquire(self, owner: StateOwner) -> int:
        """A slot; takes that of the least recently used sequence if none is free."""
        if not self._free:
            next(iter(self._owners.values())).lose_state()
        slot = self._free.pop()
        self._owners[slot] = owner
        return slot

    def touch(self, slot: int) -> None:
        self._owners.move_to_end(slot)

    def release(self, slot: int) -> None:
        del self._owners[slot]
        self._free.append(slot)
        self._free.sort(reverse=True)

    def view(self, state: int, replay: int) -> RecurrentSlot:
        return RecurrentSlot(self.states[state], self._log_of(state), replay)

    def copy(self, state: int, to: int) -> None:
        self.states[to] = self.states[state]
        self._log_of(to).copy_(self._log_of(state))

    def _log_of(self, state: int) -> Tensor:
        return self.logs[state % self.slots]

    def keep(self, scope: str, tokens: Sequence[int], state: int) -> bool:
        """Take a snapshot of a state that has read exactly `tokens`. Returns whether there is one."""
        content = array("i", tokens).tobytes()
        if self._find_exactly(scope, content) is not None:
            return True
        each = self.states[0].numel() + self._tail * self.logs[0, :, 0].numel()
        if not self._store.fits(4 * each):
            return False
        arrays = self.states[state].clone(), self._log_of(state)[:, self._places(len(tokens))]
        snapshot = self._store.hold(arrays, 4 * sum(part.numel() for part in arrays))
        self._known = [known for known in self._known if known.snapshot.arrays is not None]
        if snapshot is not None:
            self._known.append(KnownState(scope, content, len(tokens), snapshot))
        return snapshot is not None

    def find(self, scope: str, tokens: Sequence[int]) -> int:
        """The position of the newest snapshot of a beginning of `tokens`; 0 if there is none."""
        content = array("i", tokens).tobytes()
        return max(
            (
                known.position
                for known in self._known
                if known.snapshot.arrays is not None
                and known.scope == scope
                and content.startswith(known.content)
            ),
            default=0,
        )

    def restore(self, scope: str, tokens: Sequence[int], state: int) -> None:
        """Load the snapshot behind exactly `tokens`, which must exist; behind none it is empty."""
        if not tokens:
            self.states[state] = 0
            return
        known = self._find_exactly(scope, array("i", tokens).tobytes())
        assert known is not None, f"no state at position {len(tokens)}"
        assert known.snapshot.arrays is not None
        self.states[state], self._log_of(state)[:, self._places(len(tokens))] = known.snapshot.arrays

    def _find_exactly(self, scope: str, content: bytes) -> KnownState | None:
        return next(
            (
                known
                for known in self._known
                if known.scope == scope and known.content == content and known.snapshot.arrays is not None
            ),
            None,
        )

    def _places(self, position: int) -> Tensor:
        """Where the log has the rows before `position`."""
        rows = self.logs.shape[2]
        return torch.tensor(
            [at % rows for at in range(position - self._tail, position)], device=self.logs.device
        )


class SequenceState:
    """The recurrent state of one sequence: the state at `position`, and the inputs of the rows after it that
    were computed."""

    def __init__(self, pool: StatePool, scope: str, owner: StateOwner) -> None:
        self._pool, self._scope, self._owner = pool, scope, owner
        self._slot: int | None = None
        self.position = self._logged = 0
        self._turned = False  # whether the state at `position` is the slot's second one
        self._ahead = False  # whether the slot's other one is the state behind the first of those rows
        self.newest = 0  # position of the newest snapshot on its way

    @property
    def _state(self) -> int:
        assert self._slot is not None
        return self._slot + self._pool.slots * self._turned

    def _go_ahead(self, position: int) -> None:
        """Take the other state where it is nearer to `position`."""
        if self._ahead and self._logged and position > self.position:
            self._turned = not self._turned
            self.position, self._logged, self._ahead = self.position + 1, self._logged - 1, False

    def touch(self) -> None:
        if self._slot is not None:
            self._pool.touch(self._slot)

    def reach(self, held: Sequence[int], length: int) -> int:
        """The largest position up to `length` from which `prepare` can go on; `held` are the tokens that were
        read."""
        found = self._pool.find(self._scope, held[:length])
        if self._slot is None or self.position > length:
            return found
        return max(found, min(length, self.position + self._logged))

    def prepare(self, held: Sequence[int], start: int) -> tuple[int, int]:
        """The state, and how many rows it lacks for a run that begins at `start`, which is within reach."""
        if self._slot is None:
            self._slot = self._pool.acquire(self._owner)
            self._settle(start + 1, 0)  # nothing is there
        self.touch()
        self._go_ahead(start)
        self._ahead = False  # the run changes one of the two
        if not self.position <= start <= self.position + self._logged:
            self._pool.restore(self._scope, held[:start], self._state)
            self._settle(start, 0)
        self.newest = min(self.newest, start)
        return self._state, start - self.position

    def advance(self, position: int, logged: int, *, alone: bool = False) -> None:
        """A run left the state at `position` and so many rows in the log; a step of one row in all (`alone`)
        also the state behind it, if the slot has a second one. Such a step may have followed another on the
        device, where it went on from the state that was ahead."""
        self._go_ahead(position)
        self._settle(position, logged)
        self._ahead = alone and self._slot is not None and self._slot < self._pool.seconds

    def _settle(self, position: int, logged: int) -> None:
        self.position, self._logged, self._ahead = position, logged, False

    def cut(self, length: int) -> None:
        """Forget what was read beyond `length` tokens."""
        if self.position > length:
            self.drop()
        self._logged = max(min(self._logged, length - self.position), 0)

    def keep(self, held: Sequence[int]) -> None:
        """Take a snapshot of the state."""
        if self._slot is None or self.position == 0:
            return
        if self._pool.keep(self._scope, held[: self.position], self._state):
            self.newest = self.position

    def drop(self) -> None:
        if self._slot is not None:
            self._pool.release(self._slot)
        self._slot, self._turned = None, False
        self._settle(0, 0)

    def copy_to(self, other: SequenceState) -> None:
        if self._slot is None or self._pool.slots < 2:  # nothing to copy, or no room beside it
            return
        self.touch()
        other._slot = self._pool.acquire(other._owner)
        self._pool.copy(self._state, other._state)
        other._settle(self.position, self._logged)
        other.newest = self.newest

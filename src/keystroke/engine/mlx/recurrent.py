"""The state of a session's recurrent layers, and the ways back: the state before drafted rows with their
inputs, snapshots, and the beginning. Arrays are immutable, so that all of them are references."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import mlx.core as mx
import numpy as np

from keystroke.engine.disk_prefixes import Float32
from keystroke.engine.mlx.delta_net import DeltaInputs, DeltaRun, DeltaState, empty_state
from keystroke.engine.mlx.model import MlxModel
from keystroke.engine.snapshots import Snapshot, SnapshotStore, worth_saving

States = list[DeltaState]  # of every recurrent layer


@dataclass(slots=True)
class MlxRecurrentState:
    states: States
    position: int = 0  # tokens that `states` have read
    before: States = field(default_factory=list)  # the newest rows, which may have been drafted
    before_at: int = 0
    drafted: list[DeltaInputs] = field(default_factory=list)  # of those rows, a layer each
    drafts: int = 0  # their number
    snapshots: dict[int, Snapshot[States]] = field(default_factory=dict)

    def copy(self) -> MlxRecurrentState:
        return replace(self, snapshots=dict(self.snapshots))

    def reach(self, length: int) -> int:
        """The largest position up to `length` at which a run can start."""
        found = [at for at, kept in self.snapshots.items() if at <= length and kept.arrays is not None]
        if self.position <= length:
            found.append(self.position)
        elif self.before and self.before_at <= length:
            found.append(min(length, self.before_at + self.drafts))
        return max(found, default=0)

    def at(self, start: int, model: MlxModel) -> States:
        """The states at `start`, which must be within reach."""
        if start == self.position:
            return self.states
        if self.before and self.before_at <= start <= self.before_at + self.drafts:
            again = start - self.before_at
            return model.repeat(self.before, self.drafted, again) if again else self.before
        snapshot = self.snapshots.get(start)
        if snapshot is not None and snapshot.arrays is not None:
            return snapshot.arrays
        assert start == 0, f"position {start} is out of reach"
        delta = model.spec.delta
        assert delta is not None
        return [empty_state(delta) for _ in delta.layers]

    def advance(self, start: int, count: int, drafted: int, runs: Sequence[DeltaRun]) -> None:
        """A run of `count` rows from `start` on was computed, whose last `drafted` may be taken back."""
        self.snapshots = {at: kept for at, kept in self.snapshots.items() if at <= start}
        self.states, self.position = [run.state for run in runs], start + count
        self.before, self.before_at = [run.sure for run in runs], start + count - drafted
        self.drafted, self.drafts = [run.drafted for run in runs], drafted

    def arrays(self) -> list[mx.array]:
        """Everything that is to be computed with a run."""
        pairs = [array for state in (*self.states, *self.before) for array in state]
        return pairs + [array for each in self.drafted for array in (each.mixed, each.beta, each.decay)]

    def keep(self, position: int, store: SnapshotStore[States], nbytes: int) -> None:
        """Take a snapshot at `position`, if a state is there."""
        states = {self.before_at: self.before, self.position: self.states}.get(position)
        if states and position > 0 and position not in self.snapshots:
            snapshot = store.hold(states, nbytes)
            if snapshot is not None:
                self.snapshots[position] = snapshot

    def newest_snapshot(self) -> int:
        return max((at for at, kept in self.snapshots.items() if kept.arrays is not None), default=0)

    def saved_states(self, length: int) -> dict[int, list[Float32]]:
        """The states to write to disk, by position: the newest ones up to `length`, and the first."""
        found = {at: kept.arrays for at, kept in self.snapshots.items() if kept.arrays is not None}
        if 0 < self.position <= length:
            found[self.position] = self.states
        chosen = worth_saving(at for at in found if at <= length)
        return {at: [np.array(array).ravel() for state in found[at] for array in state] for at in chosen}

    def restore(self, position: int, saved: Float32, store: SnapshotStore[States]) -> None:
        """Make a snapshot of states that were saved, one after the other."""
        sizes = np.cumsum([array.size for state in self.states for array in state])
        if saved.size != sizes[-1]:
            raise ValueError("its state has another size")
        shapes = [array.shape for state in self.states for array in state]
        parts = np.split(saved, sizes[:-1])
        arrays = [mx.array(part.reshape(shape)) for part, shape in zip(parts, shapes, strict=True)]
        snapshot = store.hold(list(zip(arrays[::2], arrays[1::2], strict=True)), saved.nbytes)
        if snapshot is not None:
            self.snapshots[position] = snapshot

"""Recurrent state of hybrid models, and the snapshots from which it is taken back.

The state of a delta net has read every token up to a position and cannot be cut like a KV cache. There are
three ways back: a copy of the state with a log of the inputs since (a few rows: rejected drafts, short
rollbacks), snapshots (immutable, shared by sessions, within a budget, oldest dropped first), and reading
again from the newest of these. A run that fails leaves the state unknown, never wrong.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from keystroke.engine.checkpoint.spec import DeltaSpec
from keystroke.engine.snapshots import Snapshot, SnapshotStore, worth_saving

RECURRENT = ("state", "copy", "log")  # the inputs of a recurrent layer
LOGGED = 64  # rows that can be repeated
MARK_EVERY = 32  # steps of single rows between two copies of the state
UNKNOWN = -1

Float32 = npt.NDArray[np.float32]


def recurrent_shapes(delta: DeltaSpec) -> tuple[tuple[int, ...], ...]:
    """The shapes of `RECURRENT` for one layer, as native/delta_net.h reads them."""
    inputs = (delta.kernel - 1) * delta.channels
    held = inputs + delta.value_heads * delta.key_size * delta.value_size
    return (held,), (held,), (LOGGED, delta.channels + 2 * delta.value_heads)


class RecurrentState:
    """The state of one session's buffers, and the ways back that belong to its tokens."""

    def __init__(self, delta: DeltaSpec) -> None:
        self._delta = delta
        layers = sorted(delta.layers)
        # The system allocates zeroed pages on first use: an unused copy or log costs no memory.
        self.state, self._copy, self._log = (
            [np.zeros(shape, np.float32) for _ in layers] for shape in recurrent_shapes(delta)
        )
        self.values = {
            f"{name}.{layer}": ort.OrtValue.ortvalue_from_numpy(array)
            for name, arrays in zip(RECURRENT, (self.state, self._copy, self._log), strict=True)
            for layer, array in zip(layers, arrays, strict=True)
        }
        self.position = 0  # tokens that the state has read
        self._copy_at, self._logged = UNKNOWN, 0
        self.snapshots: dict[int, Snapshot[list[Float32]]] = {}

    @property
    def nbytes(self) -> int:
        return 2 * sum(array.nbytes for array in self.state)

    def reach(self, length: int) -> int:
        """The largest position up to `length` at which a run can start."""
        found = [at for at, kept in self.snapshots.items() if at <= length and kept.arrays is not None]
        if UNKNOWN < self.position <= length:
            found.append(self.position)
        if UNKNOWN < self._copy_at <= length:
            found.append(min(length, self._copy_at + self._logged))
        return max(found, default=0)

    def prepare(self, start: int, count: int, drafted: int) -> tuple[int, int, int]:
        """Bring the state to `start`, which must be within reach, for a run of `count` rows whose last
        `drafted` may be taken back. Returns what DeltaNet is told: rows of the log to repeat, after how many
        rows to copy the state, where to log rows; -1 for none."""
        self.snapshots = {at: snapshot for at, snapshot in self.snapshots.items() if at <= start}
        if self._copy_at > start:
            self._copy_at = UNKNOWN
        repeat = UNKNOWN
        if self.position != start:
            window = UNKNOWN < self._copy_at <= start <= self._copy_at + self._logged
            if window:
                repeat = start - self._copy_at
            else:
                self._restore(start)
        if self._copy_at != UNKNOWN:
            self._logged = min(self._logged, start - self._copy_at)
        mark = log_at = UNKNOWN
        if drafted:
            mark = count - drafted if drafted <= LOGGED else UNKNOWN
        elif count == 1:
            joined = self._copy_at != UNKNOWN and self._copy_at + self._logged == start
            if joined and self._logged < MARK_EVERY:
                log_at = self._logged
            else:
                mark = 0
        self._plan = (start, count, mark, log_at)
        self.position = UNKNOWN  # until the run ends
        if mark != UNKNOWN:
            self._copy_at = UNKNOWN
        return repeat, mark, log_at

    def finish(self) -> None:
        """The run ended as planned."""
        start, count, mark, log_at = self._plan
        self.position = start + count
        if mark != UNKNOWN:
            self._copy_at, self._logged = start + mark, count - mark
        elif log_at != UNKNOWN:
            self._logged += count

    def _restore(self, start: int) -> None:
        snapshot = self.snapshots.get(start)
        if snapshot is not None and snapshot.arrays is not None:
            for target, source in zip(self.state, snapshot.arrays, strict=True):
                np.copyto(target, source)
            return
        assert start == 0, f"position {start} is out of reach"
        for target in self.state:
            target.fill(0)

    def keep(self, position: int, store: SnapshotStore[list[Float32]]) -> None:
        """Take a snapshot at `position`, if the state or its copy is there."""
        if position in self.snapshots or position <= 0:
            return
        arrays = self._copy if self._copy_at == position else None
        if self.position == position:
            arrays = self.state
        if arrays is not None:
            self._hold(position, arrays, store)

    def saved_states(self, length: int) -> dict[int, list[Float32]]:
        """The states to write to disk, by position: the newest ones up to `length`, and the first."""
        found = {at: kept.arrays for at, kept in self.snapshots.items() if kept.arrays is not None}
        if 0 < self.position <= length:
            found[self.position] = self.state
        chosen = worth_saving(at for at in found if at <= length)
        return {at: arrays for at in chosen if (arrays := found[at]) is not None}

    def take_over(self, position: int, state: Float32, store: SnapshotStore[list[Float32]]) -> None:
        """Make a snapshot of a state that was saved: all layers, one after the other."""
        sizes = np.cumsum([array.size for array in self.state])
        if state.size != sizes[-1]:
            raise ValueError("its state has another size")
        self._hold(position, np.split(state, sizes[:-1]), store)

    def _hold(self, position: int, arrays: list[Float32], store: SnapshotStore[list[Float32]]) -> None:
        size = sum(array.nbytes for array in arrays)
        if store.fits(size) and (snapshot := store.hold([array.copy() for array in arrays], size)):
            self.snapshots[position] = snapshot

    def newest_snapshot(self) -> int:
        live = [at for at, snapshot in self.snapshots.items() if snapshot.arrays is not None]
        return max(live, default=0)

    def copy_to(self, other: RecurrentState, keep: int) -> None:
        """Give `other` what it needs to start at `reach(keep)`."""
        other.snapshots = {at: snapshot for at, snapshot in self.snapshots.items() if at <= keep}
        at = self.reach(keep)
        other.position = UNKNOWN
        if at == self.position:
            for target, source in zip(other.state, self.state, strict=True):
                np.copyto(target, source)
            other.position = at
        elif at not in other.snapshots and at:
            for mine, theirs in ((self._copy, other._copy), (self._log, other._log)):
                for source, target in zip(mine, theirs, strict=True):
                    np.copyto(target, source)
            other._copy_at, other._logged = self._copy_at, at - self._copy_at

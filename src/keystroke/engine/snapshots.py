"""Snapshots of recurrent states, from which sessions of hybrid models continue.

A state has read every token up to a position and cannot be cut like a KV cache. Snapshots are immutable and
shared by sessions; all those of an engine stay within a budget, the oldest are dropped first.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import Generic, TypeVar

SNAPSHOT_EVERY = 512  # tokens between two snapshots
SNAPSHOT_LEAST = 64  # tokens that make one worthwhile at the end of a message or prompt
SNAPSHOT_SHARE = 0.5  # of the KV budget, in addition to it
_SAVED = 3  # newest states of a prefix on disk

Arrays = TypeVar("Arrays")


def snapshot_position(
    start: int, run: Sequence[int], drafted: int, *, length: int, newest: int, ends: Collection[int]
) -> int | None:
    """Where to take a snapshot after a run of tokens from `start` on, whose last `drafted` may be taken back;
    None for nowhere. A later prompt may turn off at the end of a message (a token of `ends`) and at the end
    of a prompt (of `length` tokens); besides, at intervals from the `newest` one."""
    settled = start + len(run) - drafted
    border = run[len(run) - drafted - 1] in ends
    ends_prompt = len(run) - drafted > 1 and settled == length
    least = SNAPSHOT_LEAST if border or ends_prompt else SNAPSHOT_EVERY
    return settled if settled - newest >= least else None


def run_to_border(tokens: Sequence[int], start: int, chunk: int, ends: Collection[int]) -> int:
    """How many tokens a run from `start` on has: up to the last end of a message within `chunk`, for a
    snapshot there. The last token is left to the next step."""
    for at in range(min(start + chunk, len(tokens) - 1) - 1, start - 1, -1):
        if tokens[at] in ends:
            return at + 1 - start
    return chunk


def worth_saving(positions: Iterable[int]) -> list[int]:
    """The states of a prefix to write to disk: the first and the newest."""
    places = sorted(positions)
    return sorted({*places[:1], *places[-_SAVED:]})


class Snapshot(Generic[Arrays]):
    """The state of every recurrent layer at one position; None once it was dropped. Nobody writes to it."""

    __slots__ = ("__weakref__", "arrays", "nbytes")

    def __init__(self, arrays: Arrays, nbytes: int) -> None:
        self.arrays: Arrays | None = arrays
        self.nbytes = nbytes


class SnapshotStore(Generic[Arrays]):
    """Bounds the bytes of all snapshots of an engine. Snapshots without a reference do not count."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._known: OrderedDict[int, weakref.ref[Snapshot[Arrays]]] = OrderedDict()

    @property
    def nbytes(self) -> int:
        return sum(snapshot.nbytes for snapshot in self._live_snapshots())

    def fits(self, nbytes: int) -> bool:
        """Whether a snapshot of this size can be held at all."""
        return nbytes <= self.budget

    def hold(self, arrays: Arrays, nbytes: int) -> Snapshot[Arrays] | None:
        """A snapshot of `arrays`, which must not be written to any more; None if it does not fit."""
        if not self.fits(nbytes):
            return None
        while self.nbytes + nbytes > self.budget:
            oldest = self._live_snapshots()[0]
            oldest.arrays = None
            del self._known[id(oldest)]
        snapshot = Snapshot(arrays, nbytes)
        key = id(snapshot)
        self._known[key] = weakref.ref(snapshot, lambda _: self._known.pop(key, None))
        return snapshot

    def _live_snapshots(self) -> list[Snapshot[Arrays]]:
        return [snapshot for reference in self._known.values() if (snapshot := reference()) is not None]

"""Snapshots of recurrent states, from which sessions of hybrid models go on.

A state has read every token up to a position and cannot be cut like a KV cache. Snapshots are immutable and
shared by sessions; all those of an engine stay within a budget, the oldest are dropped first.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Generic, TypeVar

Arrays = TypeVar("Arrays")


class Snapshot(Generic[Arrays]):
    """The state of every recurrent layer at one position; None once it was dropped. Nobody writes to it."""

    __slots__ = ("__weakref__", "arrays", "nbytes")

    def __init__(self, arrays: Arrays, nbytes: int) -> None:
        self.arrays: Arrays | None = arrays
        self.nbytes = nbytes


class SnapshotStore(Generic[Arrays]):
    """Bounds the bytes of all snapshots of an engine. Those that nobody refers to any more do not count."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._known: OrderedDict[int, weakref.ref[Snapshot[Arrays]]] = OrderedDict()

    @property
    def nbytes(self) -> int:
        return sum(snapshot.nbytes for snapshot in self._live())

    def fits(self, nbytes: int) -> bool:
        """Whether a snapshot of this size can be held at all."""
        return nbytes <= self.budget

    def hold(self, arrays: Arrays, nbytes: int) -> Snapshot[Arrays] | None:
        """A snapshot of `arrays`, which nobody may write to; None if it does not fit."""
        if not self.fits(nbytes):
            return None
        while self.nbytes + nbytes > self.budget:
            oldest = self._live()[0]
            oldest.arrays = None
            del self._known[id(oldest)]
        snapshot = Snapshot(arrays, nbytes)
        key = id(snapshot)
        self._known[key] = weakref.ref(snapshot, lambda _: self._known.pop(key, None))
        return snapshot

    def _live(self) -> list[Snapshot[Arrays]]:
        return [snapshot for reference in self._known.values() if (snapshot := reference()) is not None]

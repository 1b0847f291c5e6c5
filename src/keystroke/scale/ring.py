"""Consistent hashing with bounded loads: which replica owns a key, and which take it when that one is full.

Every process with the same members computes the same order for a key; a member that joins or leaves moves
only its own share of keys. The caller passes the loads.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping

_POINTS = 128  # points of a member on the ring: shares differ by about a tenth


class Ring:
    """Members at fixed points of a hash ring."""

    def __init__(self, members: Collection[str]) -> None:
        self.members = frozenset(members)
        points = sorted(
            (_hash(f"{member}:{point}"), member) for member in members for point in range(_POINTS)
        )
        self._points = [point for point, _ in points]
        self._owners = [owner for _, owner in points]

    def order(self, key: str) -> Iterator[str]:
        """Every member once: the owner of `key`, then its alternatives in order."""
        seen: set[str] = set()
        start = bisect_right(self._points, _hash(key))
        for step in range(len(self._owners)):
            owner = self._owners[(start + step) % len(self._owners)]
            if owner not in seen:
                seen.add(owner)
                yield owner
                if len(seen) == len(self.members):
                    return


def max_load(loads: Mapping[str, int], factor: float, slots: int = 1) -> int:
    """The load below which a member accepts more work: `factor` times the average, counting the new work,
    and at least the engine's `slots` and a few more. Waiting behind so little costs less than computing a
    prefix again; ghost text goes first anyway."""
    average = (sum(loads.values()) + 1) / max(1, len(loads))
    return max(slots + max(2, slots // 4), math.ceil(factor * average))


def rank_replicas(ring: Ring, key: str, loads: Mapping[str, int], factor: float, slots: int = 1) -> list[str]:
    """The members in the order to try: in ring order, those with room first."""
    most = max_load(loads, factor, slots)
    order = list(ring.order(key))
    room = [member for member in order if loads.get(member, 0) < most]
    return [*room, *(member for member in order if member not in room)]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest())

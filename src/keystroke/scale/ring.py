"""Consistent hashing with bounded loads: which replica a key belongs to, and who takes it when that is full.

Pure. Every process that knows the same members gets the same order for a key, without talking to any
other; a member that comes or goes moves only its own share of keys. Load is given, not known.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping

_POINTS = 128  # places of a member on the ring: shares differ by about a tenth


class Ring:
    """Members at fixed places of a circle of hashes."""

    def __init__(self, members: Collection[str], points: int = _POINTS) -> None:
        self.members = frozenset(members)
        placed = sorted((_hash(f"{member}:{point}"), member) for member in members for point in range(points))
        self._places = [place for place, _ in placed]
        self._owners = [owner for _, owner in placed]

    def order(self, key: str) -> Iterator[str]:
        """Every member once: the one that `key` belongs to, then those it goes to instead, in order."""
        seen: set[str] = set()
        start = bisect_right(self._places, _hash(key))
        for step in range(len(self._owners)):
            owner = self._owners[(start + step) % len(self._owners)]
            if owner not in seen:
                seen.add(owner)
                yield owner
                if len(seen) == len(self.members):
                    return


def bound(loads: Mapping[str, int], factor: float, slots: int = 1) -> int:
    """How much work a member may have and still take more: `factor` times the average with this one more,
    and never less than `slots`, which an engine does at once, and a few more. To wait behind so little costs
    less than to read a prefix again; and ghost text, which cannot wait, goes before all of it."""
    average = (sum(loads.values()) + 1) / max(1, len(loads))
    return max(slots + max(2, slots // 4), math.ceil(factor * average))


def place(ring: Ring, key: str, loads: Mapping[str, int], factor: float, slots: int = 1) -> list[str]:
    """The members in the order to try: by the ring, those with room first. The first is the choice."""
    most = bound(loads, factor, slots)
    order = list(ring.order(key))
    room = [member for member in order if loads.get(member, 0) < most]
    return [*room, *(member for member in order if member not in room)]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest())

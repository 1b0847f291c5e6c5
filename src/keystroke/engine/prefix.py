"""A cache of KV, keyed on content: finds the entry that shares the longest prefix with a prompt.

The payload (a NumPy buffer, pages on a GPU) is opaque. A client that reconnects and resends everything finds
its cache again. Entries have a scope, so that response times do not reveal other users' prompts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Payload = TypeVar("Payload")
_PROTECTED = 64  # prefixes that may be protected at a time


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens `a` and `b` share. Slices compare at C speed, so that this galloping search
    costs about as much as two comparisons."""
    limit = min(len(a), len(b))
    low, step = 0, 64  # a[:low] == b[:low] holds
    while low < limit:
        high = min(low + step, limit)
        if a[low:high] == b[low:high]:
            low, step = high, step * 2
            continue
        while high - low > 1:
            middle = (low + high) // 2
            if a[low:middle] == b[low:middle]:
                low = middle
            else:
                high = middle
        return low
    return low


@dataclass(slots=True)
class CachedPrefix(Generic[Payload]):
    tokens: list[int]
    payload: Payload
    nbytes: int
    scope: str = ""


@dataclass(frozen=True, slots=True)
class ProtectedPrefix:
    tokens: tuple[int, ...]
    scope: str
    until: float  # of the monotonic clock

    def replaces(self, other: ProtectedPrefix) -> bool:
        return (self.tokens, self.scope) == (other.tokens, other.scope)

    def in_entry(self, entry: CachedPrefix[Any]) -> bool:
        size = len(self.tokens)
        return entry.scope == self.scope and tuple(entry.tokens[:size]) == self.tokens


class PrefixCache(Generic[Payload]):
    """Least-recently-used store of finished sequences under a budget of bytes.

    `find` leaves the entry in place (the caller copies from it); `remove` hands its memory to the caller.
    `drop`, if given, is called with every payload that is evicted.
    """

    def __init__(self, budget: int, drop: Callable[[Payload], None] | None = None) -> None:
        self.budget = budget
        self._drop = drop
        self._entries: list[CachedPrefix[Payload]] = []  # oldest first
        self._protected: list[ProtectedPrefix] = []  # oldest first

    def put(self, tokens: list[int], payload: Payload, nbytes: int, scope: str = "") -> None:
        """Store a sequence. Evicts entries that are prefixes of it, then the oldest above the budget. A
        sequence that alone exceeds the budget is not stored."""
        entry = CachedPrefix(tokens, payload, nbytes, scope)
        if nbytes > self.budget:
            self._release(entry)
            return
        kept = []
        for other in self._entries:
            covered = other.scope == scope and len(other.tokens) <= len(tokens)
            if covered and common_prefix(other.tokens, tokens) == len(other.tokens):
                self._release(other)
            else:
                kept.append(other)
        self._entries = [*kept, entry]
        self.shrink(self.budget)

    def protect(self, tokens: Sequence[int], seconds: float, scope: str = "") -> None:
        """Evict entries that begin with `tokens` after all others, for so many seconds."""
        now = time.monotonic()
        wanted = ProtectedPrefix(tuple(tokens), scope, now + seconds)
        self._protected = [p for p in self._protected if p.until > now and not wanted.replaces(p)]
        self._protected = [*self._protected[1 - _PROTECTED :], wanted]

    def find(self, tokens: Sequence[int], scope: str = "") -> tuple[CachedPrefix[Payload] | None, int]:
        """The entry of `scope` with the longest common prefix, and its length. Marks it as used."""
        best, length = None, 0
        for entry in self._entries:
            if entry.scope != scope:
                continue
            shared = common_prefix(entry.tokens, tokens)
            if shared > length:
                best, length = entry, shared
        if best is not None:
            self._entries.remove(best)
            self._entries.append(best)
        return best, length

    def remove(self, entry: CachedPrefix[Payload]) -> Payload:
        self._entries.remove(entry)
        return entry.payload

    def shrink(self, budget: int) -> None:
        """Evict the oldest until at most `budget` bytes are held."""
        while self.nbytes > budget and self.drop_oldest():
            pass

    def drop_oldest(self) -> bool:
        """Evict the oldest entry. Returns False if there is none."""
        if not self._entries:
            return False
        self._release(self._entries.pop(self._least_useful()))
        return True

    def _least_useful(self) -> int:
        """The oldest entry that is not the newest of a protected prefix; the oldest where all are."""
        if not self._protected:
            return 0
        now, safe = time.monotonic(), set[int]()
        for prefix in self._protected:
            if prefix.until > now:
                holders = [at for at, entry in enumerate(self._entries) if prefix.in_entry(entry)]
                safe.update(holders[-1:])
        return next((at for at in range(len(self._entries)) if at not in safe), 0)

    def newest_first(self) -> list[CachedPrefix[Payload]]:
        return self._entries[::-1]

    def clear(self) -> None:
        self.shrink(-1)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self._entries)

    @property
    def tokens(self) -> int:
        return sum(len(entry.tokens) for entry in self._entries)

    def _release(self, entry: CachedPrefix[Payload]) -> None:
        if self._drop is not None:
            self._drop(entry.payload)

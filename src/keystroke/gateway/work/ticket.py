"""A place in the queue, and what comes of it.

The one object that both the event loop and an engine thread hold. The loop side reads items and may
cancel, pause, redirect; the engine side only posts. Every ticket gets exactly one `Ended`, last.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from keystroke.engine.base import Interrupt
from keystroke.engine.generation import Chunk, Finish, GenerationStats
from keystroke.errors import Interrupted, KeystrokeError
from keystroke.gateway.work.priority import Priority, Tier, rank


@dataclass(frozen=True, slots=True)
class Reading:
    """The counters at one moment."""

    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    prefill: float = 0.0
    computed: int = 0
    at: float = 0.0  # perf_counter, where a span begins or ends in the middle of a ticket

    @staticmethod
    def of(stats: GenerationStats, at: float = 0.0) -> Reading:
        return Reading(
            stats.tokens,
            stats.steps,
            stats.drafted,
            stats.accepted,
            stats.prefill_seconds,
            stats.computed,
            at,
        )


@dataclass(frozen=True, slots=True)
class Moved:
    """The ticket waits; `position` 1 is next."""

    position: int


@dataclass(frozen=True, slots=True)
class Started:
    """Its turn came: the engine works on it from now on."""


@dataclass(frozen=True, slots=True)
class Steered:
    """Everything after this belongs to the redirected answer: `length` tokens in all, of which the first
    `kept` stayed in the KV cache."""

    steer_id: str
    kept: int
    length: int
    tokens: Sequence[int]  # the tokens kept
    reading: Reading


@dataclass(frozen=True, slots=True)
class Ended:
    """The end. `error` None: the answer finished by itself (the last chunk says why)."""

    error: KeystrokeError | None
    tokens: Sequence[int] = ()  # prompt and answer as the session held them


Item = Chunk | Moved | Started | Steered | Ended | Any


class Enough(Interrupted):
    """Stopped because the reader has all it wants: nothing went wrong and nobody was disappointed."""

    code = "enough"


class Redirected(Interrupted):
    """Stopped so that a steered successor can take its place."""

    code = "steered"


class Superseded(Interrupted):
    """A newer request of the same buffer took its place."""

    code = "superseded"
    status = 409


@dataclass(slots=True)
class Timing:
    """Stamps of time.perf_counter(), 0 where it did not come to that."""

    submitted: float = field(default_factory=time.perf_counter)
    started: float = 0.0
    first: float = 0.0
    ended: float = 0.0


class Ticket:
    def __init__(self, job: Any, priority: Priority, tier: Tier, key: str, buffer: str | None) -> None:
        self.job = job
        self.priority, self.tier, self.key, self.buffer = priority, tier, key, buffer
        self.rank = rank(priority, tier)
        self.round = 0  # of equals those of a lower round go first: how many of its key went before it
        self.timing = Timing()
        self.stats = GenerationStats()
        self.preemptions = 0
        self.position = 0  # 0: no longer waiting
        self.interrupt = Interrupt()
        self.reason: KeystrokeError | None = None  # why it was cancelled
        self.paused = False
        self.read: Callable[[], int] = lambda: 0  # how many tokens of its prompt have been read
        self.redirects: deque[tuple[str, Sequence[int]]] = deque()
        self.on_items: Callable[[list[Item]], None] | None = None
        self.on_end: Callable[[Ended], object] | None = None  # called last, whatever its reader did
        self.finish: Finish | None = None  # why the answer stopped by itself
        self.wake: Callable[[], None] = lambda: None  # tells the engine side to look again
        self.done = False  # the loop has seen Ended
        self._items: deque[Item] = deque()
        self._waiter: asyncio.Future[None] | None = None

    # From the event loop

    def cancel(self, reason: KeystrokeError | None = None) -> None:
        """Stop within one step. Idempotent; harmless after the end."""
        if self.reason is None and not self.done:
            self.reason = reason or Interrupted("stopped on request")
            self.interrupt.set()
            self.wake()

    def pause(self) -> None:
        """Take no step until `resume`: the reader is behind."""
        self.paused = True

    def resume(self) -> None:
        if self.paused:
            self.paused = False
            self.wake()

    def redirect(self, steer_id: str, tokens: Sequence[int]) -> None:
        """At the next token boundary put `tokens` after what was generated and go on."""
        self.redirects.append((steer_id, tokens))
        self.wake()

    def deliver(self, items: list[Item]) -> None:
        """Called in the loop with what the engine posted."""
        last = items[-1]
        if isinstance(last, Ended):
            self.done = True
            self.finish = next((i.finish for i in reversed(items) if type(i) is Chunk), self.finish)
        elif type(last) is Chunk:
            self.finish = last.finish
        try:
            if self.on_items is not None:
                self.on_items(items)
                return
            self._items.extend(items)
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)
        finally:
            if self.done and self.on_end is not None and isinstance(last, Ended):
                self.on_end(last)

    async def __aiter__(self) -> AsyncIterator[Item]:
        """Items up to and with Ended. For readers that need no callback; leaving early cancels."""
        try:
            while True:
                while self._items:
                    item = self._items.popleft()
                    yield item
                    if isinstance(item, Ended):
                        return
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
        finally:
            self.cancel()

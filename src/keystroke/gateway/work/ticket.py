"""A ticket: one request in a queue, and the items it produces.

The only object shared by the event loop and an engine thread. The loop reads items and may cancel, pause or
redirect; the engine only posts. Every ticket gets exactly one `TicketEnded`, as its last item.
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
class CounterSnapshot:
    """The generation counters at one moment."""

    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    prefill: float = 0.0
    computed: int = 0
    at: float = 0.0  # perf_counter, where a span begins or ends in the middle of a ticket

    @staticmethod
    def of(stats: GenerationStats, at: float = 0.0) -> CounterSnapshot:
        return CounterSnapshot(
            stats.tokens,
            stats.steps,
            stats.drafted,
            stats.accepted,
            stats.prefill_seconds,
            stats.computed,
            at,
        )


@dataclass(frozen=True, slots=True)
class TicketMoved:
    """The ticket waits; `position` 1 is next."""

    position: int


@dataclass(frozen=True, slots=True)
class TicketStarted:
    """The engine begins to work on the ticket."""


@dataclass(frozen=True, slots=True)
class TicketSteered:
    """Items after this one belong to the redirected answer, whose prompt has `length` tokens; the first
    `kept_tokens` of them stayed in the KV cache."""

    steer_id: str
    kept_tokens: int
    length: int
    tokens: Sequence[int]  # those that were kept
    counters: CounterSnapshot


@dataclass(frozen=True, slots=True)
class TicketEnded:
    """The last item. `error` None: the answer finished by itself (the last chunk says why)."""

    error: KeystrokeError | None
    tokens: Sequence[int] = ()  # prompt and answer as the session held them


SUPERSEDED = "A newer request of the same buffer took its place."
SHUTTING_DOWN = "The server is shutting down; try again shortly."

TicketItem = Chunk | TicketMoved | TicketStarted | TicketSteered | TicketEnded | Any


class StoppedEarly(Interrupted):
    """Stopped because the reader needs no more; counts as completed."""

    code = "enough"


class Redirected(Interrupted):
    """Stopped so that a steered successor can follow."""

    code = "steered"


class Superseded(Interrupted):
    """Replaced by a newer request for the same buffer."""

    code = "superseded"
    status = 409


@dataclass(slots=True)
class Timing:
    """Values of time.perf_counter(); 0 for stages that were not reached."""

    submitted: float = field(default_factory=time.perf_counter)
    started: float = 0.0
    first: float = 0.0
    ended: float = 0.0


class Ticket:
    def __init__(self, job: Any, priority: Priority, tier: Tier, key: str, buffer: str | None) -> None:
        self.job = job
        self.priority, self.tier, self.key, self.buffer = priority, tier, key, buffer
        self.rank = rank(priority, tier)
        self.round = 0  # number of earlier tickets of its key; equals of a lower round go first
        self.resumed = False  # it had begun on another engine: it does not wait behind equals again
        self.timing = Timing()
        self.stats = GenerationStats()
        self.preemptions = 0
        self.position = 0  # 0: no longer waiting
        self.interrupt = Interrupt()
        self.reason: KeystrokeError | None = None  # why it was cancelled
        self.paused = False
        self.read: Callable[[], int] = lambda: 0  # the number of prompt tokens read so far
        self.redirects: deque[tuple[str, Sequence[int]]] = deque()
        self.on_items: Callable[[list[TicketItem]], None] | None = None
        self.on_end: Callable[[TicketEnded], object] | None = None  # called last, even if the reader failed
        self.finish: Finish | None = None  # why generation stopped
        self.wake: Callable[[], None] = lambda: None  # wakes the engine side
        self.done = False  # the loop received TicketEnded
        self._items: deque[TicketItem] = deque()
        self._news = asyncio.Event()  # there are items

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
        """At the next token boundary, append `tokens` to what was generated and continue."""
        self.redirects.append((steer_id, tokens))
        self.wake()

    def deliver(self, items: list[TicketItem]) -> None:
        """Called in the loop with what the engine posted."""
        last = items[-1]
        if isinstance(last, TicketEnded):
            self.done = True
            self.finish = next((i.finish for i in reversed(items) if type(i) is Chunk), self.finish)
        elif type(last) is Chunk:
            self.finish = last.finish
        try:
            if self.on_items is not None:
                self.on_items(items)
                return
            self._items.extend(items)
            self._news.set()
        finally:
            if self.done and self.on_end is not None and isinstance(last, TicketEnded):
                self.on_end(last)

    async def __aiter__(self) -> AsyncIterator[TicketItem]:
        """Items up to and including TicketEnded, for readers without a callback; leaving early cancels."""
        try:
            while True:
                while self._items:
                    item = self._items.popleft()
                    yield item
                    if isinstance(item, TicketEnded):
                        return
                self._news.clear()
                await self._news.wait()
        finally:
            self.cancel()

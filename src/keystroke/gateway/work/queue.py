"""Queues of tickets: their interface, and how keys share one.

A key gets at most half of the waiting places, and equals of different keys go in turn; a key's own order is
kept. The `local` caller is not limited.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from keystroke.engine.generation import GenerationStats
from keystroke.errors import QueueFull
from keystroke.gateway.work.priority import Priority, Tier
from keystroke.gateway.work.ticket import Ticket

_MIN_RATE_TOKENS = 96


class WorkQueue(ABC):
    """A local engine, a remote server, or a pool of replicas. Submitting never blocks; every ticket gets
    exactly one `TicketEnded`."""

    concurrent: int  # answers generated at a time
    prefill_rate: float | None = None  # tokens a second; None until measured, or where it is unknown

    def start(self) -> None:  # noqa: B027 - the event loop may be the worker
        """Start the worker. Called once, in the event loop."""

    @abstractmethod
    async def stop(self) -> None:
        """End every answer, each with its `TicketEnded`."""

    def submit(
        self,
        job: Any,
        *,
        priority: Priority = Priority.CHAT,
        tier: Tier = Tier.DEFAULT,
        key: str = "local",
        supersedes: str | None = None,
        resumed: bool = False,
    ) -> Ticket:
        """Queue a job. `supersedes` names a buffer: older work for it is cancelled. `resumed`: it had begun
        on another engine, so it goes before equals and is not refused for lack of room. Raises QueueFull,
        also for a key that has its share, or Unavailable."""
        ticket = Ticket(job, priority, tier, key, supersedes)
        ticket.resumed = resumed
        self._enqueue(ticket)
        return ticket

    @abstractmethod
    def _enqueue(self, ticket: Ticket) -> None: ...

    @property
    @abstractmethod
    def waiting(self) -> int: ...

    @property
    @abstractmethod
    def running(self) -> int: ...


def updated_rate(rate: float | None, stats: GenerationStats, left: int = 0) -> float | None:
    """The smoothed prefill rate after one more prefill, of which `left` tokens are still to be computed;
    short ones do not measure it."""
    computed = stats.computed - left
    if computed < _MIN_RATE_TOKENS or stats.prefill_seconds <= 0:
        return rate
    measured = computed / stats.prefill_seconds
    return measured if rate is None else 0.7 * rate + 0.3 * measured


def check_room(key: str, waiting: Sequence[Ticket], max_waiting: int, name: str, *, free: int = 0) -> None:
    """Raises QueueFull where `max_waiting` tickets wait, or this key already has its half of these places.
    `free` further tickets only wait for the worker to start them."""
    if len(waiting) >= max_waiting + free:
        raise QueueFull(
            f"{len(waiting)} requests already wait for {name}; try again shortly.", retry_after=1.0
        )
    if key == "local" or len(waiting) < max_waiting // 2:
        return
    own = sum(ticket.key == key for ticket in waiting)
    if own >= max(1, max_waiting // 2):
        raise QueueFull(
            f"{own} requests of this key already wait for {name}; wait for one to end.", retry_after=1.0
        )


def insert_ticket(waiting: list[Ticket], ticket: Ticket, running: Iterable[Ticket]) -> int:
    """Insert a ticket behind those of better rank and behind equals of an earlier round: a key's first ticket
    goes before another's second. Returns its index."""
    ticket.round = -1 if ticket.resumed else _next_round(waiting, ticket, running)
    at, position = len(waiting), (ticket.rank, ticket.round)
    while at and (waiting[at - 1].rank, waiting[at - 1].round) > position:
        at -= 1
    waiting.insert(at, ticket)
    return at


def _next_round(waiting: Sequence[Ticket], ticket: Ticket, running: Iterable[Ticket]) -> int:
    mine = [t.round for t in waiting if t.key == ticket.key and t.rank == ticket.rank]
    if mine:
        return max(mine) + 1
    return sum(other.key == ticket.key and other.rank == ticket.rank for other in running)

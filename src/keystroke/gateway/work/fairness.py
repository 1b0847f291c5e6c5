"""How keys share a queue: at most half of the waiting places each, equals of different keys in turn.

A key's own order is kept. The `local` caller is not limited.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from keystroke.errors import QueueFull
from keystroke.gateway.work.ticket import Ticket


def check_room(key: str, waiting: Sequence[Ticket], most: int, name: str, *, free: int = 0) -> None:
    """Raises QueueFull where `most` tickets wait, or this key already has its half of these places. `free`
    further tickets only wait for the worker to start them."""
    if len(waiting) >= most + free:
        raise QueueFull(
            f"{len(waiting)} requests already wait for {name}; try again shortly.", retry_after=1.0
        )
    if key == "local" or len(waiting) < most // 2:
        return
    held = sum(ticket.key == key for ticket in waiting)
    if held >= max(1, most // 2):
        raise QueueFull(
            f"{held} requests of this key already wait for {name}; wait for one to end.", retry_after=1.0
        )


def insert_ticket(waiting: list[Ticket], ticket: Ticket, running: Iterable[Ticket]) -> int:
    """Insert a ticket behind those of better rank and behind equals of an earlier round: a key's first ticket
    goes before another's second. Returns its index."""
    ticket.round = _next_round(waiting, ticket, running)
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

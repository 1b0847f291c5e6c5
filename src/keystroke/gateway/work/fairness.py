"""How keys share a queue.

Pure; it looks at tickets and says where one goes, whoever works them off. One key takes at most half of
what may wait; equals of different keys take turns; a key's own order stays. Whoever needs no key (`local`)
shares with nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from keystroke.errors import QueueFull
from keystroke.gateway.work.ticket import Ticket


def check_share(key: str, waiting: Sequence[Ticket], most: int, name: str) -> None:
    """Raises QueueFull for a key that already has its half of a queue of `most` places."""
    if key == "local" or len(waiting) < most // 2:
        return
    held = sum(ticket.key == key for ticket in waiting)
    if held >= max(1, most // 2):
        raise QueueFull(
            f"{held} requests of this key already wait for {name}; wait for one to end.", retry_after=1.0
        )


def put_in(waiting: list[Ticket], ticket: Ticket, running: Iterable[Ticket]) -> int:
    """Insert a ticket behind its betters and behind equals of an earlier round: a key's first goes before
    another's second. Returns where it stands now."""
    ticket.round = _next_round(waiting, ticket, running)
    at, place = len(waiting), (ticket.rank, ticket.round)
    while at and (waiting[at - 1].rank, waiting[at - 1].round) > place:
        at -= 1
    waiting.insert(at, ticket)
    return at


def _next_round(waiting: Sequence[Ticket], ticket: Ticket, running: Iterable[Ticket]) -> int:
    mine = [t.round for t in waiting if t.key == ticket.key and t.rank == ticket.rank]
    if mine:
        return max(mine) + 1
    return sum(other.key == ticket.key and other.rank == ticket.rank for other in running)

"""What a queue of tickets is, whoever works them off: an engine here, a server elsewhere, a pool of replicas.

A shape, nothing else. `submit` never blocks; every ticket it gives out gets exactly one `Ended`.
"""

from __future__ import annotations

from typing import Any, Protocol

from keystroke.gateway.work.priority import Priority, Tier
from keystroke.gateway.work.ticket import Ticket


class Queue(Protocol):
    concurrent: int  # answers it works on at a time
    prefill_rate: float | None  # tokens a second; None until measured, or where that is another's affair

    def start(self) -> None:
        """Called once, in the event loop."""

    async def stop(self) -> None:
        """End every answer, each with its terminal item."""

    def submit(
        self,
        job: Any,
        *,
        priority: Priority = Priority.CHAT,
        tier: Tier = Tier.DEFAULT,
        key: str = "local",
        supersedes: str | None = None,
    ) -> Ticket:
        """Queue a job. Raises QueueFull or Unavailable."""

    @property
    def waiting(self) -> int: ...

    @property
    def running(self) -> int: ...

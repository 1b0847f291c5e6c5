"""The interface of a queue of tickets: a local engine, a remote server, or a pool of replicas.

`submit` never blocks; every ticket gets exactly one `TicketEnded`.
"""

from __future__ import annotations

from typing import Any, Protocol

from keystroke.engine.generation import GenerationStats
from keystroke.gateway.work.priority import Priority, Tier
from keystroke.gateway.work.ticket import Ticket

_MIN_RATE_TOKENS = 96


class WorkQueue(Protocol):
    concurrent: int  # answers generated at a time
    prefill_rate: float | None  # tokens a second; None until measured, or where it is unknown

    def start(self) -> None:
        """Start the worker. Called once, in the event loop."""

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
    ) -> Ticket:
        """Queue a job. Raises QueueFull or Unavailable."""

    @property
    def waiting(self) -> int: ...

    @property
    def running(self) -> int: ...


def updated_rate(rate: float | None, stats: GenerationStats) -> float | None:
    """The smoothed prefill rate after one more prefill; short ones do not measure it."""
    if stats.computed < _MIN_RATE_TOKENS or stats.prefill_seconds <= 0:
        return rate
    measured = stats.computed / stats.prefill_seconds
    return measured if rate is None else 0.7 * rate + 0.3 * measured

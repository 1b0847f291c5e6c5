"""Submits work to the server's models from a task's thread.

Work is admitted, queued by priority and accounted like any other. Where a rate limit is reached, submitting
waits for up to two minutes, because a task cannot try again later.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keystroke.engine.base import Interrupt
from keystroke.errors import RateLimited, Unavailable
from keystroke.gateway.access.keys import Caller
from keystroke.gateway.work.priority import Priority, Tier
from keystroke.gateway.work.registry import ServedModel
from keystroke.gateway.work.remote import RemoteJob
from keystroke.gateway.work.scheduler import Job
from keystroke.gateway.work.service import Service, new_id
from keystroke.gateway.work.ticket import SHUTTING_DOWN, TicketItem, TicketSteered
from keystroke.gateway.work.work import Work

_RATE_LIMIT_WAIT = 120.0  # seconds
MakeJob = Callable[[ServedModel], Job | RemoteJob]
OnItem = Callable[[TicketItem], None]


@dataclass(frozen=True, slots=True)
class SchedulerBridge:
    service: Service
    loop: asyncio.AbstractEventLoop
    caller: Caller
    priority: Priority

    def submit(self, model: str, make: MakeJob, on_item: OnItem, interrupt: Interrupt) -> WorkHandle:
        """Submit the job that `make` returns, loading the model first if needed. `on_item` is called on
        the loop. Raises what submitting raises, Interrupted, and Unavailable where the server shuts down."""
        end = time.monotonic() + _RATE_LIMIT_WAIT
        while True:
            interrupt.check()
            submitting = self._submit(model, make, on_item)
            try:
                waiting = asyncio.run_coroutine_threadsafe(submitting, self.loop)
            except RuntimeError:  # the loop is closed
                submitting.close()
                raise Unavailable(SHUTTING_DOWN) from None
            try:
                return WorkHandle(waiting.result(), self.loop)
            except RateLimited as error:
                if time.monotonic() > end:
                    raise
                interrupt.wait(min(max(error.retry_after, 0.05), 5.0))

    async def _submit(self, model: str, make: MakeJob, on_item: OnItem) -> Work:
        entry = await self.service.ensure_loaded(model)  # each time: an idle model is unloaded meanwhile
        job = make(entry)
        work = await self.service.enqueue(
            entry,
            job,
            self.caller,
            priority=self.priority,
            tier=Tier.FLEX,  # a question in a conversation does not wait for a task
            identity=new_id("task"),
        )

        def deliver(items: list[TicketItem]) -> None:
            for item in items:
                if isinstance(item, TicketSteered):
                    work.end_steered_span(item)
                on_item(item)

        work.subscribe(deliver)
        return work


class WorkHandle:
    """Controls submitted work from any thread."""

    def __init__(self, work: Work, loop: asyncio.AbstractEventLoop) -> None:
        self.work, self._loop = work, loop

    def cancel(self) -> None:
        self._post(self.work.cancel)

    def finish(self) -> None:
        self._post(self.work.stop_early)

    def redirect(self, tokens: Sequence[int]) -> None:
        self._post(lambda: self.work.ticket.redirect("task", tokens))

    def _post(self, act: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(act)
        except RuntimeError:  # the loop is closed, and the work has ended
            return

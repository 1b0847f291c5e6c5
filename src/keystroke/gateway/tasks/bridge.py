"""How a thread that is not the loop's has work done by the server's models, and reads what comes of it.

Work goes the one way it always goes: admitted, queued by priority, its books kept. A limit that is
reached is waited out for a while, because a task in the middle has nobody to ask to come back later.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keystroke.engine.base import Interrupt
from keystroke.errors import RateLimited, Unavailable
from keystroke.gateway.access.keys import Caller
from keystroke.gateway.work.priority import Priority
from keystroke.gateway.work.registry import ServedModel
from keystroke.gateway.work.remote import RemoteJob
from keystroke.gateway.work.scheduler import Job
from keystroke.gateway.work.service import SHUTTING_DOWN, Service, new_id
from keystroke.gateway.work.ticket import Item, Steered
from keystroke.gateway.work.work import Work

_PATIENCE = 120.0  # seconds that a limit is waited out
Make = Callable[[ServedModel], Job | RemoteJob]
Read = Callable[[Item], None]


@dataclass(frozen=True, slots=True)
class Bridge:
    service: Service
    loop: asyncio.AbstractEventLoop
    caller: Caller
    priority: Priority

    def submit(self, model: str, make: Make, read: Read, interrupt: Interrupt) -> Handle:
        """Have `make`'s job done by a model, loaded first if it is not; `read` hears of every item on the
        loop. Raises what submitting raises, Interrupted, and Unavailable where the server is going."""
        end = time.monotonic() + _PATIENCE
        while True:
            interrupt.check()
            making = self._submit(model, make, read)
            try:
                waiting = asyncio.run_coroutine_threadsafe(making, self.loop)
            except RuntimeError:  # the loop is closed
                making.close()
                raise Unavailable(SHUTTING_DOWN) from None
            try:
                return Handle(waiting.result(), self.loop)
            except RateLimited as error:
                if time.monotonic() > end:
                    raise
                interrupt.wait(min(max(error.retry_after, 0.05), 5.0))

    async def _submit(self, model: str, make: Make, read: Read) -> Work:
        entry = await self.service.ready(model)  # anew each time: one that was idle is let go meanwhile
        job = make(entry)
        permit = await self.service.admitted(entry, job, self.caller)
        work = self.service.submit(
            entry, job, self.caller, priority=self.priority, identity=new_id("task"), permit=permit
        )

        def heard(items: list[Item]) -> None:
            for item in items:
                if isinstance(item, Steered):
                    work.steered(item)
                read(item)

        work.follow(heard)
        return work


class Handle:
    """Work under way, from any thread."""

    def __init__(self, work: Work, loop: asyncio.AbstractEventLoop) -> None:
        self.work, self._loop = work, loop

    def cancel(self) -> None:
        self._post(self.work.cancel)

    def enough(self) -> None:
        self._post(self.work.enough)

    def redirect(self, tokens: Sequence[int]) -> None:
        self._post(lambda: self.work.ticket.redirect("task", tokens))

    def _post(self, act: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(act)
        except RuntimeError:  # the loop is gone, and the work with it
            return

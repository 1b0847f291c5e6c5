"""The queue of a model on another server.

A remote model has no steps to schedule, only open streams: this queue counts them, queues what exceeds the
count, and passes items on. A stream that fails ends its own ticket only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from keystroke.engine.generation import Chunk, Finish, GenerationParams
from keystroke.engine.remote.remote_model import RemoteModel
from keystroke.engine.remote.wire import StreamItem, Usage
from keystroke.errors import EngineError, KeystrokeError, Unavailable
from keystroke.gateway.work.queue import WorkQueue, check_room, insert_ticket
from keystroke.gateway.work.ticket import (
    SHUTTING_DOWN,
    SUPERSEDED,
    Superseded,
    Ticket,
    TicketEnded,
    TicketMoved,
    TicketStarted,
)

log = logging.getLogger("keystroke.remote")

CHARACTERS_PER_TOKEN = 4  # of code and English, accurate enough for a budget


@dataclass(slots=True)
class RemoteJob:
    """Messages for a conversation, or a prompt (and suffix) for a completion."""

    params: GenerationParams
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)  # additional request fields
    check: Callable[[str], KeystrokeError | None] | None = None  # checks the whole text at its end
    prompt: str = ""
    suffix: str | None = None
    input_tokens = 0  # the server counts them

    @property
    def estimate(self) -> int:
        """The approximate number of prompt tokens, charged until the server has counted."""
        size = len(self.prompt) + len(self.suffix or "")
        size += sum(len(str(m.get("content") or "")) for m in self.messages or ())
        return size // CHARACTERS_PER_TOKEN


class RemoteScheduler(WorkQueue):
    def __init__(self, model: RemoteModel, name: str, *, concurrent: int = 0, max_queue: int = 64) -> None:
        self.model = model
        self.name = name
        self.concurrent = concurrent or 16  # servers batch their streams
        self.max_queue = max_queue
        self._waiting: list[Ticket] = []
        self._tasks: dict[Ticket, asyncio.Task[None]] = {}
        self._resumed: dict[Ticket, asyncio.Event] = {}
        self._stopping = False

    async def stop(self) -> None:
        self._stopping = True
        for ticket in (*self._waiting, *self._tasks):
            ticket.cancel(Unavailable(SHUTTING_DOWN))
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self.model.aclose()

    def _enqueue(self, ticket: Ticket) -> None:
        if self._stopping:
            raise Unavailable(SHUTTING_DOWN)
        for other in (*self._waiting, *self._tasks):
            if ticket.buffer is not None and other.buffer == ticket.buffer:
                other.cancel(Superseded(SUPERSEDED))
        check_room(ticket.key, self._waiting, self.max_queue, self.name)
        ticket.wake = self._wake
        insert_ticket(self._waiting, ticket, self._tasks)
        asyncio.get_running_loop().call_soon(self._sweep)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._tasks)

    def _wake(self) -> None:
        for event in self._resumed.values():
            event.set()
        asyncio.get_running_loop().call_soon(self._sweep)

    async def _wait_until_resumed(self, ticket: Ticket) -> None:
        """Back-pressure: read nothing more from the server while the reader is behind."""
        event = self._resumed[ticket] = asyncio.Event()
        while ticket.paused and ticket.reason is None:
            event.clear()
            await event.wait()
        del self._resumed[ticket]

    def _sweep(self) -> None:
        """Drop cancelled tickets, start those with room, report the positions of the rest."""
        for ticket in [t for t in self._waiting if t.reason is not None]:
            self._waiting.remove(ticket)
            self._end(ticket, ticket.reason)
        while self._waiting and len(self._tasks) < self.concurrent:
            ticket = self._waiting.pop(0)
            ticket.position = 0
            self._tasks[ticket] = asyncio.create_task(self._run(ticket))
        for index, ticket in enumerate(self._waiting, 1):
            if ticket.position != index:
                ticket.position = index
                ticket.deliver([TicketMoved(index)])

    async def _run(self, ticket: Ticket) -> None:
        ticket.timing.started = time.perf_counter()
        ticket.deliver([TicketStarted()])
        error: KeystrokeError | None = None
        text: list[str] = []
        try:
            async with aclosing(self._stream(ticket.job, ticket)) as items:
                last = time.perf_counter()
                async for item in items:
                    now = time.perf_counter()
                    if ticket.paused:
                        await self._wait_until_resumed(ticket)
                    self._count(ticket, item, now - last)
                    last = now
                    if isinstance(item, Chunk):
                        text.append(item.text)
                        if item.finish is Finish.STOP and ticket.job.check is not None:
                            error = ticket.job.check("".join(text))
                    if not isinstance(item, Usage):
                        ticket.deliver([item])
        except KeystrokeError as failure:
            error = failure
        except Exception:
            log.exception("a remote stream failed")
            error = EngineError(f"The stream from {self.name} failed; the server's log says how.")
        finally:
            del self._tasks[ticket]
            self._end(ticket, ticket.reason or error)
            asyncio.get_running_loop().call_soon(self._sweep)

    def _stream(self, job: RemoteJob, ticket: Ticket) -> AsyncGenerator[StreamItem, None]:
        if job.messages is not None:
            return self.model.stream_chat(job.messages, job.params, job.tools, ticket.interrupt, job.fields)
        return self.model.stream_completion(job.prompt, job.suffix, job.params, ticket.interrupt, job.fields)

    @staticmethod
    def _count(ticket: Ticket, item: StreamItem, seconds: float) -> None:
        stats = ticket.stats
        if isinstance(item, Usage):
            stats.prompt_tokens, stats.tokens = item.prompt_tokens, item.completion_tokens
            stats.reused = item.cached_tokens
            stats.computed = item.prompt_tokens - item.cached_tokens
            return
        if isinstance(item, Chunk) and item.finish is Finish.INTERRUPTED:
            return
        if not ticket.timing.first:
            ticket.timing.first = time.perf_counter()
            stats.prefill_seconds = seconds
        else:
            stats.step_seconds.append(seconds)
            stats.steps += 1
        stats.tokens += 1  # one event is about one token, until the server reports its count

    @staticmethod
    def _end(ticket: Ticket, error: KeystrokeError | None) -> None:
        ticket.timing.ended = time.perf_counter()
        ticket.deliver([TicketEnded(error)])

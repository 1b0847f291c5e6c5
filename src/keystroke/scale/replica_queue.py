"""Answers made by a pool of replicas, behind the same tickets as any other.

One task a ticket, which holds all that was said so far. When its replica is lost the call is made again
with that, so another goes on at the very next token; the reader sees a pause. It queues nothing: each replica
has its own queue, priorities and turns of keys, and the router knows their loads; here one key is only kept
from taking more than its share of the places. How replicas are reached is not known
here, only that a stream of replies may break off.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from array import array
from collections.abc import AsyncGenerator, Awaitable
from dataclasses import dataclass, field, replace
from typing import Protocol

from keystroke.engine.generation import Chunk, GenerationStats
from keystroke.errors import EngineError, KeystrokeError, QueueFull, Unavailable
from keystroke.gateway.work.fairness import check_share
from keystroke.gateway.work.priority import Priority, Tier
from keystroke.gateway.work.scheduler import Job
from keystroke.gateway.work.ticket import Ended, Item, Moved, Started, Steered, Superseded, Ticket
from keystroke.scale.call import Call, Reply, Splice, affinity_of
from keystroke.scale.tracing import begin_span, headers_of

log = logging.getLogger("keystroke.scale")

_TELLING = 96  # tokens of a prefill from which its speed is worth noting
_PAUSE = 0.05  # seconds before the first new try; each further one waits twice as long, up to a second


class Lost(Exception):
    """A replica went away in the middle of a call."""


class Pool(Protocol):
    """The replicas of one model."""

    def generate(self, call: Call) -> AsyncGenerator[Reply, None]:
        """Raises Lost where the replica goes; closing it stops the call."""

    def splice(self, wanted: Splice) -> Awaitable[bool]: ...


@dataclass(slots=True)
class _Turn:
    """An answer as far as it has come."""

    prompt: list[int]
    job: Job
    said: list[int] = field(default_factory=list)
    spent: int = 0  # tokens said before a splice: they count against max_tokens
    steers: dict[str, tuple[int, ...]] = field(default_factory=dict)  # not spliced in yet
    call: str = ""
    replica: str = ""
    losses: int = 0
    finished: bool = False  # its last chunk has come

    def spliced(self, steer: str) -> list[int]:
        """The input was put after what was said; returns what stood there before."""
        before = [*self.prompt, *self.said]
        self.prompt = [*before, *self.steers.pop(steer, ())]
        self.spent += len(self.said)
        self.said = []
        return before


class ReplicaQueue:
    """`waiting_at_most`: calls that no replica has begun, before more are refused."""

    def __init__(
        self,
        pool: Pool,
        name: str,
        *,
        waiting_at_most: int = 64,
        patience: float = 120.0,
        concurrent: int = 1,
    ) -> None:
        self.name = name
        self.concurrent = concurrent
        self.prefill_rate: float | None = None
        self._pool = pool
        self._most = waiting_at_most
        self._patience = patience
        self._tasks: dict[Ticket, asyncio.Task[None]] = {}
        self._turns: dict[Ticket, _Turn] = {}
        self._begun: set[Ticket] = set()
        self._awake: dict[Ticket, asyncio.Event] = {}
        self._splices: set[asyncio.Task[None]] = set()
        self._stopping = False

    def start(self) -> None:
        pass  # the loop itself is the worker

    async def stop(self) -> None:
        self._stopping = True
        for ticket in tuple(self._tasks):
            ticket.cancel(Unavailable("The server is shutting down; try again shortly."))
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def submit(
        self,
        job: Job,
        *,
        priority: Priority = Priority.CHAT,
        tier: Tier = Tier.DEFAULT,
        key: str = "local",
        supersedes: str | None = None,
    ) -> Ticket:
        """Send a job to the replica it belongs to. Raises QueueFull, also for a key that has its share."""
        if self._stopping:
            raise Unavailable("The server is shutting down; try again shortly.")
        for other in tuple(self._tasks) if supersedes is not None else ():
            if other.buffer == supersedes:
                other.cancel(Superseded("A newer request of the same buffer took its place."))
        if self.waiting >= self._most:
            raise QueueFull(
                f"{self.waiting} requests already wait for {self.name}; try again shortly.", retry_after=1.0
            )
        check_share(
            key, [t for t in self._tasks if t not in self._begun and t.reason is None], self._most, self.name
        )
        ticket = Ticket(job, priority, tier, key, supersedes)
        turn = self._turns[ticket] = _Turn(list(job.prompt), job)
        self._awake[ticket] = asyncio.Event()
        ticket.wake = lambda: self._woken(ticket)
        self._tasks[ticket] = asyncio.get_running_loop().create_task(self._run(ticket, turn))
        return ticket

    @property
    def waiting(self) -> int:
        return len(self._tasks) - len(self._begun)

    @property
    def running(self) -> int:
        return len(self._begun)

    def _woken(self, ticket: Ticket) -> None:
        """The ticket was cancelled, resumed or redirected."""
        turn = self._turns.get(ticket)
        if turn is None:
            return
        while ticket.redirects:
            steer, tokens = ticket.redirects.popleft()
            turn.steers[steer] = tuple(tokens)
            if turn.replica:
                wanted = Splice(turn.replica, turn.call, steer, tuple(tokens))
                task = asyncio.get_running_loop().create_task(self._splice(wanted))
                self._splices.add(task)
                task.add_done_callback(self._splices.discard)
        self._awake[ticket].set()

    async def _splice(self, wanted: Splice) -> None:
        try:
            await self._pool.splice(wanted)
        except Exception:  # its call breaks off too, and takes the input along when it is made again
            log.info("a splice did not reach its replica")

    # One ticket

    async def _run(self, ticket: Ticket, turn: _Turn) -> None:
        attributes = {"model": self.name, "priority": ticket.priority.label, "prompt": len(turn.prompt)}
        told = begin_span("work", None, attributes)
        error: KeystrokeError | None = None
        try:
            error = await self._answered(ticket, turn, headers_of(told))
        except KeystrokeError as failure:
            error = failure
        except Exception:
            log.exception("a call failed")
            error = EngineError(f"The engine of {self.name} failed on this request; the log says how.")
        finally:
            for held in (self._tasks, self._turns, self._awake):
                held.pop(ticket, None)
            self._begun.discard(ticket)
            if told is not None:
                told.set_attributes({"losses": turn.losses, "tokens": ticket.stats.tokens})
                told.end()
            ticket.timing.ended = time.perf_counter()
            ticket.deliver([Ended(ticket.reason or error, [*turn.prompt, *turn.said])])

    async def _answered(self, ticket: Ticket, turn: _Turn, trace: dict[str, str]) -> KeystrokeError | None:
        """Make the call, and again where its replica is lost, until it ends. Returns what it ended with."""
        deadline = 0.0
        while ticket.reason is None:
            before = len(turn.said)
            try:
                return await self._called(ticket, turn, trace)
            except Lost as loss:
                if turn.finished:
                    return None
                now = time.monotonic()
                if len(turn.said) > before or not deadline:
                    deadline = now + self._patience
                turn.losses += 1
                ticket.preemptions += 1
                log.warning("a replica of %s was lost (%s): its turn is taken up elsewhere", self.name, loss)
                if now > deadline:
                    raise Unavailable(
                        f"No engine of {self.name} could be reached; try again shortly."
                    ) from None
                await self._until_woken(ticket, min(1.0, _PAUSE * 2 ** min(turn.losses, 5)))
        return None

    async def _called(self, ticket: Ticket, turn: _Turn, trace: dict[str, str]) -> KeystrokeError | None:
        call = self._call(ticket, turn, trace)
        turn.call, turn.replica = call.id, ""
        kept = ticket.stats  # of replicas that were lost
        steps = list(kept.step_seconds)
        replies = self._pool.generate(call)
        try:
            while True:
                reply = await self._next(ticket, replies)
                if reply is None:
                    return None  # cancelled
                if reply.replica:
                    turn.replica = reply.replica
                steps += reply.stats.step_seconds
                ticket.stats = _added(turn, reply.stats, steps)
                if reply.read:
                    read = reply.read
                    ticket.read = lambda read=read: read  # type: ignore[misc]
                ended = self._take(ticket, turn, reply)
                if ended is not None:
                    return ended.error
                while ticket.paused and ticket.reason is None:  # the reader is behind
                    await self._until_woken(ticket, None)
        finally:
            await replies.aclose()

    async def _next(self, ticket: Ticket, replies: AsyncGenerator[Reply, None]) -> Reply | None:
        """The next reply; None as soon as the ticket is cancelled. Raises Lost."""
        coming = asyncio.ensure_future(anext(replies))
        try:
            while not coming.done():
                if ticket.reason is not None:
                    return None
                awake = self._awake[ticket]
                awake.clear()
                woken = asyncio.ensure_future(awake.wait())
                await asyncio.wait({coming, woken}, return_when=asyncio.FIRST_COMPLETED)
                woken.cancel()
            try:
                return coming.result()
            except StopAsyncIteration:
                raise Lost("its replies ended early") from None
        finally:
            if not coming.done():
                coming.cancel()
                await asyncio.wait({coming})

    async def _until_woken(self, ticket: Ticket, seconds: float | None) -> None:
        awake = self._awake[ticket]
        awake.clear()
        try:
            await asyncio.wait_for(awake.wait(), seconds)
        except TimeoutError:
            return

    def _call(self, ticket: Ticket, turn: _Turn, trace: dict[str, str]) -> Call:
        job = turn.job
        params = job.params
        if turn.spent and params.max_tokens is not None:
            params = replace(params, max_tokens=max(0, params.max_tokens - turn.spent))
        if turn.spent:
            params = replace(params, begin="")
        return Call(
            secrets.token_hex(8),
            ticket.key,
            affinity_of(job, ticket.key),
            array("i", turn.prompt),
            params,
            ticket.priority,
            ticket.tier,
            job.drafter,
            job.warm,
            ticket.buffer,
            tuple(turn.said),
            tuple(turn.steers.items()),
            trace,
        )

    def _take(self, ticket: Ticket, turn: _Turn, reply: Reply) -> Ended | None:
        """Pass items on, and remember what would be needed to go on elsewhere."""
        passed: list[Item] = []
        ended: Ended | None = None
        lost = ""
        for item in reply.items:
            if isinstance(item, Ended):
                ended = item
                if isinstance(item.error, Unavailable):
                    ended, lost = None, "it shuts down"  # others do not
                elif turn.losses and isinstance(item.error, QueueFull):
                    ended, lost = None, "it is full"  # what was admitted once is not refused in the middle
            elif isinstance(item, Chunk):
                turn.said += item.tokens
                turn.finished = item.finish is not None
                if not ticket.timing.first:
                    ticket.timing.first = time.perf_counter()
                    self._note_rate(ticket.stats)
                passed.append(item)
            elif isinstance(item, Steered):
                reading = replace(item.reading, at=time.perf_counter())
                before = turn.spliced(item.steer_id)
                passed.append(replace(item, tokens=before, reading=reading, kept=len(before)))
            elif isinstance(item, Started):
                if ticket not in self._begun:  # once, however many replicas begin it
                    self._begun.add(ticket)
                    ticket.position = 0
                    ticket.timing.started = time.perf_counter()
                    passed.append(item)
            elif isinstance(item, Moved):
                if ticket not in self._begun:
                    ticket.position = item.position
                    passed.append(item)
            else:
                passed.append(item)
        if passed:
            ticket.deliver(passed)
        if lost:
            raise Lost(lost)
        return ended

    def _note_rate(self, stats: GenerationStats) -> None:
        if stats.computed >= _TELLING and stats.prefill_seconds > 0:
            rate = stats.computed / stats.prefill_seconds
            self.prefill_rate = rate if self.prefill_rate is None else 0.7 * self.prefill_rate + 0.3 * rate


def _added(turn: _Turn, stats: GenerationStats, steps: list[float]) -> GenerationStats:
    """The counters of the whole answer. What is computed again after a loss is nobody's to pay."""
    computed = (
        min(stats.computed, max(0, len(turn.job.prompt) - stats.reused)) if turn.losses else stats.computed
    )
    return replace(
        stats,
        prompt_tokens=len(turn.job.prompt),
        computed=computed,
        tokens=stats.tokens + turn.spent if turn.losses else stats.tokens,
        steps=len(steps),
        step_seconds=steps,
    )

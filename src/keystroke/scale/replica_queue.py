"""The queue of a model that runs on a pool of replicas.

One task per ticket keeps all tokens generated so far. When its replica is lost the call is repeated with
them, so another replica continues at the next token; the reader sees a pause. Queueing and priorities are
the replicas', loads the router's; here only the share of one key is limited. Independent of Ray: a stream of
replies may break off.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from array import array
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from keystroke.engine.generation import Chunk, GenerationStats
from keystroke.errors import EngineError, KeystrokeError, QueueFull, Unavailable
from keystroke.gateway.work.queue import WorkQueue, check_room, updated_rate
from keystroke.gateway.work.scheduler import Job
from keystroke.gateway.work.ticket import (
    SHUTTING_DOWN,
    SUPERSEDED,
    Superseded,
    Ticket,
    TicketEnded,
    TicketItem,
    TicketMoved,
    TicketStarted,
    TicketSteered,
)
from keystroke.scale.call import ReplicaCall, ReplicaReply, Splice, affinity_of
from keystroke.scale.tracing import begin_span, headers_of

log = logging.getLogger("keystroke.scale")

_PAUSE = 0.05  # seconds before the first retry; each further one waits twice as long, up to a second


class ReplicaLost(Exception):
    """A replica disappeared during a call."""


class ReplicaPool(Protocol):
    """The replicas of one model."""

    def generate(self, call: ReplicaCall) -> AsyncGenerator[ReplicaReply, None]:
        """Raises ReplicaLost; closing the generator cancels the call."""

    def splice(self, splice: Splice) -> Awaitable[bool]: ...


@dataclass(slots=True)
class _Progress:
    """An answer as generated so far."""

    prompt: list[int]
    job: Job
    generated: list[int] = field(default_factory=list)
    spent: int = 0  # tokens generated before a splice: they count against max_tokens
    steers: dict[str, tuple[int, ...]] = field(default_factory=dict)  # not spliced in yet
    call: str = ""
    replica: str = ""
    losses: int = 0
    finished: bool = False  # its last chunk was received
    awake: asyncio.Event = field(default_factory=asyncio.Event)  # cancelled, resumed or redirected
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    def splice(self, steer: str) -> list[int]:
        """Append steering input to the answer; returns the tokens before it."""
        before = [*self.prompt, *self.generated]
        self.prompt = [*before, *self.steers.pop(steer, ())]
        self.spent += len(self.generated)
        self.generated = []
        return before


class ReplicaQueue(WorkQueue):
    """`waiting_at_most`: calls that no replica has started, before more are refused."""

    def __init__(
        self,
        pool: ReplicaPool,
        name: str,
        *,
        waiting_at_most: int = 64,
        patience: float = 120.0,
        concurrent: int = 1,
    ) -> None:
        self.name = name
        self.concurrent = concurrent
        self._pool = pool
        self._most = waiting_at_most
        self._patience = patience
        self._tasks: dict[Ticket, asyncio.Task[None]] = {}
        self._turns: dict[Ticket, _Progress] = {}
        self._started: set[Ticket] = set()
        self._splices: set[asyncio.Task[None]] = set()
        self._stopping = False

    async def stop(self) -> None:
        self._stopping = True
        for ticket in tuple(self._tasks):
            ticket.cancel(Unavailable(SHUTTING_DOWN))
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _enqueue(self, ticket: Ticket) -> None:
        if self._stopping:
            raise Unavailable(SHUTTING_DOWN)
        for other in tuple(self._tasks) if ticket.buffer is not None else ():
            if other.buffer == ticket.buffer:
                other.cancel(Superseded(SUPERSEDED))
        waiting = [t for t in self._tasks if t not in self._started and t.reason is None]
        check_room(ticket.key, waiting, self._most, self.name)
        begun = list(ticket.job.generated)  # by a gateway that is gone
        turn = self._turns[ticket] = _Progress(list(ticket.job.prompt), ticket.job, begun)
        ticket.wake = lambda: self._on_wake(ticket)
        self._tasks[ticket] = asyncio.get_running_loop().create_task(self._run(ticket, turn))

    @property
    def waiting(self) -> int:
        return len(self._tasks) - len(self._started)

    @property
    def running(self) -> int:
        return len(self._started)

    @property
    def oldest_waiting(self) -> float:
        """Seconds since the oldest call arrived that no replica has started; 0 without one."""
        waiting = [t.timing.submitted for t in self._tasks if t not in self._started]
        return time.perf_counter() - min(waiting) if waiting else 0.0

    def _on_wake(self, ticket: Ticket) -> None:
        """The ticket was cancelled, resumed or redirected."""
        turn = self._turns.get(ticket)
        if turn is None:
            return
        while ticket.redirects:
            steer, tokens = ticket.redirects.popleft()
            turn.steers[steer] = tuple(tokens)
            if turn.replica:
                splice = Splice(turn.replica, turn.call, steer, tuple(tokens))
                task = asyncio.get_running_loop().create_task(self._splice(splice))
                self._splices.add(task)
                task.add_done_callback(self._splices.discard)
        turn.awake.set()
        if ticket.reason is not None:
            turn.cancelled.set()

    async def _splice(self, splice: Splice) -> None:
        try:
            await self._pool.splice(splice)
        except Exception:  # its call breaks off too, and is repeated with the input
            log.info("a splice did not reach its replica")

    # One ticket

    async def _run(self, ticket: Ticket, turn: _Progress) -> None:
        attributes = {"model": self.name, "priority": ticket.priority.label, "prompt": len(turn.prompt)}
        recorded = begin_span("work", None, attributes)
        error: KeystrokeError | None = None
        try:
            error = await self._run_call(ticket, turn, headers_of(recorded))
        except KeystrokeError as failure:
            error = failure
        except Exception:
            log.exception("a call failed")
            error = EngineError(f"The engine of {self.name} failed on this request; the log says how.")
        finally:
            for tickets in (self._tasks, self._turns):
                tickets.pop(ticket, None)
            self._started.discard(ticket)
            if recorded is not None:
                recorded.set_attributes({"losses": turn.losses, "tokens": ticket.stats.tokens})
                recorded.end()
            ticket.timing.ended = time.perf_counter()
            ticket.deliver([TicketEnded(ticket.reason or error, [*turn.prompt, *turn.generated])])

    async def _run_call(
        self, ticket: Ticket, turn: _Progress, trace: dict[str, str]
    ) -> KeystrokeError | None:
        """Call, and repeat where the replica is lost, until the answer ends. Returns its error."""
        deadline = 0.0
        while ticket.reason is None:
            before = len(turn.generated)
            try:
                return await self._try_call(ticket, turn, trace)
            except ReplicaLost as loss:
                if turn.finished:
                    return None
                now = time.monotonic()
                if len(turn.generated) > before or not deadline:
                    deadline = now + self._patience
                turn.losses += 1
                ticket.preemptions += 1
                log.warning("a replica of %s was lost (%s): its answer continues on another", self.name, loss)
                if now > deadline:
                    raise Unavailable(
                        f"No engine of {self.name} could be reached; try again shortly."
                    ) from None
                await _wait_until_woken(turn, min(1.0, _PAUSE * 2 ** min(turn.losses, 5)))
        return None

    async def _try_call(
        self, ticket: Ticket, turn: _Progress, trace: dict[str, str]
    ) -> KeystrokeError | None:
        """One call to its end, or until the ticket is cancelled. Raises ReplicaLost."""
        reading = asyncio.ensure_future(self._read_replies(ticket, turn, self._call(ticket, turn, trace)))
        cancelled = asyncio.ensure_future(turn.cancelled.wait())
        try:
            await asyncio.wait({reading, cancelled}, return_when=asyncio.FIRST_COMPLETED)
            return reading.result() if reading.done() else None
        finally:
            reading.cancel()
            cancelled.cancel()
            await asyncio.wait({reading, cancelled})

    async def _read_replies(
        self, ticket: Ticket, turn: _Progress, call: ReplicaCall
    ) -> KeystrokeError | None:
        turn.call, turn.replica = call.id, ""
        steps = list(ticket.stats.step_seconds)  # of replicas that were lost
        async with aclosing(self._pool.generate(call)) as replies:
            async for reply in replies:
                if reply.replica:
                    turn.replica = reply.replica
                steps += reply.stats.step_seconds
                ticket.stats = _total_stats(turn, reply.stats, steps)
                if reply.read:
                    read = reply.read
                    ticket.read = lambda read=read: read  # type: ignore[misc]
                ended = self._handle_reply(ticket, turn, reply)
                if ended is not None:
                    return ended.error
                while ticket.paused and ticket.reason is None:  # the reader is behind
                    await _wait_until_woken(turn, None)
        raise ReplicaLost("its replies ended early")

    def _call(self, ticket: Ticket, turn: _Progress, trace: dict[str, str]) -> ReplicaCall:
        job = turn.job
        params = job.params
        if turn.spent and params.max_tokens is not None:
            params = replace(params, max_tokens=max(0, params.max_tokens - turn.spent))
        if turn.spent:
            params = replace(params, begin="")
        return ReplicaCall(
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
            tuple(turn.generated),
            tuple(turn.steers.items()),
            trace,
            resumed=ticket in self._started or bool(job.generated),
        )

    def _handle_reply(self, ticket: Ticket, turn: _Progress, reply: ReplicaReply) -> TicketEnded | None:
        """Deliver the items and record what another replica would need to continue."""
        passed: list[TicketItem] = []
        ended: TicketEnded | None = None
        lost = ""
        for item in reply.items:
            if isinstance(item, TicketEnded):
                ended = item
                if isinstance(item.error, Unavailable):
                    ended, lost = None, "it shuts down"
                elif turn.losses and isinstance(item.error, QueueFull):
                    ended, lost = None, "it is full"  # an admitted call is not refused later
            elif isinstance(item, Chunk):
                turn.generated += item.tokens
                turn.finished = item.finish is not None
                if not ticket.timing.first:
                    ticket.timing.first = time.perf_counter()
                    self.prefill_rate = updated_rate(self.prefill_rate, ticket.stats)
                passed.append(item)
            elif isinstance(item, TicketSteered):
                counters = replace(item.counters, at=time.perf_counter())
                before = turn.splice(item.steer_id)
                passed.append(replace(item, tokens=before, counters=counters, kept_tokens=len(before)))
            elif isinstance(item, TicketStarted):
                if ticket not in self._started:  # once, however many replicas start it
                    self._started.add(ticket)
                    ticket.position = 0
                    ticket.timing.started = time.perf_counter()
                    passed.append(item)
            elif isinstance(item, TicketMoved):
                if ticket not in self._started:
                    ticket.position = item.position
                    passed.append(item)
            else:
                passed.append(item)
        if passed:
            ticket.deliver(passed)
        if lost:
            raise ReplicaLost(lost)
        return ended


async def _wait_until_woken(turn: _Progress, seconds: float | None) -> None:
    turn.awake.clear()
    with suppress(TimeoutError):
        await asyncio.wait_for(turn.awake.wait(), seconds)


def _total_stats(turn: _Progress, stats: GenerationStats, steps: list[float]) -> GenerationStats:
    """The counters of the whole answer; what is computed again after a loss is not charged."""
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

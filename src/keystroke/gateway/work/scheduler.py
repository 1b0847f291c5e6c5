"""Schedules the answers of one engine, on one thread.

Only this thread touches the engine. Each turn steps the best-ranked answers, as many as the engine batches,
equals in rotation. Better work that arrives goes first at the next step and interrupts a long prefill, which
continues later from where it stopped. An answer whose reader is behind gives its place to one that waits.
Items are posted to the event loop in batches, each with one wake-up.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from keystroke.engine.base import Interrupt, Session
from keystroke.engine.generation import Chunk, Generation, GenerationParams
from keystroke.engine.mixing import Mixing, Predictor
from keystroke.engine.model import Model
from keystroke.engine.speculative.base import Drafter
from keystroke.engine.token_healing import token_index
from keystroke.errors import EngineError, Interrupted, KeystrokeError, Unavailable
from keystroke.gateway.work.priority import Priority, Tier, rank
from keystroke.gateway.work.queue import WorkQueue, check_room, insert_ticket, updated_rate
from keystroke.gateway.work.ticket import (
    SHUTTING_DOWN,
    SUPERSEDED,
    CounterSnapshot,
    Superseded,
    Ticket,
    TicketEnded,
    TicketItem,
    TicketMoved,
    TicketStarted,
    TicketSteered,
)

log = logging.getLogger("keystroke.scheduler")

_LEAST_CONCURRENT = 2
_STARVED_S = 0.5  # seconds without a step after which a conversation gets one
_EDIT_RANK = rank(Priority.EDIT, Tier.DEFAULT)


@dataclass(slots=True)
class Job:
    """An answer to generate. `warm` only fills the cache with the prompt. `generated`: its first tokens,
    generated elsewhere. `affinity` identifies the conversation or buffer, to choose among engines that hold
    different prefixes. `predictor` is mixed into the model's distribution, on local engines only. `drafts`:
    whether the engine's own drafts may be used. `protected`: lengths of prefixes of the prompt that stay in
    the cache ahead of others, and for how many seconds."""

    prompt: Sequence[int]
    params: GenerationParams
    drafter: Drafter | None = None
    warm: bool = False
    generated: Sequence[int] = ()
    affinity: str = ""
    predictor: Predictor | None = None
    drafts: bool = True
    protected: Sequence[tuple[int, float]] = ()

    @property
    def input_tokens(self) -> int:
        return len(self.prompt)

    @property
    def estimate(self) -> int:
        return len(self.prompt)


@dataclass(slots=True)
class RunningTicket:
    """A ticket that the engine works on, with its session."""

    ticket: Ticket
    session: Session
    generation: Generation
    prefilled: bool = False
    displaced: bool = False  # it gave up its place and its KV while its reader was behind
    turn: int = 0  # when it last stepped; the smallest of equals goes next
    stepped: float = field(default_factory=time.perf_counter)  # the time of its last step


class Scheduler(WorkQueue):
    """`concurrent` answers at a time among those of equal or better rank; 0 means the engine's batch size, at
    least two, so that a question does not wait for the end of a long answer. `share_prefixes`: keys share the
    prefix cache."""

    def __init__(
        self, model: Model, *, concurrent: int = 0, max_queue: int = 64, share_prefixes: bool = False
    ) -> None:
        self.model = model
        self.share_prefixes = share_prefixes
        self.concurrent = concurrent or max(_LEAST_CONCURRENT, model.engine.max_batch)
        self.max_queue = max_queue
        self._lock = threading.Condition()
        self._waiting: list[Ticket] = []  # best rank first, then keys in turn, then arrival
        self._running: list[RunningTicket] = []
        self._prefilling: Ticket | None = None
        self._stopping = False
        self._turn = 0
        self._outbox: deque[tuple[Ticket, TicketItem]] = deque()
        self._posted = False  # a delivery is already scheduled
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    # From the event loop

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name=f"engine-{self.model.name}", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """End every answer with its `TicketEnded`, then the thread. The engine stays open."""
        with self._lock:
            self._stopping = True
            for ticket in (*self._waiting, *(r.ticket for r in self._running)):
                ticket.reason = ticket.reason or Unavailable(SHUTTING_DOWN)
                ticket.interrupt.set()
            self._lock.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        self._deliver()

    def _enqueue(self, ticket: Ticket) -> None:
        ticket.wake = self._wake
        with self._lock:
            if self._stopping:
                raise Unavailable(SHUTTING_DOWN)
            if ticket.buffer is not None:
                self._supersede(ticket.buffer)
            # Tickets with a free place only wait for the thread; they do not count as queued.
            free = max(0, self.concurrent - len(self._rivals(ticket)))
            if not ticket.resumed:
                check_room(ticket.key, self._waiting, self.max_queue, self.model.name, free=free)
            at = insert_ticket(self._waiting, ticket, (r.ticket for r in self._running))
            if at or not self._has_room(ticket):
                self._report_positions()
            if self._prefilling is not None and self._prefilling.rank > ticket.rank:
                self._prefilling.interrupt.set()  # not cancelled: it continues later
            self._lock.notify()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    # Under the lock

    def _supersede(self, buffer: str) -> None:
        for ticket in (*self._waiting, *(r.ticket for r in self._running)):
            if ticket.buffer == buffer and ticket.reason is None:
                ticket.reason = Superseded(SUPERSEDED)
                ticket.interrupt.set()

    def _has_room(self, ticket: Ticket) -> bool:
        """Capacity is counted among equal and better ranks, so lower work never delays higher work. A resumed
        answer has a place at once and takes turns with those that run: its reader saw it begin."""
        return ticket.resumed or len(self._rivals(ticket)) < self.concurrent

    def _rivals(self, ticket: Ticket) -> list[RunningTicket]:
        """The answers of equal or better rank that have a place."""
        return [r for r in self._running if r.ticket.rank <= ticket.rank and not r.displaced]

    def _make_room(self, ticket: Ticket) -> bool:
        """Whether there is a place for `ticket`, after answers whose readers are behind gave up theirs."""
        behind = [r for r in self._rivals(ticket) if r.ticket.paused and r.ticket.reason is None]
        while behind and not self._has_room(ticket):
            self._run_or_finish(behind.pop(0), self._displace)
        return self._has_room(ticket)

    @staticmethod
    def _displace(running: RunningTicket) -> None:
        running.displaced, running.prefilled = True, False
        running.generation.release_session()

    def _return_displaced(self) -> None:
        """Give places to displaced answers whose readers have caught up, before those that wait."""
        displaced = [r for r in self._running if r.displaced]
        caught_up = [r for r in displaced if not r.ticket.paused and r.ticket.reason is None]
        for running in sorted(caught_up, key=lambda running: running.ticket.rank):
            if not self._make_room(running.ticket):
                break
            self._run_or_finish(running, self._reopen)

    def _report_positions(self) -> None:
        for index, ticket in enumerate(self._waiting, 1):
            if ticket.position != index:
                ticket.position = index
                self._post(ticket, TicketMoved(index))

    def _pick(self) -> list[RunningTicket] | None:
        """The answers that can step, best first; None when there is nothing to do."""
        self._return_displaced()
        waiting = self._waiting
        if waiting:
            before = len(waiting)
            for ticket in [t for t in waiting if t.reason is not None]:
                waiting.remove(ticket)
                self._end(ticket, ticket.reason)
            while waiting and self._make_room(waiting[0]):
                self._admit(waiting.pop(0))
            if len(waiting) < before:
                self._report_positions()
        ready = [
            r for r in self._running if r.ticket.reason is not None or not (r.ticket.paused or r.displaced)
        ]
        if not ready:
            return None
        if len(ready) > 1:
            now = time.perf_counter()
            ready.sort(key=lambda running: _step_order(running, now))
        return ready

    def _admit(self, ticket: Ticket) -> None:
        job: Job = ticket.job
        ticket.position = 0
        ticket.timing.started = time.perf_counter()
        try:
            session = self._open_session(ticket)
            for length, seconds in job.protected:
                self.model.engine.protect_prefix(job.prompt[:length], seconds, self._scope(ticket))
            generation = Generation(
                self.model,
                session,
                job.prompt,
                job.params,
                drafter=job.drafter,
                interrupt=ticket.interrupt,
                generated=job.generated,
                mixing=Mixing(job.predictor, job.drafts),
            )
        except Exception as error:
            self._end(ticket, _as_keystroke(error))
            return
        ticket.stats = generation.stats
        self._running.append(RunningTicket(ticket, session, generation))
        self._post(ticket, TicketStarted())

    def _reopen(self, running: RunningTicket) -> None:
        running.displaced = False
        running.session = running.generation.session = self._open_session(running.ticket)

    def _open_session(self, ticket: Ticket) -> Session:
        session = self.model.engine.session(self._scope(ticket))
        ticket.read = lambda: session.resident
        return session

    def _scope(self, ticket: Ticket) -> str:
        return "" if self.share_prefixes else ticket.key

    # The engine thread

    def _work(self) -> None:
        while True:
            with self._lock:
                while (ready := self._pick()) is None:
                    if self._stopping and not self._running:
                        return
                    self._lock.wait()
            self._turn += 1
            self._step(ready)

    def _step(self, ready: list[RunningTicket]) -> None:
        """One engine step for the best of `ready`: its prefill, or a decode step batched with others."""
        best = ready[0]
        best.turn, best.stepped = self._turn, time.perf_counter()
        if not best.prefilled:
            self._run_or_finish(best, self._prefill)
            return
        engine = self.model.engine
        # Where a larger batch slows a step, only equals join it: lower work must not delay higher work.
        company = [
            r
            for r in ready[1:]
            if r.prefilled and (r.ticket.rank == best.ticket.rank or not engine.batch_slows)
        ]
        others = company[: engine.max_batch - 1]
        if not others:
            self._run_or_finish(best, self._advance)
            return
        batch = [best, *others]
        for running in others:
            running.turn, running.stepped = self._turn, best.stepped
        self._advance_together(batch)

    def _run_or_finish(self, running: RunningTicket, act: Callable[[RunningTicket], None]) -> None:
        ticket = running.ticket
        try:
            if ticket.reason is not None:
                raise ticket.reason
            act(running)
        except Exception as error:
            self._finish(running, ticket.reason or _as_keystroke(error))

    def _prefill(self, running: RunningTicket) -> None:
        ticket = running.ticket
        self._prefilling = ticket
        try:
            running.generation.prefill()
            left = running.session.length - running.session.resident  # to the next step
            self.prefill_rate = updated_rate(self.prefill_rate, running.generation.stats, left)
            if ticket.job.warm:
                running.session.warm(ticket.interrupt)
        except Interrupted:
            if ticket.reason is not None:
                raise
            if ticket.job.warm:
                self._finish(running, None)  # closing returns its KV to the cache
                return
            # Preempted: keep what was computed and continue after the better work.
            ticket.preemptions += 1
            ticket.interrupt = running.generation.interrupt = Interrupt()
            if ticket.reason is not None:  # cancelled while the interrupt was replaced
                raise
            return
        finally:
            self._prefilling = None
        if ticket.interrupt.is_set and ticket.reason is None:
            ticket.interrupt = running.generation.interrupt = Interrupt()  # preempted after the last chunk
        running.prefilled = True
        if ticket.job.warm:
            self._finish(running, None)
            token_index(self.model.tokenizer)  # takes a tenth of a second once: before the first half word

    def _advance(self, running: RunningTicket) -> None:
        if running.ticket.redirects:
            self._redirect(running)
        self._emit(running, running.generation.advance())

    def _emit(self, running: RunningTicket, chunk: Chunk) -> None:
        """Post a chunk; the last one ends the answer."""
        ticket = running.ticket
        if not ticket.timing.first:
            ticket.timing.first = time.perf_counter()
        if chunk.finish is None or ticket.reason is None or chunk.text:
            self._post(ticket, chunk)
        if chunk.finish is not None:
            self._finish(running, ticket.reason)

    def _advance_together(self, batch: list[RunningTicket]) -> None:
        requests = []
        for running in batch:
            ticket = running.ticket
            if ticket.reason is not None:
                self._finish(running, ticket.reason)
                continue
            try:
                if ticket.redirects:
                    self._redirect(running)
                request = running.generation.next_step()
            except Exception as error:
                self._finish(running, _as_keystroke(error))
                continue
            if request is None:
                self._run_or_finish(running, self._advance)
            else:
                requests.append((running, request))
        if not requests:
            return
        began = time.perf_counter()
        try:
            steps = self.model.engine.step_many([request for _, request in requests])
        except Exception as error:
            for running, _ in requests:
                self._finish(running, running.ticket.reason or _as_keystroke(error))
            return
        spent = time.perf_counter() - began
        for (running, request), step in zip(requests, steps, strict=True):
            self._emit(running, running.generation.apply_step(step, spent, len(request.draft)))

    def _redirect(self, running: RunningTicket) -> None:
        ticket = running.ticket
        steer_id, tokens = ticket.redirects.popleft()
        generation = running.generation
        kept = list(running.session.tokens)
        counters = CounterSnapshot.of(generation.stats, time.perf_counter())
        generation.redirect(tokens)
        self._post(ticket, TicketSteered(steer_id, len(kept), running.session.length, kept, counters))

    def _finish(self, running: RunningTicket, error: KeystrokeError | None) -> None:
        with self._lock:
            self._running.remove(running)
        session = running.session
        # The end is posted first, so that the client does not wait for the session to close. Its tokens are
        # not copied: nobody changes them after that.
        self._end(running.ticket, error, session.tokens)
        try:
            session.close()
        except Exception:
            log.exception("closing a session failed")

    def _end(self, ticket: Ticket, error: KeystrokeError | None, tokens: Sequence[int] = ()) -> None:
        ticket.timing.ended = time.perf_counter()
        self._post(ticket, TicketEnded(error, tokens))

    # Thread to loop: one wake-up per batch, not per token

    def _post(self, ticket: Ticket, item: TicketItem) -> None:
        self._outbox.append((ticket, item))
        if not self._posted and self._loop is not None:
            self._posted = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed
                self._posted = False

    def _deliver(self) -> None:
        self._posted = False
        outbox = self._outbox
        grouped: dict[Ticket, list[TicketItem]] = {}
        while outbox:
            ticket, item = outbox.popleft()
            if not outbox and not grouped:
                _deliver_items(ticket, [item])  # the common case
                return
            grouped.setdefault(ticket, []).append(item)
        for ticket, items in grouped.items():
            _deliver_items(ticket, items)

    def _wake(self) -> None:
        with self._lock:
            self._lock.notify()


def _deliver_items(ticket: Ticket, items: list[TicketItem]) -> None:
    try:
        ticket.deliver(items)
    except Exception:
        log.exception("a reader failed")
        ticket.cancel()


def _step_order(running: RunningTicket, now: float) -> tuple[int, int]:
    """Better ranks first, equals in rotation. A conversation that has not stepped for a while counts as an
    edit: an edit slows it down and never stops it. Work of the flex tier does not begin its prefill that
    way, because it would stop the others for seconds."""
    ticket = running.ticket
    step_rank = ticket.rank
    steps = running.prefilled or ticket.tier is not Tier.FLEX
    if ticket.priority is Priority.CHAT and steps and now - running.stepped > _STARVED_S:
        step_rank = min(step_rank, _EDIT_RANK)
    return step_rank, running.turn


def _as_keystroke(error: BaseException) -> KeystrokeError:
    if isinstance(error, KeystrokeError):
        return error
    log.error("the engine failed", exc_info=error)
    return EngineError("The engine failed on this request; the server's log says how.")

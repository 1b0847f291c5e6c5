"""One engine with its queue, as a replica: calls in, replies out.

The scheduler of a single machine does the work; this module transports its items. A replica holds no
conversation and no user: everything it needs is in the call, so losing a replica loses time only. Tokens of
conversations that run beside each other are sent a few at a time, so that the number of replies does not grow
with theirs; first tokens, ends and whatever a person waits for as a whole (ghost text, edits) go at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from keystroke.engine.base import EngineStats, ModelInfo
from keystroke.engine.generation import Chunk, GenerationStats
from keystroke.engine.model import Model
from keystroke.engine.speculative import AdaptiveDrafter, Drafter, drafter_for, verify_cost
from keystroke.errors import KeystrokeError, Unavailable
from keystroke.gateway.app import tune_interpreter
from keystroke.gateway.work.priority import Priority
from keystroke.gateway.work.registry import ServedModel
from keystroke.gateway.work.scheduler import Job
from keystroke.gateway.work.ticket import Ticket, TicketEnded, TicketItem, TicketMoved, TicketSteered
from keystroke.scale.call import ModelDescription, ReplicaCall, ReplicaReply, Splice
from keystroke.scale.tracing import begin_span, start_tracing, stop_tracing

_PROGRESS_INTERVAL = 0.25  # seconds between two replies while a call waits or reads its prompt
_REPLY_SHARE = 0.002  # seconds between two replies of a conversation, for each other one that runs
_LONGEST_HOLD = 0.05  # seconds: text that comes twenty times a second reads as a stream

Load = Callable[[], ServedModel]


class EngineReplica:
    """`load` loads the model in this process. `name` is Ray's id of the replica."""

    def __init__(self, load: Load, name: str, traces: str | None = None) -> None:
        tune_interpreter()
        start_tracing(traces, "engine")
        self._name = name
        self._entry = load()
        self._tickets: dict[str, Ticket] = {}
        self._talking = 0  # conversations whose first token was sent
        self._started = False

    async def generate(self, call: ReplicaCall) -> AsyncIterator[ReplicaReply]:
        """The replies to a call. Leaving early cancels it. Engine errors are not raised but part of the last
        item."""
        self._start()
        recorded = begin_span("engine", call.trace, {"replica": self._name, "model": self._entry.name})
        try:
            ticket = self._submit(call)
        except KeystrokeError as error:
            yield ReplicaReply((TicketEnded(error),), GenerationStats(), replica=self._name)
            return
        self._tickets[call.id] = ticket
        inbox = _Inbox(ticket)
        for steer, tokens in call.steers:
            ticket.redirect(steer, tokens)
        first = self._name
        try:
            while not inbox.ended:
                items = await inbox.next_items(self._hold(inbox))
                if call.priority >= Priority.CHAT and not inbox.joins and _has_text(items):
                    inbox.joins = True
                    self._talking += 1
                stats = inbox.new_stats(ticket.stats)
                read = 0 if ticket.timing.first else ticket.read()
                yield ReplicaReply(tuple(map(_without_tokens, items)), stats, read, first)
                first = ""
        finally:
            self._talking -= inbox.joins
            del self._tickets[call.id]
            ticket.cancel()
            if recorded is not None:
                recorded.set_attributes({"reused": ticket.stats.reused, "computed": ticket.stats.computed})
                recorded.set_attributes({"tokens": ticket.stats.tokens, "steps": ticket.stats.steps})
                recorded.end()

    async def splice(self, splice: Splice) -> bool:
        """Splice input into a running call; False where it does not run here."""
        ticket = self._tickets.get(splice.call)
        if ticket is None or ticket.done:
            return False
        ticket.redirect(splice.steer, splice.tokens)
        return True

    async def describe(self) -> ModelDescription:
        model = self._model
        return ModelDescription(
            self._entry.name,
            model.engine.info,
            model.tokenizer,
            model.chat,
            model.fim,
            model.languages,
            model.conservative_languages,
            self._entry.edits,
            verify_cost(model.engine),
            max(1, model.engine.max_batch),
        )

    async def close(self) -> None:
        """End remaining work, each with its `TicketEnded`, and free the engine."""
        if self._started:
            await self._entry.scheduler.stop()
        await asyncio.to_thread(self._model.close)
        stop_tracing()

    def check_health(self) -> None:
        """Raises Unavailable where the engine's thread has ended."""
        thread = getattr(self._entry.scheduler, "_thread", None)
        if self._started and thread is not None and not thread.is_alive():
            raise Unavailable("The engine's thread has ended.")

    @property
    def tokens_in_flight(self) -> int:
        """Prompt and answer tokens of all calls here, running or waiting."""
        return sum(t.job.input_tokens + t.stats.tokens for t in self._tickets.values())

    @property
    def model_name(self) -> str:
        return self._entry.name

    def engine_state(self) -> tuple[ModelInfo, EngineStats]:
        """The model's properties and the engine's memory, for metrics."""
        return self._model.engine.info, self._model.engine.stats()

    @property
    def _model(self) -> Model:
        assert self._entry.model is not None  # remote models have no replicas
        return self._entry.model

    def _hold(self, inbox: _Inbox) -> float:
        """Seconds between two replies to a call, unless something comes that cannot wait."""
        if inbox.joins:
            return min(_LONGEST_HOLD, _REPLY_SHARE * (self._talking - 1))
        return _PROGRESS_INTERVAL

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self._entry.scheduler.start()

    def _submit(self, call: ReplicaCall) -> Ticket:
        job = Job(call.prompt, call.params, self._drafter(call.drafter), call.warm, call.generated)
        return self._entry.scheduler.submit(
            job,
            priority=call.priority,
            tier=call.tier,
            key=call.key,
            supersedes=call.buffer,
            resumed=call.resumed,
        )

    def _drafter(self, sent: Drafter | None) -> Drafter | None:
        """The gateway's drafter, extended by the draft model or engine of this replica."""
        if isinstance(sent, AdaptiveDrafter):
            if self._model.draft is not None:
                return drafter_for(self._model.engine, draft=self._model.draft)
            sent.use_engine(self._model.engine)
        return sent


class _Inbox:
    """Items of a ticket that were not sent yet. Positions in the queue, and chunks where `joins` is set, wait
    for more of their kind; anything else is sent at once, with what waits."""

    def __init__(self, ticket: Ticket) -> None:
        self.ended = False
        self.joins = False
        self._loop = asyncio.get_running_loop()
        self._items: list[TicketItem] = []
        self._arrived = asyncio.Event()  # there is something to send now
        self._holds = False
        self._sent = 0  # step times already sent
        ticket.on_items = self._put

    def _put(self, items: list[TicketItem]) -> None:
        self._items += items
        if not (self._holds and all(self._can_wait(item) for item in items)):
            self._arrived.set()

    def _can_wait(self, item: TicketItem) -> bool:
        return isinstance(item, TicketMoved) or (self.joins and type(item) is Chunk)

    def _release(self) -> None:
        self._holds = False
        if self._items or not self.joins:  # a call that waits or reads its prompt reports how far it is
            self._arrived.set()

    async def next_items(self, hold: float) -> list[TicketItem]:
        """What arrived since the last call, after at most `hold` seconds where all of it can wait. The first
        items never wait."""
        timer = self._loop.call_later(hold, self._release) if hold else None
        if timer is None:
            self._holds = False
            if self._items:
                self._arrived.set()
        try:
            await self._arrived.wait()
        finally:
            if timer is not None:
                timer.cancel()
        items, self._items = self._items, []
        self._arrived.clear()
        self._holds = True
        self.ended = bool(items) and isinstance(items[-1], TicketEnded)
        return _join_items(items, chunks=self.joins and hold > 0)

    def new_stats(self, stats: GenerationStats) -> GenerationStats:
        """`stats` with only the step times that were not sent yet."""
        count = len(stats.step_seconds)
        new, self._sent = stats.step_seconds[self._sent : count], count
        return replace(stats, step_seconds=new)


def _has_text(items: list[TicketItem]) -> bool:
    return any(type(item) is Chunk for item in items)


def _join_items(items: list[TicketItem], *, chunks: bool) -> list[TicketItem]:
    """The items with only the last of adjacent positions, and with adjacent `chunks` as one."""
    joined: list[TicketItem] = []
    for item in items:
        last = joined[-1] if joined else None
        if chunks and type(item) is Chunk and type(last) is Chunk:
            joined[-1] = last.join(item)
        elif isinstance(item, TicketMoved) and isinstance(last, TicketMoved):
            joined[-1] = item
        else:
            joined.append(item)
    return joined


def _without_tokens(item: TicketItem) -> TicketItem:
    """The item without tokens that the gateway has anyway."""
    if isinstance(item, TicketEnded):
        return TicketEnded(item.error)
    if isinstance(item, TicketSteered):
        return replace(item, tokens=())
    return item

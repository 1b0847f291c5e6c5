"""One engine with its queue, as a replica: calls in, replies out.

The scheduler of a single machine does the work, with its priorities and its batches; this only carries
its items. A replica knows no conversation and no user: whatever it needs is in the call, so losing one loses
time and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from keystroke.engine.generation import Chunk, GenerationStats
from keystroke.engine.model import Model
from keystroke.engine.speculative import AdaptiveDrafter, Drafter, drafter_for, verify_cost
from keystroke.errors import KeystrokeError, Unavailable
from keystroke.gateway.app import tune_interpreter
from keystroke.gateway.work.registry import ServedModel
from keystroke.gateway.work.scheduler import Job
from keystroke.gateway.work.ticket import Ended, Item, Started, Steered, Ticket
from keystroke.scale.call import Call, Reply, Splice, TextSide
from keystroke.scale.tracing import begin_span, start_tracing, stop_tracing

_GLANCE = 0.25  # seconds between two words about a long prompt

Load = Callable[[], ServedModel]


class EngineReplica:
    """`load` makes the model in this process. `name` is what Ray calls this replica."""

    def __init__(self, load: Load, name: str, traces: str | None = None) -> None:
        tune_interpreter()
        start_tracing(traces, "engine")
        self._name = name
        self._entry = load()
        self._tickets: dict[str, Ticket] = {}
        self._started = False

    async def generate(self, call: Call) -> AsyncIterator[Reply]:
        """The answer to a call, as it is made. Leaving early stops it. Raises nothing of the engine's: what
        went wrong is in the last item."""
        self._start()
        told = begin_span("engine", call.trace, {"replica": self._name, "model": self._entry.name})
        try:
            ticket = self._submit(call)
        except KeystrokeError as error:
            yield Reply((Ended(error),), GenerationStats(), replica=self._name)
            return
        self._tickets[call.id] = ticket
        inbox = _Inbox(ticket)
        for steer, tokens in call.steers:
            ticket.redirect(steer, tokens)
        first = self._name
        try:
            while not inbox.ended:
                items = await inbox.take(_GLANCE)
                stats = inbox.news(ticket.stats)
                read = 0 if ticket.timing.first else ticket.read()
                yield Reply(tuple(map(_carried, items)), stats, read, first)
                first = ""
        finally:
            del self._tickets[call.id]
            ticket.cancel()
            if told is not None:
                told.set_attributes({"reused": ticket.stats.reused, "computed": ticket.stats.computed})
                told.set_attributes({"tokens": ticket.stats.tokens, "steps": ticket.stats.steps})
                told.end()

    async def splice(self, wanted: Splice) -> bool:
        """Put input into a call under way; False where it is not made here."""
        ticket = self._tickets.get(wanted.call)
        if ticket is None or ticket.done:
            return False
        ticket.redirect(wanted.steer, wanted.tokens)
        return True

    async def describe(self) -> TextSide:
        """What gateways need to know of the model."""
        model = self._model
        return TextSide(
            self._entry.name,
            model.engine.info,
            model.tokenizer,
            model.chat,
            model.fim,
            model.languages,
            model.follows,
            self._entry.edits,
            verify_cost(model.engine),
            max(1, model.engine.max_batch),
        )

    async def close(self) -> None:
        """End what is left, each with its terminal item, and free the engine."""
        if self._started:
            await self._entry.scheduler.stop()
        await asyncio.to_thread(self._model.engine.close)
        stop_tracing()

    def check(self) -> None:
        """Raises Unavailable where the engine's thread has died."""
        thread = getattr(self._entry.scheduler, "_thread", None)
        if self._started and thread is not None and not thread.is_alive():
            raise Unavailable("The engine's thread has ended.")

    @property
    def _model(self) -> Model:
        assert self._entry.model is not None  # remote models have no replicas
        return self._entry.model

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self._entry.scheduler.start()

    def _submit(self, call: Call) -> Ticket:
        job = Job(call.prompt, call.params, self._drafter(call.drafter), call.warm, call.said)
        return self._entry.scheduler.submit(
            job, priority=call.priority, tier=call.tier, key=call.key, supersedes=call.buffer
        )

    def _drafter(self, sent: Drafter | None) -> Drafter | None:
        """The gateway's drafter; with the model, or the engine, that drafts here, where there is one."""
        if isinstance(sent, AdaptiveDrafter):
            if self._model.draft is not None:
                return drafter_for(self._model.engine, draft=self._model.draft)
            sent.hear(self._model.engine)
        return sent


class _Inbox:
    """What a ticket's engine posted and nobody has carried away yet."""

    def __init__(self, ticket: Ticket) -> None:
        self.ended = False
        self._items: list[Item] = []
        self._came = asyncio.Event()
        self._told = 0  # step times already told
        ticket.on_items = self._put

    def _put(self, items: list[Item]) -> None:
        self._items += items
        self._came.set()

    async def take(self, patience: float) -> list[Item]:
        if not self._items:
            try:
                await asyncio.wait_for(self._came.wait(), patience)
            except TimeoutError:
                return []
        items, self._items = self._items, []
        self._came.clear()
        self.ended = isinstance(items[-1], Ended)
        return items

    def news(self, stats: GenerationStats) -> GenerationStats:
        told = len(stats.step_seconds)
        news, self._told = stats.step_seconds[self._told : told], told
        return replace(stats, step_seconds=news)


def _carried(item: Item) -> Item:
    """Without the tokens that the gateway has anyway."""
    if isinstance(item, Ended):
        return Ended(item.error)
    if isinstance(item, Steered):
        return replace(item, tokens=())
    assert isinstance(item, Chunk | Started) or item is not None
    return item

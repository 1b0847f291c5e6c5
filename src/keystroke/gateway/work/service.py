"""A request becomes an answer: checked, routed, put into tokens, admitted, queued.

Law: transport-free. It is given a typed request, a caller and a sink, and returns an Answer whose messages go
to the sink; every refusal is raised before the first message. Shared by WebSocket, HTTP and the live channel.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from keystroke.config import GenerationSettings
from keystroke.engine.base import Sampling
from keystroke.engine.generation import GenerationParams
from keystroke.engine.model import Model
from keystroke.engine.speculative import Drafter, FileDrafter, drafter_for
from keystroke.errors import ContextOverflow, InputError, KeystrokeError, Unavailable
from keystroke.gateway.access.keys import Caller
from keystroke.gateway.access.limits import Limits, Permit
from keystroke.gateway.api.answer import Answer, Sink
from keystroke.gateway.api.prompts import Turn
from keystroke.gateway.api.serializers import Outcome, Serializer
from keystroke.gateway.record.metrics import Metrics
from keystroke.gateway.record.store import Store
from keystroke.gateway.work.priority import Priority, Tier
from keystroke.gateway.work.registry import AUTO, Registry, ServedModel
from keystroke.gateway.work.remote import RemoteJob
from keystroke.gateway.work.routing import Task, named
from keystroke.gateway.work.scheduler import Job
from keystroke.gateway.work.ticket import Ticket
from keystroke.protocol.items import as_input, text_of
from keystroke.protocol.requests import Prediction, stop_strings
from keystroke.protocol.response import Routing

log = logging.getLogger("keystroke.service")

_BIG = 16_384  # characters from which rendering and tokenising leave the event loop
_LEARNT = 8192  # tokens of a prompt that a drafter learns by heart; more would delay the first token
_TURNS = 256  # finished turns kept in memory for callers that come back by id
_TOKENS = 2_000_000  # and at most so many tokens of them


SHUTTING_DOWN = "The server is shutting down; try again shortly."


def new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request asks of sampling, whichever endpoint it came through."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logprobs: int | None = None


class Service:
    def __init__(
        self,
        registry: Registry,
        store: Store | None,
        *,
        generation: GenerationSettings | None = None,
        speculation: bool = True,
    ) -> None:
        self.registry = registry
        self.store = store
        self.defaults = generation or GenerationSettings()
        self.speculation = speculation
        self.metrics = Metrics()
        self.limits = Limits({e.name: e.budget for e in registry.entries.values()})
        self.draining = False
        self.live: dict[str, Answer] = {}  # answers under way, by response id
        self._turns: OrderedDict[str, tuple[str, Turn]] = OrderedDict()
        self._remembered = 0  # tokens of those turns

    # Choosing

    def route(self, requested: str, task: Callable[[], Task]) -> tuple[ServedModel, Routing]:
        """The model that answers, and why. A name or a role overrides; `auto` asks the router."""
        if requested in ("", AUTO):
            name, role, reason = self.registry.router.choose(task())
            assert name is not None  # a registry has at least one model
            return self.registry.find(name), Routing(requested=AUTO, model=name, role=role, reason=reason)
        entry = self.registry.find(requested)
        return entry, named(requested, entry.name, entry.role)

    def params(self, wish: Wish) -> GenerationParams:
        d = self.defaults
        temperature = d.temperature if wish.temperature is None else wish.temperature
        seed = wish.seed
        if seed is None:
            seed = d.seed if temperature == 0 or d.seed else secrets.randbits(62)
        sampling = Sampling(
            temperature=temperature,
            top_k=d.top_k if wish.top_k is None else wish.top_k,
            top_p=d.top_p if wish.top_p is None else wish.top_p,
            min_p=d.min_p,
            seed=seed % 2**63,
            logprobs=wish.logprobs,
        )
        return GenerationParams(wish.max_tokens or d.max_tokens or None, sampling, stop_strings(wish.stop))

    # Making prompts

    async def off_loop(self, size: int, work: Callable[[], Any]) -> Any:
        """Small work here and now; big work in a thread, so that other streams do not stall."""
        return work() if size < _BIG else await asyncio.to_thread(work)

    def draft(self, model: Model, prediction: Prediction | None, length: int) -> Drafter | None:
        """Predicted output becomes the draft, and so does what was seen before where the prompt is short
        enough to be learnt in no time. A draft never changes the text."""
        if not self.speculation:
            return None
        source = model.tokenizer.encode(text_of(prediction.content)) if prediction is not None else []
        if length > _LEARNT:
            return FileDrafter(source) if source else None
        return drafter_for(model.engine, source, draft=model.draft)

    @staticmethod
    def check_room(entry: ServedModel, tokens: Sequence[int]) -> None:
        context = entry.context_length
        if context is not None and len(tokens) >= context:
            raise ContextOverflow(
                f"The prompt has {len(tokens):,} tokens and {entry.name} holds {context:,}; "
                "shorten it or choose a model with a longer context.",
                param="input",
            )

    # Queueing

    def submit(
        self,
        entry: ServedModel,
        job: Job | RemoteJob,
        caller: Caller,
        *,
        priority: Priority,
        tier: Tier,
        tokens: int,
        buffer: str | None = None,
    ) -> tuple[Ticket, Permit]:
        """Admit against the budget, then queue. Raises RateLimited or QueueFull, leaving nothing behind."""
        if self.draining:
            raise Unavailable(SHUTTING_DOWN)
        permit = self.limits.admit(caller.id, entry.name, tokens)
        supersedes = None if buffer is None else f"{caller.id}/{buffer}"
        try:
            ticket = entry.scheduler.submit(
                job,  # type: ignore[arg-type]
                priority=priority,
                tier=tier,
                key=caller.id,
                supersedes=supersedes,
            )
        except KeystrokeError:
            permit.settle(0)
            raise
        return ticket, permit

    def closed(self, response_id: str, caller: Caller, outcome: Outcome) -> None:
        """The books of a response: metrics and usage."""
        self.live.pop(response_id, None)
        self.metrics.ended(outcome.receipt, outcome.status)
        if self.store is not None:
            self.store.save_usage(response_id, caller.id, caller.name, outcome.status, outcome.receipt)

    def answer(
        self,
        entry: ServedModel,
        ticket: Ticket,
        permit: Permit,
        serializer: Serializer,
        sink: Sink,
        **how: Any,
    ) -> Answer:
        """The answer to a ticket. Must follow `submit` without a pause, so that no item is missed."""
        return Answer(
            ticket,
            serializer,
            sink,
            model=entry.name,
            price=entry.price,
            permit=permit,
            tokenizer=entry.model.tokenizer if entry.model is not None else None,
            **how,
        )

    # Remembering

    def remember(self, caller: Caller, turn: Turn) -> None:
        self.forget(turn.response_id)
        self._turns[turn.response_id] = (caller.id, turn)
        self._remembered += len(turn.tokens or ())
        while len(self._turns) > _TURNS or (self._remembered > _TOKENS and len(self._turns) > 1):
            self.forget(next(iter(self._turns)))

    def forget(self, response_id: str) -> None:
        found = self._turns.pop(response_id, None)
        if found is not None:
            self._remembered -= len(found[1].tokens or ())

    async def recall(self, caller: Caller, response_id: str) -> Turn | None:
        """A finished turn by its id: from memory, else rebuilt from the store. Only the caller's own."""
        found = self._turns.get(response_id)
        if found is not None:
            self._turns.move_to_end(response_id)
            return found[1] if found[0] == caller.id else None
        if self.store is None:
            return None
        chain = await self.store.chain(response_id)
        if not chain or chain[-1].key_id != caller.id:
            return None
        items = [item for stored in chain for item in (*stored.items, *map(as_input, stored.response.output))]
        last = chain[-1].response
        return Turn(last.id, last.model, items, last.instructions, last.tools or None)


def refuse_format(wanted: dict[str, Any] | None, param: str) -> None:
    """Only plain text can be promised: nothing here holds a model to a schema."""
    kind = (wanted or {}).get("type", "text")
    if kind != "text":
        raise InputError(f"{param} asks for {kind!s:.40}; only text output is supported.", param=param)

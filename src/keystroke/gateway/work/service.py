"""A job becomes work: routed, checked, admitted, queued, and its books kept.

Transport-free and the one way to an engine, for HTTP, WebSocket and the live channel alike. Every
refusal is raised here, before anything began; what follows is the Work's.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from keystroke.config import GenerationSettings
from keystroke.engine.base import Sampling
from keystroke.engine.generation import GenerationParams
from keystroke.engine.model import Model
from keystroke.engine.speculative import Drafter, FileDrafter, drafter_for, guesses_of
from keystroke.errors import ContextOverflow, Forbidden, KeystrokeError, NotEnoughMemory, Unavailable
from keystroke.gateway.access.keys import Caller
from keystroke.gateway.access.limits import Limits, Settles
from keystroke.gateway.record.metrics import Metrics
from keystroke.gateway.record.shared_limits import SharedLimits
from keystroke.gateway.record.store import Store
from keystroke.gateway.work.priority import Priority, Tier, priority_named, tier_named
from keystroke.gateway.work.registry import AUTO, Registry, ServedModel
from keystroke.gateway.work.remote import RemoteJob
from keystroke.gateway.work.routing import Task, named
from keystroke.gateway.work.scheduler import Job
from keystroke.gateway.work.work import Outcome, Work
from keystroke.protocol.items import text_of
from keystroke.protocol.requests import Prediction, stop_strings
from keystroke.protocol.response import Routing

log = logging.getLogger("keystroke.service")

_BIG = 16_384  # characters from which rendering and tokenising leave the event loop
_LEARNT = 8192  # tokens of a prompt that a drafter learns by heart; more would delay the first token

HURRIED = 8  # answers of one key at a time that go before everybody's chats; more wait like chats

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
        declarations: str = "auto",
        shared: SharedLimits | None = None,
    ) -> None:
        self.registry = registry
        self.shared = shared  # budgets kept for all gateways; None: this process keeps its own
        self.store = store
        self.defaults = generation or GenerationSettings()
        self.speculation = speculation
        self.declarations = declarations  # of tools: auto, full, short
        self.metrics = Metrics()
        self.limits = Limits({} if shared else {e.name: e.budget for e in registry.entries.values()})
        self.draining = False
        self.under_way: set[Work] = set()

    # Choosing

    def choose(self, requested: str, task: Callable[[], Task]) -> Routing:
        """Which model is to answer, and why. A name or a role overrides; `auto` asks the router.
        Raises ModelNotFound or NoSuitableModel."""
        if requested in ("", AUTO):
            name, role, reason = self.registry.router.choose(task())
            return Routing(requested=AUTO, model=name, role=role, reason=reason)
        name = self.registry.find(requested)
        return named(requested, name, self.registry.role(name))

    async def route(self, requested: str, task: Callable[[], Task]) -> tuple[ServedModel, Routing]:
        """The model that answers, loaded first if it is not, and why. Raises what `choose` and loading
        raise."""
        routing = self.choose(requested, task)
        return await self.ready(routing.model), routing

    async def ready(self, name: str) -> ServedModel:
        """The model, loaded. Where the memory does not suffice, models nobody uses make room first."""
        while True:
            try:
                return await self.registry.ready(name)
            except NotEnoughMemory:
                if not await self.registry.make_room():
                    raise

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

    @staticmethod
    def ranking(
        caller: Caller, wanted: str | None, own: Priority, tier: str | None = None
    ) -> tuple[Priority, Tier]:
        """What a request's priority and tier are. `own`: what the endpoint gives by itself; a key needs the
        right to ask for more. Raises Forbidden."""
        priority, paid = priority_named(wanted, own), tier_named(tier)
        hurried = priority < min(own, Priority.CHAT)
        if not caller.priority and (hurried or paid < Tier.DEFAULT):
            asked = priority.label if hurried else f"service_tier {paid.label}"
            raise Forbidden(
                f"This key may not ask for {asked}; leave it out, or use a key made with "
                "`keystroke keys create NAME --priority`.",
                param="priority" if hurried else "service_tier",
            )
        return priority, paid

    # Making prompts

    async def off_loop(self, size: int, work: Callable[[], Any], model: Model | None = None) -> Any:
        """Small work here and now; big work in a thread, so that other streams do not stall, and so is what
        waits for the process of somebody's chat template (`model`: whose it may be)."""
        waits = model is not None and model.chat is not None and model.chat.foreign
        return work() if size < _BIG and not waits else await asyncio.to_thread(work)

    def draft(
        self, model: Model, prediction: Prediction | None, length: int, wanted: bool | None = None
    ) -> Drafter | None:
        """Predicted output becomes the draft, and so does what was seen before where the prompt is short
        enough to be learnt in no time; an engine's own guesses need no learning. A draft never changes the
        text; `wanted` False: none is made."""
        if not self.speculation or wanted is False:
            return None
        source = model.tokenizer.encode(text_of(prediction.content)) if prediction is not None else []
        if length > _LEARNT:
            return FileDrafter(source) if source else guesses_of(model.engine)
        return drafter_for(model.engine, source, draft=model.draft)

    # Queueing

    def shares_budget(self, entry: ServedModel) -> bool:
        """Whether other gateways take from this model's budget too: then `admitted` is asked first."""
        return self.shared is not None and entry.budget.limited

    async def admitted(self, entry: ServedModel, job: Job | RemoteJob, caller: Caller) -> Settles | None:
        """Leave from a budget that is kept for all gateways; None where `submit` asks this process's own.
        Raises RateLimited. What it gives goes to `submit`, or is settled."""
        if self.shared is None or not entry.budget.limited:
            return None
        return await self.shared.admit(caller.id, entry.name, entry.budget, job.estimate)

    def limit_headers(self, caller: Caller, model: str) -> dict[str, str]:
        """The x-ratelimit headers as they stood when this gateway last looked."""
        kept = self.limits if self.shared is None else self.shared
        return kept.headers(caller.id, model)

    def submit(
        self,
        entry: ServedModel,
        job: Job | RemoteJob,
        caller: Caller,
        *,
        priority: Priority,
        tier: Tier = Tier.DEFAULT,
        buffer: str | None = None,
        identity: str | None = None,
        live: bool = False,
        permit: Settles | None = None,
    ) -> Work:
        """Admit against the budget, then queue. Raises ContextOverflow, RateLimited or QueueFull, leaving
        nothing behind. `buffer`: newer work for it takes this one's place. `permit`: leave that `admitted`
        gave. Follow what comes of it before the loop runs again."""
        try:
            if self.draining:
                raise Unavailable(SHUTTING_DOWN)
            if isinstance(job, Job):
                self._check_room(entry, job.prompt)
                job.drafts = self.speculation
        except KeystrokeError:
            if permit is not None:
                permit.settle(0)
            raise
        if permit is None:
            permit = self.limits.admit(caller.id, entry.name, job.estimate)
        if priority < Priority.CHAT and not caller.priority and self._hurried(caller) >= HURRIED:
            priority = Priority.CHAT  # one pair of hands does not type so much at once
        supersedes = None if buffer is None else f"{caller.id}/{buffer}"
        try:
            ticket = entry.scheduler.submit(
                job,
                priority=priority,
                tier=tier,
                key=caller.id,
                supersedes=supersedes,
            )
        except KeystrokeError:
            permit.settle(0)
            raise
        work = Work(
            identity or new_id("work"),
            ticket,
            permit,
            model=entry.name,
            price=entry.price,
            caller=caller,
            live=live,
            keep=self._keep,
        )
        self.under_way.add(work)
        return work

    def _hurried(self, caller: Caller) -> int:
        """How much of a caller's work goes before chats just now."""
        return sum(w.caller.id == caller.id and w.ticket.priority < Priority.CHAT for w in self.under_way)

    def _keep(self, work: Work, identity: str, outcome: Outcome) -> None:
        """The books of a span: metrics and usage."""
        if work.ticket.done:
            self.under_way.discard(work)
        self.metrics.ended(outcome.receipt, outcome.status)
        if self.store is not None:
            caller = work.caller
            self.store.save_usage(
                identity, caller.id, caller.name, outcome.status, outcome.receipt, live=work.live
            )

    @staticmethod
    def _check_room(entry: ServedModel, tokens: Sequence[int]) -> None:
        context = entry.context_length
        if context is not None and len(tokens) >= context:
            raise ContextOverflow(
                f"The prompt has {len(tokens):,} tokens and {entry.name} holds {context:,}; "
                "shorten it or choose a model with a longer context.",
                param="input",
            )

"""Turns a job into work: routing, checks, admission, queueing and usage records.

The only way to an engine, for HTTP, WebSocket and the live channel alike. Every refusal is raised here,
before anything began; afterwards the `Work` reports how it ends.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from keystroke.config import GenerationSettings
from keystroke.engine.base import Sampling
from keystroke.engine.generation import GenerationParams
from keystroke.engine.model import Model
from keystroke.engine.speculative import Drafter, FileDrafter, drafter_for, engine_drafter
from keystroke.errors import ContextOverflow, Forbidden, KeystrokeError, NotEnoughMemory, Unavailable
from keystroke.gateway.access.keys import Caller
from keystroke.gateway.access.limits import MonthlyBudgets, Permit, RateLimiter
from keystroke.gateway.record.metrics import Metrics
from keystroke.gateway.record.shared_limits import SharedLimits
from keystroke.gateway.record.store import Store
from keystroke.gateway.work.priority import Priority, Tier, parse_priority, parse_tier
from keystroke.gateway.work.registry import AUTO, ModelRegistry, ServedModel
from keystroke.gateway.work.remote import RemoteJob
from keystroke.gateway.work.routing import RoutingRequest
from keystroke.gateway.work.scheduler import Job
from keystroke.gateway.work.ticket import SHUTTING_DOWN
from keystroke.gateway.work.work import Work, WorkOutcome
from keystroke.protocol.items import content_text
from keystroke.protocol.requests import (
    ChatRequest,
    CompletionRequest,
    CreateRequest,
    Prediction,
    stop_strings,
)
from keystroke.protocol.response import Routing

_BIG = 16_384  # characters from which rendering and tokenising run in a thread
_MAX_DRAFT_PROMPT = 8192  # prompt tokens that a drafter indexes; more would delay the first token

MAX_URGENT_PER_KEY = 8  # concurrent high-priority jobs of one key; further ones are queued as chat


def new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"


class Service:
    def __init__(
        self,
        registry: ModelRegistry,
        store: Store | None,
        *,
        generation: GenerationSettings | None = None,
        speculation: bool = True,
        tool_declarations: str = "auto",
        shared: SharedLimits | None = None,
    ) -> None:
        self.registry = registry
        self.shared = shared  # budgets shared by all gateways; None: this process has its own
        self.store = store
        self.defaults = generation or GenerationSettings()
        self.speculation = speculation
        self.tool_declarations = tool_declarations  # auto, full, short
        self.metrics = Metrics()
        self.limits = RateLimiter({} if shared else {e.name: e.budget for e in registry.entries.values()})
        self.budgets = MonthlyBudgets()
        self.draining = False
        self.active_work: set[Work] = set()

    # Choosing

    def choose(self, requested: str, task: Callable[[], RoutingRequest]) -> Routing:
        """The model for a request, and why. A name or a role overrides the router. Raises ModelNotFound or
        NoSuitableModel."""
        if requested in ("", AUTO):
            name, role, reason = self.registry.router.choose(task())
            return Routing(requested=AUTO, model=name, role=role, reason=reason)
        name = self.registry.resolve(requested)
        role = self.registry.role_of(name)
        return Routing(requested=requested, model=name, role=role, reason="named by the client")

    async def route(self, requested: str, task: Callable[[], RoutingRequest]) -> tuple[ServedModel, Routing]:
        """Choose the model and load it if needed. Raises what `choose` and loading raise."""
        routing = self.choose(requested, task)
        return await self.ensure_loaded(routing.model), routing

    async def ensure_loaded(self, name: str) -> ServedModel:
        """The model, loaded. Where memory is short, idle models are unloaded first."""
        while True:
            try:
                return await self.registry.ensure_loaded(name)
            except NotEnoughMemory:
                if not await self.registry.unload_idlest():
                    raise

    def generation_params(
        self,
        request: CreateRequest | ChatRequest | CompletionRequest,
        max_tokens: int | None,
        logprobs: int | None,
    ) -> GenerationParams:
        """The request's sampling parameters, completed by the configured defaults."""
        d = self.defaults
        temperature = d.temperature if request.temperature is None else request.temperature
        seed = request.seed
        if seed is None:
            seed = d.seed if temperature == 0 or d.seed else secrets.randbits(62)
        sampling = Sampling(
            temperature=temperature,
            top_k=d.top_k if request.top_k is None else request.top_k,
            top_p=d.top_p if request.top_p is None else request.top_p,
            min_p=d.min_p,
            seed=seed % 2**63,
            logprobs=logprobs,
        )
        return GenerationParams(max_tokens or d.max_tokens or None, sampling, stop_strings(request.stop))

    @staticmethod
    def priority_and_tier(
        caller: Caller, requested: str | None, default: Priority, service_tier: str | None = None
    ) -> tuple[Priority, Tier]:
        """A request's priority and tier. `default` is the endpoint's own; requesting more needs a key with
        that right. Raises Forbidden. Clients have `fast` and `ultrafast` as a setting for all that they send:
        without the right these count as the default."""
        priority, tier = parse_priority(requested, default), parse_tier(service_tier)
        if service_tier in ("fast", "ultrafast") and not caller.priority:
            tier = Tier.DEFAULT
        urgent = priority < min(default, Priority.CHAT)
        if not caller.priority and (urgent or tier < Tier.DEFAULT):
            what = priority.label if urgent else f"service_tier {tier.label}"
            raise Forbidden(
                f"This key may not ask for {what}; leave it out, or use a key made with "
                "`keystroke keys create NAME --priority`.",
                param="priority" if urgent else "service_tier",
            )
        return priority, tier

    # Preparing

    async def run_off_loop(self, size: int, work: Callable[[], Any], model: Model | None = None) -> Any:
        """Run small work here, big work in a thread so that other streams do not stall; also work that waits
        for the process of `model`'s chat template."""
        waits = model is not None and model.chat is not None and model.chat.foreign
        return work() if size < _BIG and not waits else await asyncio.to_thread(work)

    def make_drafter(
        self, model: Model, prediction: Prediction | None, length: int, drafts: bool | None = None
    ) -> Drafter | None:
        """A drafter for the predicted output and, where the prompt is short enough to index quickly, for
        repeated text; else the engine's own. Drafts never change the text; `drafts` False: none."""
        if not self.speculation or drafts is False:
            return None
        source = model.tokenizer.encode(content_text(prediction.content)) if prediction is not None else []
        if length > _MAX_DRAFT_PROMPT:
            return FileDrafter(source) if source else engine_drafter(model.engine)
        return drafter_for(model.engine, source, draft=model.draft)

    # Queueing

    def has_shared_budget(self, entry: ServedModel) -> bool:
        """Whether other gateways use this model's budget too: then call `admit_shared` before `submit`."""
        return self.shared is not None and entry.budget.is_limited

    async def admit_shared(self, entry: ServedModel, job: Job | RemoteJob, caller: Caller) -> Permit | None:
        """A permit from a budget that all gateways share, to pass to `submit` or settle; None where `submit`
        uses this process's own. Raises RateLimited."""
        if self.shared is None or not self.has_shared_budget(entry):
            return None
        return await self.shared.admit(caller.id, entry.name, entry.budget, job.estimate)

    async def enqueue(self, entry: ServedModel, job: Job | RemoteJob, caller: Caller, **options: Any) -> Work:
        """`admit_shared`, then `submit`, which gets `options`. Raises what they raise."""
        permit = await self.admit_shared(entry, job, caller)
        return self.submit(entry, job, caller, permit=permit, **options)

    def limit_headers(self, caller: Caller, model: str) -> dict[str, str]:
        """The x-ratelimit headers, as of this gateway's last admission."""
        limits = self.limits if self.shared is None else self.shared
        return limits.headers(caller.id, model)

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
        permit: Permit | None = None,
    ) -> Work:
        """Admit against the budget, then queue. Raises ContextOverflow, RateLimited or QueueFull, leaving
        nothing behind. `buffer`: newer work for it replaces this one. `permit`: from `admit_shared`.
        Subscribe to the work before the loop runs again."""
        try:
            if self.draining:
                raise Unavailable(SHUTTING_DOWN)
            self.budgets.check(caller.id)
            if isinstance(job, Job):
                self._check_context(entry, job.prompt)
                job.drafts = self.speculation
            if permit is None:
                permit = self.limits.admit(caller.id, entry.name, job.estimate)
            urgent = priority < Priority.CHAT and not caller.priority
            if urgent and self._urgent_count(caller) >= MAX_URGENT_PER_KEY:
                priority = Priority.CHAT
            supersedes = None if buffer is None else f"{caller.id}/{buffer}"
            ticket = entry.scheduler.submit(
                job, priority=priority, tier=tier, key=caller.id, supersedes=supersedes
            )
        except KeystrokeError:
            if permit is not None:
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
            on_span_end=self._record_span,
        )
        self.active_work.add(work)
        return work

    def _urgent_count(self, caller: Caller) -> int:
        """The number of a caller's jobs above chat priority."""
        return sum(w.caller.id == caller.id and w.ticket.priority < Priority.CHAT for w in self.active_work)

    def _record_span(self, work: Work, identity: str, outcome: WorkOutcome) -> None:
        """Count a span in the metrics and the usage table."""
        if work.ticket.done:
            self.active_work.discard(work)
        self.metrics.record_response(outcome.receipt, outcome.status)
        spent = outcome.receipt.computed_tokens + outcome.receipt.output_tokens
        self.budgets.add(work.caller.id, spent, outcome.receipt.cost)
        if self.store is not None:
            caller, receipt = work.caller, outcome.receipt
            self.store.save_usage(identity, caller.id, caller.name, outcome.status, receipt, live=work.live)

    @staticmethod
    def _check_context(entry: ServedModel, tokens: Sequence[int]) -> None:
        context = entry.context_length
        if context is not None and len(tokens) >= context:
            raise ContextOverflow(
                f"The prompt has {len(tokens):,} tokens and {entry.name} holds {context:,}; "
                "shorten it or choose a model with a longer context.",
                param="input",
            )

"""One request to the Responses API, from its first response to its last.

`ResponseRun` is the only owner of a turn's state: it makes the prompt, queues the work, applies steering
input, stores each response that ends and starts successors. A steered response is followed by its successor
in the same run; each response ends exactly once and leaves a `ConversationTurn` that a later request can
continue.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from keystroke.engine.generation import Chunk
from keystroke.engine.model import Model
from keystroke.engine.prefix import common_prefix
from keystroke.errors import InputError, Interrupted, KeystrokeError, QueueFull, Unavailable
from keystroke.gateway.access.keys import Caller
from keystroke.gateway.access.limits import Permit
from keystroke.gateway.api import prompts
from keystroke.gateway.api.answer import RunningAnswer, Sink
from keystroke.gateway.api.answer_form import AnswerForm, answer_form, constrain
from keystroke.gateway.api.compaction import (
    CompactionLimit,
    Compactor,
    FittedConversation,
    LongConversation,
    RenderedPrompt,
    ReusedSummary,
    compaction_limit,
    unchanged_conversation,
)
from keystroke.gateway.api.conversations import Conversations
from keystroke.gateway.api.prompts import ConversationTurn
from keystroke.gateway.api.replay import Replay, Replays
from keystroke.gateway.api.response_request import (
    cache_breakpoints,
    is_warm_up,
    key_state,
    new_response,
    request_notes,
    requested_format,
    requested_logprobs,
    routing_request,
)
from keystroke.gateway.api.serializers import ResponseSerializer
from keystroke.gateway.record.store import Store
from keystroke.gateway.record.turns import OpenTurn, TurnJournal
from keystroke.gateway.work.priority import Priority, Tier, shown_tier
from keystroke.gateway.work.registry import ServedModel
from keystroke.gateway.work.remote import RemoteJob
from keystroke.gateway.work.scheduler import Job
from keystroke.gateway.work.service import Service, new_id
from keystroke.gateway.work.ticket import Redirected, TicketEnded, TicketItem, TicketSteered
from keystroke.gateway.work.work import Work, WorkOutcome
from keystroke.protocol import events
from keystroke.protocol.compaction import expand_compaction
from keystroke.protocol.faults import NoSuitableModel
from keystroke.protocol.items import (
    CompactionItem,
    CustomToolCall,
    FunctionCall,
    Item,
    OutputItem,
    as_input,
)
from keystroke.protocol.requests import CreateRequest, ResponseCreate
from keystroke.protocol.response import Compacted, Response, ResponseUsage, Routing

OnTurn = Callable[[tuple[str, ConversationTurn | None]], None]


@dataclass(slots=True)
class PendingSteer:
    id: str
    items: list[Item]


class RunOwner(Protocol):
    """What the runs of one server share."""

    service: Service
    store: Store | None
    conversations: Conversations
    compactor: Compactor
    runs: dict[str, ResponseRun]
    replays: Replays[ResponseRun]
    journal: TurnJournal | None


class ResponseRun:
    """One request in progress. Events go to `sink`; `set_listeners` reports the ends of its responses.
    Raises InputError for a request without input."""

    def __init__(
        self,
        owner: RunOwner,
        request: CreateRequest,
        caller: Caller,
        sink: Sink,
        previous: ConversationTurn | None,
        turn_state: str | None = None,
    ) -> None:
        self.caller = caller
        self._turn_state = turn_state
        self.stream_id = request.stream_id if isinstance(request, ResponseCreate) else None
        self.background = bool(request.background)
        self.entry: ServedModel
        self.work: Work | None = None
        self.latest: tuple[str, ConversationTurn | None] | None = None  # the last response that ended
        self.over = asyncio.Event()  # the last response ended and no successor follows
        self.replay: Replay[ResponseRun] | None = (
            None  # lets a client resume the events after its connection broke
        )
        self.resumed_turn: OpenTurn | None = None  # another gateway began this turn
        self._open_turn: OpenTurn | None = None
        self._owner = owner
        self._request = request
        self._sink = sink
        self._answer: RunningAnswer | None = None
        self._serializer: ResponseSerializer
        self._routing: Routing
        self._warm = is_warm_up(request)
        steers = previous.steers if previous is not None else []
        self._own_items = [*steers, *prompts.items_of(request.input)]  # what this turn adds
        request.input = None  # the items hold what matters; the rest may be megabytes
        before = previous.items if previous is not None else []
        # Whether the previous turn's items are still the beginning of this conversation.
        self._continues = not any(i.encrypted_content is not None for i in self._own_items)
        self._items = expand_compaction([*before, *self._own_items])
        self._tools = prompts.collect_tools(request.tools, self._items)
        self._compacted: Compacted | UnsetType = UNSET
        self._compaction: CompactionItem | None = None  # made for this response, first in its output
        self._pending: list[PendingSteer] = []
        self._cancelled = False
        self._task: asyncio.Task[None] | None = None  # a successor or a final write being prepared
        self._splicing: asyncio.Task[None] | None = None  # steering input on its way to the engine
        self._on_turn: OnTurn = lambda _turn: None
        self._on_done: Callable[[], None] = lambda: None
        self._held_events: list[Any] | None = None  # final events that wait until the response is stored
        self._stored = False  # events that follow are sent at once
        if not self._items:
            raise InputError("input is missing; send a text or a list of items.", param="input")
        if not self._warm and (request.on_disconnect == "continue" or (self.background and request.stream)):
            self.replay = Replay(self, owner.replays, sink, outlives=self.background)
            self._sink = self.replay.put

    @property
    def id(self) -> str:
        return self._serializer.id

    @property
    def response(self) -> Response:
        return self._serializer.response

    @property
    def affinity(self) -> str:
        """What requests with the same prefix have in common; chooses among engines that hold different
        ones."""
        given = self._turn_state or key_state(self._request.prompt_cache_key)
        return given or prompts.affinity(self._request.instructions, self._items)

    @property
    def _effort(self) -> str | None:
        reasoning = self._request.reasoning
        return None if reasoning is None else reasoning.effort

    @property
    def items(self) -> list[Item]:
        """The conversation that the prompt is made of."""
        return self._items

    @property
    def is_active(self) -> bool:
        """Whether an answer is being generated."""
        return self._answer is not None and not self._answer.ended

    @property
    def failure(self) -> KeystrokeError | None:
        """The error of an answer that failed."""
        outcome = self._answer.outcome if self._answer is not None else None
        return outcome.error if outcome is not None and outcome.status == "failed" else None

    # The client's side

    def set_listeners(self, on_turn: OnTurn | None = None, on_done: Callable[[], None] | None = None) -> None:
        """`on_turn` is called for every response that ended, with its id and its turn (None where it cannot
        be continued); `on_done` once, when no successor follows."""
        self._on_turn = on_turn or (lambda _turn: None)
        self._on_done = on_done or (lambda: None)

    def cancel(self, reason: KeystrokeError | None = None) -> None:
        """Stop, without a successor. Steering input that was not used is returned when the answer ends."""
        self._cancelled = True
        if self.work is not None:
            self.work.cancel(reason)

    def _repeat_cancel(self) -> None:
        """Apply a cancel that came while the prompt was made and there was no work to stop."""
        if self._cancelled:
            self.cancel()

    def pause(self) -> None:
        """Generate nothing more until `resume`: the reader is behind."""
        if self.work is not None:
            self.work.ticket.pause()

    def resume(self) -> None:
        if self.work is not None:
            self.work.ticket.resume()

    def disconnect(self, sink: Sink, reason: KeystrokeError, *, by_client: bool = False) -> None:
        """The reader behind `sink` is gone. A background response runs on, a resumable one waits for its
        client unless the client closed the connection itself (`by_client`), any other is cancelled."""
        if self.replay is not None and (self.background or not by_client):
            self.replay.detach(sink)
        elif self.background:
            self.resume()
        else:
            self.cancel(reason)

    def resume_events(
        self,
        sink: Sink,
        response_id: str,
        after: int,
        *,
        on_turn: OnTurn | None = None,
        on_done: Callable[[], None] | None = None,
    ) -> None:
        """Send `sink` every event after number `after` of a response, then those that follow. Raises
        ResponseNotFound where they are no longer kept; then nothing changed."""
        assert self.replay is not None
        self.replay.resume(sink, response_id, after)
        if not self.over.is_set():
            self.set_listeners(on_turn, on_done)

    # Starting

    async def start(self, previous: ConversationTurn | None) -> None:
        """Route, make the prompt and queue it, after the turn `previous`. Raises what any of these
        refuses."""
        request, service = self._request, self._owner.service
        priority, tier = await self._route()
        entry = self.entry
        job, form = await self._make_job(previous)
        response = new_response(
            request,
            entry.name,
            self._routing,
            tier=shown_tier(request.service_tier, tier),
            store=self._will_be_stored(),
        )
        if self.resumed_turn is not None:
            response.id = self.resumed_turn.id
            if isinstance(job, Job):
                job.generated = tuple(self.resumed_turn.tokens)
        response.shortened = prompts.describe_shortening(self._items, form.toolset)
        response.compacted = self._compacted
        response.notes = request_notes(request, entry.name, entry.model) or UNSET
        opening = [self._compaction] if self._compaction is not None and request.context_management else []
        self._serializer = ResponseSerializer(
            response, self.stream_id, opening=opening, max_calls=request.max_tool_calls
        )
        permit = await service.admit_shared(entry, job, self.caller)
        if self._warm:
            self._warm_up(job, permit)
            return
        self.work = service.submit(
            entry,
            job,
            self.caller,
            priority=priority,
            tier=tier,
            buffer=request.buffer,
            identity=self.id,
            permit=permit,
        )
        self._answer = RunningAnswer(
            self.work,
            self._serializer,
            self._send,
            tokenizer=entry.tokenizer,
            toolset=form.toolset,
            parser=lambda: form.parser(entry.model, job.prompt if isinstance(job, Job) else ()),
            edits=form.client_edits(service, entry, self.caller, self._items),
            on_end=self._on_answer_end,
            on_steered=self._on_steered,
        )
        self._owner.runs[self.id] = self
        self._journal_turn(job)
        if self.background and response.store and self._owner.store is not None:
            self._owner.store.save_response(self.caller.id, self._own_items, response, running=True)

    def _journal_turn(self, job: Job | RemoteJob) -> None:
        """Write a resumable turn where other gateways can take it up, and repeat what was generated of one
        that was taken up. A conversation that was compacted is not written: its prompt is not in the
        request."""
        journal, answer, turn = self._owner.journal, self._answer, self.resumed_turn
        if journal is None or self.replay is None or answer is None or not isinstance(job, Job):
            return
        if turn is None and self._compaction is not None:
            return
        if turn is None:
            seed, name = job.params.sampling.seed, self.entry.name
            asked = replace(self._request, input=[*self._own_items], model=name, seed=seed)
            turn = OpenTurn(self.id, self.caller.id, name, asked)
        open_turn = self._open_turn = turn
        loop = asyncio.get_running_loop()
        turn.on_taken = lambda: loop.call_soon_threadsafe(self._on_taken_away)
        journal.begin(turn)
        if turn.tokens:
            answer.receive([Chunk("".join(turn.text), tuple(turn.tokens))])

        def receive(items: list[TicketItem]) -> None:
            for item in items:
                if type(item) is Chunk:
                    open_turn.add(item.tokens, item.text)
                elif isinstance(item, TicketSteered):
                    journal.end(open_turn)  # its successor is not written
            answer.receive(items)

        assert self.work is not None
        self.work.subscribe(receive)

    def _on_taken_away(self) -> None:
        """Another gateway continues this turn for its client."""
        self.response.store = False
        self.cancel(Interrupted("Another gateway continues this response."))

    async def _route(self) -> tuple[Priority, Tier]:
        """Choose the model and load it."""
        request, service = self._request, self._owner.service
        priority, tier = service.priority_and_tier(
            self.caller,
            request.priority or request.lane,
            Priority.BACKGROUND if self.background else Priority.CHAT,
            request.service_tier,
        )
        self.entry, self._routing = await service.route(
            request.model, lambda: routing_request(request, self._items, self._own_items, priority)
        )
        return priority, tier

    async def count_tokens(self, previous: ConversationTurn | None) -> int:
        """The number of tokens that the prompt would have. Raises NoSuitableModel for a remote model."""
        await self._route()
        model = self.entry.model
        if model is None:
            raise NoSuitableModel(
                f"{self.entry.name} runs on another server, which alone can count its tokens; name a local "
                "model.",
                param="model",
            )
        form = self._answer_form()
        tokens = await self._owner.service.run_off_loop(
            prompts.text_length(self._items), lambda: self._prompt_tokens(model, previous, form), model
        )
        return len(tokens)

    async def compact(self) -> FittedConversation:
        """Replace all but the newest items by a summary."""
        await self._route()
        form, affinity = self._answer_form(), self.affinity
        prompt = await self._render_prompt(self._items, form, affinity)
        limit = CompactionLimit(self.entry.context_length or prompt.size + 1, "request")
        fitted = await self._compact(prompt, form, affinity, None, limit)
        return fitted or unchanged_conversation(self._items, prompt)

    def _answer_form(self) -> AnswerForm:
        """The form of the answer before its grammar is compiled."""
        return answer_form(
            self._request,
            self._tools,
            requested_format(self._request),
            self._items,
            declarations=self._owner.service.tool_declarations,
            parameters=self.entry.parameters,
        )

    async def _make_job(self, previous: ConversationTurn | None) -> tuple[Job | RemoteJob, AnswerForm]:
        request, service, entry = self._request, self._owner.service, self.entry
        form = self._answer_form()
        params = service.generation_params(request, request.max_output_tokens, requested_logprobs(request))
        model, affinity = entry.model, self.affinity
        reused = None
        if previous is None:
            reused = self._owner.compactor.reuse(self.caller, affinity, self._items)
        if reused is not None:
            self._items, self._compacted = reused.items, reused.compacted
        if model is None:
            prompt = await self._render_prompt(self._items, form, affinity)
            return (await self._fit(prompt, form, affinity, reused)).job(params), form
        if not self._warm:
            params, form = await constrain(model, params, form, self._items, self._tools)
        new = self._own_items if previous is not None and previous.tokens else self._items
        tokens: list[int] = await service.run_off_loop(
            prompts.text_length(new), lambda: self._prompt_tokens(model, previous, form), model
        )
        prompt = await self._fit(RenderedPrompt.local(tokens, affinity), form, affinity, reused)
        job = prompt.job(params)
        assert isinstance(job, Job)
        job.drafter = service.make_drafter(model, request.prediction, len(job.prompt), request.drafts)
        job.warm = self._warm
        job.protected = await self._protected_prefixes(model, form, job.prompt)
        return job, form

    async def _protected_prefixes(
        self, model: Model, form: AnswerForm, tokens: Sequence[int]
    ) -> list[tuple[int, float]]:
        """Lengths of the prefixes of the prompt that the request marks, and for how many seconds."""
        lengths = []
        for items, seconds in cache_breakpoints(self._request, self._items):
            render = partial(self._render_tokens, model, items, form, generate=False)
            size = prompts.text_length(items)
            upto: list[int] = await self._owner.service.run_off_loop(size, render, model)
            lengths.append((common_prefix(upto, tokens), seconds))
        return lengths

    async def _fit(
        self, prompt: RenderedPrompt, form: AnswerForm, affinity: str, reused: ReusedSummary | None
    ) -> RenderedPrompt:
        """The prompt, or that of a compacted conversation where it is too long."""
        request, service, entry = self._request, self._owner.service, self.entry
        max_tokens = request.max_output_tokens or service.defaults.max_tokens or None
        limit = compaction_limit(
            entry.context_length,
            max_tokens,
            management=request.context_management,
            truncation=request.truncation,
        )
        if limit is None or prompt.size <= limit.tokens or self._warm:
            return prompt
        fitted = await self._compact(prompt, form, affinity, reused, limit)
        if fitted is None:
            return prompt
        self._items, self._compacted, self._compaction = fitted.items, fitted.compacted, fitted.item
        return fitted.prompt

    async def _compact(
        self,
        prompt: RenderedPrompt,
        form: AnswerForm,
        affinity: str,
        reused: ReusedSummary | None,
        limit: CompactionLimit,
    ) -> FittedConversation | None:
        def render(items: Sequence[Item]) -> Awaitable[RenderedPrompt]:
            return self._render_prompt(items, form, affinity)

        long = LongConversation(self._items, prompt, render, limit, self.entry, self.caller, affinity, reused)
        return await self._owner.compactor.fit(long)

    async def _render_prompt(self, items: Sequence[Item], form: AnswerForm, affinity: str) -> RenderedPrompt:
        model = self.entry.model
        if model is None:
            messages = prompts.messages_of(self._request.instructions, items, toolset=form.toolset)
            effort = {} if self._effort is None else {"reasoning_effort": self._effort}
            return RenderedPrompt.remote(messages, dataclasses.replace(form, more=effort))
        tokens = await self._owner.service.run_off_loop(
            prompts.text_length(items), lambda: self._render_tokens(model, items, form), model
        )
        return RenderedPrompt.local(tokens, affinity)

    def _prompt_tokens(self, model: Model, previous: ConversationTurn | None, form: AnswerForm) -> list[int]:
        """The prompt; where the previous turn's tokens can be kept, they and the new messages."""
        request = self._request
        words = "" if form.text is None else form.text.words
        if (
            not self._warm
            and not words
            and self._continues
            and previous is not None
            and previous.tokens is not None
            and previous.model == self.entry.name
            and previous.instructions == request.instructions
            and previous.tools == self._tools
            and previous.effort == self._effort
        ):
            new = prompts.messages_of(None, self._own_items, previous.items, toolset=form.toolset)
            joined = (
                prompts.continue_tokens(model, previous.tokens, new, effort=self._effort) if new else None
            )
            if joined is not None:
                return joined
        return self._render_tokens(model, self._items, form)

    def _render_tokens(
        self, model: Model, items: Sequence[Item], form: AnswerForm, *, generate: bool = True
    ) -> list[int]:
        messages = prompts.messages_of(
            self._request.instructions,
            items,
            toolset=form.toolset,
            words="" if form.text is None else form.text.words,
            apart=prompts.keeps_later_system(model),
        )
        generate = generate and not self._warm
        return prompts.render_conversation(
            model, messages, form.toolset.specs, generate=generate, effort=self._effort
        )

    def _will_be_stored(self) -> bool:
        """Raises Unavailable where storing was requested and the database cannot be written."""
        request, store = self._request, self._owner.store
        if request.store is False:
            return False
        if store is None or not store.failing:
            return True
        if request.store or self.background:
            raise Unavailable(
                "Responses cannot be stored just now, the server's database cannot be written; "
                "send store: false or try again shortly.",
                param="store",
            )
        return False

    def _warm_up(self, job: Job | RemoteJob, permit: Permit | None) -> None:
        """`generate: false`: complete the response at once and fill the cache in the background. Raises
        RateLimited; a full queue only skips the prefill."""
        if isinstance(job, Job):
            with contextlib.suppress(QueueFull):
                work = self._owner.service.submit(
                    self.entry,
                    job,
                    self.caller,
                    priority=Priority.BACKGROUND,
                    identity=self.id,
                    permit=permit,
                )
                work.subscribe(lambda _items: None)
        elif permit is not None:
            permit.settle(0)
        size = job.estimate
        created = self._serializer.on_created()
        self._sink([*created, *self._serializer.end("completed", ResponseUsage(size, 0, size))])
        self._record_turn(self.response, ConversationTurn(self.id, self.entry.name, self._items))
        self._finish()

    # Steering

    def steer(self, content: str | list[Item]) -> None:
        """Accept input for the answer in progress and report it. Raises InputError for anything but user
        messages."""
        items = prompts.items_of(content)
        if not items or not all(item.is_from_user for item in items):
            raise InputError("Only user messages can steer a response.", param="input")
        steer = PendingSteer(new_id("steer"), items)
        self._pending.append(steer)
        accepted = events.SteerAccepted(
            events.SteerRef(steer.id, self.id), self._serializer.next_number(), self._stream()
        )
        model = self.entry.model
        assert self.work is not None
        if model is None:
            # A remote stream cannot be spliced: stop, then succeed it.
            self.work.cancel(Redirected("steered"))
        elif model.chat is not None and model.chat.foreign:
            self._splicing = asyncio.create_task(self._splice_later(self._splicing, steer, model))
        else:
            messages = prompts.messages_of(None, items, self._items)
            self._splice(steer, prompts.join_tokens(model, messages, self._effort))
        self._sink([accepted])

    def _splice(self, steer: PendingSteer, joint: list[int] | None) -> None:
        if joint is not None and self.work is not None:
            self.work.ticket.redirect(steer.id, joint)

    async def _splice_later(
        self, before: asyncio.Task[None] | None, steer: PendingSteer, model: Model
    ) -> None:
        """Wait for a template that runs in its own process, in the order of the input. Where it fails, or the
        answer ends first, a successor takes the input."""
        if before is not None:
            await asyncio.wait({before})
        messages = prompts.messages_of(None, steer.items, self._items)
        try:
            joint = await asyncio.to_thread(prompts.join_tokens, model, messages, self._effort)
        except KeystrokeError:
            return
        if steer in self._pending:
            self._splice(steer, joint)

    def _on_steered(self, _answer: RunningAnswer, item: TicketSteered) -> ResponseSerializer:
        """The engine spliced the input in: the successor begins."""
        steer = next(s for s in self._pending if s.id == item.steer_id)
        self._pending.remove(steer)
        previous = self.response
        self._items = [*self._items, *map(as_input, self._answer_items(previous)), *steer.items]
        self._own_items = steer.items
        response = new_response(
            self._request,
            self.entry.name,
            self._routing,
            tier=previous.service_tier,
            store=previous.store,
        )
        response.previous_response_id = previous.id
        self._serializer = ResponseSerializer(response, self.stream_id)
        self._owner.runs[self.id] = self
        return self._serializer

    @staticmethod
    def _answer_items(response: Response) -> list[OutputItem]:
        """What the model wrote: the compaction item is already part of the conversation."""
        return [item for item in response.output if not isinstance(item, CompactionItem)]

    # Ending

    def _send(self, messages: list[Any]) -> None:
        """Send messages to the client. The final event of a response that is stored waits for the commit: a
        client that saw it end finds it, whatever happens to this gateway."""
        answer = self._answer
        # A steered response has a successor: its end is not the last event.
        if answer is not None and answer.outcome is None:
            self._stored = False
            self._sink(messages)
            return
        store = self._owner.store
        durable = store is not None and store.retention_days > 0 and bool(self.response.store)
        if durable and answer is not None and not self._stored:
            at = max(
                (i for i, m in enumerate(messages) if isinstance(m, events.TERMINAL)), default=len(messages)
            )
            messages, self._held_events = messages[:at], messages[at:]
        if messages:
            self._sink(messages)

    def _on_answer_end(
        self, _answer: RunningAnswer, outcome: WorkOutcome, item: TicketEnded | TicketSteered
    ) -> None:
        if self._open_turn is not None and self._owner.journal is not None:
            resumable = isinstance(outcome.error, Unavailable)
            self._owner.journal.end(self._open_turn, forget=not resumable)
        if not self._held_events or isinstance(item, TicketSteered):
            self._stored = self._stored or isinstance(item, TicketEnded)
            self._end_response(outcome, item)
        else:
            self._task = asyncio.get_running_loop().create_task(self._end_once_stored(outcome, item))

    async def _end_once_stored(self, outcome: WorkOutcome, item: TicketEnded) -> None:
        store = self._owner.store
        assert store is not None
        committed = await store.commit_response(self.caller.id, self._own_items, self.response)
        final_events, self._held_events = self._held_events or [], None
        self._stored = True
        if not committed:  # locked, full or over quota: the client must not rely on it
            self.response.store = False
            for event in final_events:
                if isinstance(event, events.TERMINAL):
                    event.response.store = False
        self._sink(final_events)
        self._end_response(outcome, item, saved=True)

    def _end_response(
        self, outcome: WorkOutcome, item: TicketEnded | TicketSteered, *, saved: bool = False
    ) -> None:
        """Record the turn of a response that ended; continue where steering input is pending."""
        response = self.response
        self._owner.runs.pop(response.id, None)
        turn = None
        if outcome.status != "failed":
            items = [*self._items, *map(as_input, self._answer_items(response))]
            turn = ConversationTurn(response.id, self.entry.name, items, tokens=item.tokens or None)
        self._record_turn(response, turn, saved=saved)
        if isinstance(item, TicketSteered):
            return
        if self._pending and turn is not None and outcome.status != "cancelled" and not self._cancelled:
            self._continue_pending(response, turn)
        else:
            self._return_pending()
        if not self._pending:
            self._finish()

    def _record_turn(self, response: Response, turn: ConversationTurn | None, *, saved: bool = False) -> None:
        if turn is not None:
            turn.instructions, turn.tools = self._request.instructions, self._tools
            turn.effort = self._effort
            if response.store:
                self._owner.conversations.remember(self.caller, turn)
        if response.store and self._owner.store is not None and not saved:
            self._owner.store.save_response(self.caller.id, self._own_items, response)
        self.latest = (response.id, turn)
        self._on_turn(self.latest)

    def _continue_pending(self, response: Response, turn: ConversationTurn) -> None:
        """The answer ended before the steering input reached it: a successor takes the input, or the client's
        next request where the client owes tool results first."""
        owed = [c for c in response.output if isinstance(c, FunctionCall | CustomToolCall)]
        if not owed:
            _call_soon(lambda: self._start_successor(turn))
            return
        required = [
            events.RequiredInput("function_call_output", c.call_id, c.name)
            if isinstance(c, FunctionCall)
            else events.RequiredInput("custom_tool_call_output", c.call_id)
            for c in owed
        ]
        waiting, self._pending = self._pending, []
        messages: list[Any] = []
        for steer in waiting:
            turn.steers += steer.items
            ref = events.SteerRef(steer.id, response.id)
            number = self._serializer.next_number()
            messages.append(events.SteerPending(ref, required, number, stream_id=self._stream()))
        _call_soon(lambda: self._sink(messages))

    def _start_successor(self, turn: ConversationTurn) -> None:
        waiting, self._pending = self._pending, []
        self._own_items = items = [item for steer in waiting for item in steer.items]
        self._items = [*turn.items, *items]
        previous_id = self.id

        async def begin() -> None:
            try:
                if self._cancelled:
                    raise Interrupted("The turn was cancelled before its successor began.")
                self._request.previous_response_id = previous_id
                await self.start(turn)
                self._repeat_cancel()
            except KeystrokeError as error:
                number = self._serializer.next_number()
                code = "successor_creation_failed"
                self._sink(
                    [steer_failed(previous_id, items, code, error.message, None, number, self.stream_id)]
                )
                self._finish()

        self._task = asyncio.create_task(begin())

    def _return_pending(self) -> None:
        waiting, self._pending = self._pending, []
        text = "The response ended before the input was used; send it with response.create."
        messages: list[Any] = []
        for steer in waiting:
            number = self._serializer.next_number()
            code = "response_not_active"
            messages.append(steer_failed(self.id, steer.items, code, text, steer.id, number, self.stream_id))
        if messages:
            _call_soon(lambda: self._sink(messages))

    def _finish(self) -> None:
        if not self.over.is_set():
            self.over.set()
            if self.replay is not None:
                self.replay.start_timer()
            _call_soon(lambda: self._on_done())  # the listener may change until then

    def _stream(self) -> Any:
        return UNSET if self.stream_id is None else self.stream_id


def _call_soon(act: Callable[[], None]) -> None:
    """Run `act` after the event being written: endings are reported from inside it."""
    asyncio.get_running_loop().call_soon(act)


def steer_failed(
    response_id: str,
    content: str | list[Item],
    code: str,
    message: str,
    steer_id: str | None,
    number: int,
    stream_id: str | None,
) -> events.SteerFailed:
    return events.SteerFailed(
        events.SteerReturned(response_id, content, steer_id),
        events.SteerError(code, message),
        number,
        UNSET if stream_id is None else stream_id,
    )

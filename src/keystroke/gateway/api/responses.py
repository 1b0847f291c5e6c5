"""The Responses API: create, continue, steer, cancel, fetch.

Everything a response is, whichever transport asked: what may be asked, which model answers, what becomes
its prompt, what the response object says. What happens while it runs is the ResponseRun's.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from keystroke.errors import Forbidden, InputError, Interrupted, KeystrokeError, QueueFull, Unavailable
from keystroke.gateway.access.keys import Caller
from keystroke.gateway.access.limits import Settles
from keystroke.gateway.api import prompts
from keystroke.gateway.api.answer import Answer, Sink
from keystroke.gateway.api.answer_form import AnswerForm, TextFormat, answer_form, hold, text_format
from keystroke.gateway.api.conversations import Conversations
from keystroke.gateway.api.prompts import Turn
from keystroke.gateway.api.replay import Replays
from keystroke.gateway.api.response_run import OnTurn, ResponseRun, steer_failed
from keystroke.gateway.api.serializers import ResponseSerializer
from keystroke.gateway.work.priority import Priority
from keystroke.gateway.work.remote import RemoteJob
from keystroke.gateway.work.routing import Task
from keystroke.gateway.work.scheduler import Job
from keystroke.gateway.work.service import Service, Wish, new_id
from keystroke.protocol.faults import PreviousResponseNotFound, ResponseNotFound
from keystroke.protocol.items import Item, text_of
from keystroke.protocol.requests import CreateRequest, ResponseCreate
from keystroke.protocol.response import Response, Usage

Recall = Callable[[str], Turn | None]


class Responses:
    def __init__(self, service: Service) -> None:
        self.service = service
        self.store = service.store
        self.conversations = Conversations(service.store)
        self.runs: dict[str, ResponseRun] = {}
        self.replays = Replays()

    async def create(
        self,
        request: CreateRequest,
        caller: Caller,
        sink: Sink,
        *,
        recall: Recall | None = None,
        on_turn: OnTurn | None = None,
        on_done: Callable[[], None] | None = None,
    ) -> ResponseRun:
        """Begin a response. Everything that can be refused is raised from here, before any event."""
        _check(request)
        previous = await self._previous(request, caller, recall)
        run = ResponseRun(self, request, caller, sink)
        run.on_turn, run.on_done = on_turn or run.on_turn, on_done or run.on_done
        warm = isinstance(request, ResponseCreate) and request.generate is False
        if not warm and (request.on_disconnect == "continue" or (request.background and request.stream)):
            run.replay = self.replays.begin(run, outlives=bool(request.background))
            run.replay.attach(sink)
            run.sink = run.replay.put
        steers = previous.steers if previous is not None else []
        run.own_items = [*steers, *prompts.items_of(request.input)]
        request.input = None  # what of it matters is among the items; the rest may be megabytes
        run.items = [*previous.items, *run.own_items] if previous is not None else run.own_items
        if not run.items:
            raise InputError("input is missing; send a text or a list of items.", param="input")
        await self._begin(run, previous)
        return run

    async def fetch(self, response_id: str, caller: Caller) -> Response:
        run = self.runs.get(response_id)
        if run is not None and run.caller.id == caller.id:
            return run.response
        if self.store is not None and run is None:
            stored = await self.store.response(response_id)
            if stored is not None and stored.key_id == caller.id:
                return stored.response
        raise ResponseNotFound(f"There is no response {response_id:.80}.", param="response_id")

    async def cancel(self, response_id: str, caller: Caller) -> Response:
        """Stop a response. One that already ended is given as it is."""
        run = self.runs.get(response_id)
        if run is None:
            return await self.fetch(response_id, caller)
        if run.caller.id != caller.id:
            raise ResponseNotFound(f"There is no response {response_id:.80}.", param="response_id")
        response = run.response
        run.cancel()
        await run.over.wait()
        return response

    async def forget(self, response_id: str, caller: Caller) -> None:
        """Delete a stored response; one that still runs is stopped first, and nothing of it is kept. Raises
        ResponseNotFound."""
        run = self.runs.get(response_id)
        await self.fetch(response_id, caller)
        if run is not None:
            run.response.store = False
            run.cancel()
            await run.over.wait()
        self.conversations.forget(response_id)
        if self.store is not None:
            await self.store.apart(self.store.delete_response, response_id)

    # Inside

    async def _previous(self, request: CreateRequest, caller: Caller, recall: Recall | None) -> Turn | None:
        wanted = request.previous_response_id
        if wanted is None:
            return None
        turn = recall(wanted) if recall is not None else None
        if turn is None:
            turn = await self.conversations.recall(caller, wanted)
        if turn is None:
            raise PreviousResponseNotFound(
                f"Response {wanted:.80} is not known here; send the whole input without it.",
                param="previous_response_id",
            )
        return turn

    async def _begin(self, run: ResponseRun, previous: Turn | None) -> None:
        request, service = run.request, self.service
        background = bool(request.background)
        priority, tier = service.ranking(
            run.caller,
            request.priority or request.lane,
            Priority.BACKGROUND if background else Priority.CHAT,
            request.service_tier,
        )
        run.entry, run.routing = await service.route(request.model, lambda: _task(run, priority))
        entry = run.entry
        warm = isinstance(request, ResponseCreate) and request.generate is False
        form = answer_form(
            request.tools,
            request.tool_choice,
            request.parallel_tool_calls,
            _format(request),
            declarations=service.declarations,
            parameters=entry.parameters,
            items=run.items,
        )
        params = service.params(_wish(request))
        job: Job | RemoteJob
        if entry.model is not None:
            if not warm:
                params, form = await hold(entry.model, params, form, run.items, request.tools)
            length = prompts.length(run.own_items if previous is not None and previous.tokens else run.items)
            tokens: list[int] = await service.off_loop(
                length, lambda: self._prompt(run, previous, form, generate=not warm), entry.model
            )
            drafter = service.draft(entry.model, request.prediction, len(tokens), request.drafts)
            affinity = prompts.affinity(request.instructions, run.items)
            job = Job(tokens, params, drafter, warm=warm, affinity=affinity)
        else:
            messages = prompts.messages_of(request.instructions, run.items, toolset=form.toolset)
            job = RemoteJob(params, messages, form.toolset.specs or None, form.remote, form.check)
        response = _response(run, tier.label, kept=self._keeps(request))
        response.shortened = prompts.shortened(run.items, form.toolset)
        run.serializer = ResponseSerializer(response, run.stream_id)
        permit = await service.admitted(entry, job, run.caller)
        if warm:
            self._warm(run, job, permit)
            return
        work = service.submit(
            entry,
            job,
            run.caller,
            priority=priority,
            tier=tier,
            buffer=request.buffer,
            identity=run.id,
            permit=permit,
        )
        run.answer = Answer(
            work,
            run.serializer,
            run.tell,
            tokenizer=entry.tokenizer,
            toolset=form.toolset,
            parser=lambda: form.parser(local=entry.model is not None),
            on_end=run.ended,
            on_steered=run.steered,
        )
        self.runs[run.id] = run
        if background and response.store and self.store is not None:
            self.store.save_response(run.caller.id, run.own_items, response, running=True)

    def _keeps(self, request: CreateRequest) -> bool:
        """Whether the response will be kept, as its object says. Raises Unavailable where it was asked to be
        and cannot be."""
        if request.store is False:
            return False
        if self.store is None or not self.store.failing:
            return True
        if request.store or request.background:
            raise Unavailable(
                "Responses cannot be stored just now, the server's database cannot be written; "
                "send store: false or try again shortly.",
                param="store",
            )
        return False

    def _prompt(
        self, run: ResponseRun, previous: Turn | None, form: AnswerForm, *, generate: bool
    ) -> list[int]:
        request, model = run.request, run.entry.model
        assert model is not None
        words = "" if form.text is None else form.text.words
        if (
            generate
            and not words
            and previous is not None
            and previous.tokens is not None
            and previous.model == run.entry.name
            and previous.instructions == request.instructions
            and previous.tools == request.tools
        ):
            new = prompts.messages_of(None, run.own_items, previous.items, toolset=form.toolset)
            joined = prompts.continued(model, previous.tokens, new) if new else None
            if joined is not None:
                return joined
        messages = prompts.messages_of(
            request.instructions,
            run.items,
            toolset=form.toolset,
            words=words,
            apart=prompts.stands_apart(model),
        )
        return prompts.whole(model, messages, form.toolset.specs, generate=generate)

    def _warm(self, run: ResponseRun, job: Job | RemoteJob, permit: Settles | None) -> None:
        """`generate: false`: answer at once, so the client can go on; fill the cache behind its back. Raises
        RateLimited where the caller has no budget left; a full queue only costs the head start."""
        if isinstance(job, Job):
            with contextlib.suppress(QueueFull):
                work = self.service.submit(
                    run.entry,
                    job,
                    run.caller,
                    priority=Priority.BACKGROUND,
                    identity=run.id,
                    permit=permit,
                )
                work.follow(lambda _items: None)
        elif permit is not None:
            permit.settle(0)
        size = job.estimate
        run.sink([*run.serializer.began(), *run.serializer.stream.completed(Usage(size, 0, size))])
        turn = Turn(run.id, run.entry.name, run.items, run.request.instructions, run.request.tools)
        if run.response.store:
            self.conversations.remember(run.caller, turn)
            if self.store is not None:
                self.store.save_response(run.caller.id, run.own_items, run.response)
        run.on_turn((run.id, turn))
        run.finish()

    def succeed(self, run: ResponseRun, turn: Turn, items: list[Item]) -> None:
        """An automatic successor for input that came too late to be spliced in."""
        run.pending = []
        previous = run.serializer.response
        run.own_items = items
        run.items = [*turn.items, *items]

        async def begin() -> None:
            try:
                if run.cancelled:
                    raise Interrupted("The turn was cancelled before its successor began.")
                run.request.previous_response_id = previous.id
                await self._begin(run, turn)
                run.heed_cancel()
            except KeystrokeError as error:
                number = run.serializer.stream.number()
                failed = steer_failed(
                    previous.id,
                    items,
                    "successor_creation_failed",
                    error.message,
                    None,
                    number,
                    run.stream_id,
                )
                run.sink([failed])
                run.finish()

        run.task = asyncio.create_task(begin())

    def successor_serializer(self, run: ResponseRun, previous: Response) -> ResponseSerializer:
        response = _response(run, previous.service_tier, kept=previous.store)
        response.previous_response_id = previous.id
        return ResponseSerializer(response, run.stream_id)

    @staticmethod
    def later(act: Callable[[], None]) -> None:
        """After the event being written: endings call back from inside it."""
        asyncio.get_running_loop().call_soon(act)


METADATA = (16, 64, 512)  # pairs, and characters of a name and of a value: every event carries them


def _check(request: CreateRequest) -> None:
    pairs, name, value = METADATA
    given = request.metadata or {}
    if len(given) > pairs or any(len(k) > name or len(str(v)) > value for k, v in given.items()):
        raise InputError(
            f"metadata holds at most {pairs} pairs of {name} and {value} characters; shorten it.",
            param="metadata",
        )
    if request.conversation is not None:
        raise InputError(
            "conversation is not supported; chain turns by previous_response_id.", param="conversation"
        )
    if request.background and request.store is False:
        raise Forbidden(
            "A background response must be stored to be found again; leave store out.", param="store"
        )


def _format(request: CreateRequest) -> TextFormat | None:
    given = (request.text or {}).get("format")
    if given is not None and not isinstance(given, dict):
        raise InputError("text.format must be an object.", param="text.format")
    return text_format(given, "text.format", structured_outputs=request.structured_outputs)


def _wish(request: CreateRequest) -> Wish:
    wanted = request.include or []
    logprobs = request.top_logprobs
    if logprobs is None and "message.output_text.logprobs" in wanted:
        logprobs = 0
    return Wish(
        request.max_output_tokens,
        request.temperature,
        request.top_p,
        request.top_k,
        request.seed,
        request.stop,
        logprobs,
    )


def _response(run: ResponseRun, tier: str, *, kept: bool) -> Response:
    request = run.request
    return Response(
        id=new_id("resp"),
        created_at=int(time.time()),
        model=run.entry.name,
        status="queued" if request.background else "in_progress",
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning=request.reasoning,
        service_tier=tier,
        store=kept,
        temperature=request.temperature or 0.0,
        text=request.text or {"format": {"type": "text"}},
        tool_choice="auto" if request.tool_choice is None else request.tool_choice,
        tools=request.tools or [],
        top_logprobs=request.top_logprobs or 0,
        top_p=1.0 if request.top_p is None else request.top_p,
        user=request.user,
        routing=run.routing,
    )


def _task(run: ResponseRun, priority: Priority) -> Task:
    words = next((text_of(i.content) for i in reversed(run.own_items) if i.role == "user"), "")
    effort = (run.request.reasoning or {}).get("effort")
    return Task(
        priority, words, prompts.length(run.items), bool(run.request.background), effort, converses=True
    )

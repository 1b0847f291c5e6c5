"""Chat completions, completions (with a suffix) and infill: stateless requests, independent of the transport.

Each turns its request into a job and a serializer; all share one way of running.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import UNSET, UnsetType

from keystroke.assist.completion import Ending
from keystroke.assist.completion.run import EndingDetector, build_question
from keystroke.assist.next_edit.foreign import parse_prompt
from keystroke.config import AssistSettings
from keystroke.engine.generation import GenerationParams
from keystroke.engine.model import Model
from keystroke.engine.prefix import common_prefix
from keystroke.errors import InputError, KeystrokeError, UnsupportedModel
from keystroke.gateway.access.keys import Caller
from keystroke.gateway.api import prompts
from keystroke.gateway.api.answer import RunningAnswer, Sink
from keystroke.gateway.api.answer_form import AnswerForm, answer_form, constrain, text_format
from keystroke.gateway.api.compaction import Compactor, LongConversation, RenderedPrompt, compaction_limit
from keystroke.gateway.api.foreign_edits import ForeignEdits, handles_natively
from keystroke.gateway.api.response_request import cache_breakpoints, reasons
from keystroke.gateway.api.serializers import ChatSerializer, CompletionSerializer, TextSerializer
from keystroke.gateway.work.priority import Priority, Tier, shown_tier
from keystroke.gateway.work.registry import AUTO, ServedModel
from keystroke.gateway.work.remote import RemoteJob
from keystroke.gateway.work.routing import RoutingRequest
from keystroke.gateway.work.scheduler import Job
from keystroke.gateway.work.service import Service, new_id
from keystroke.gateway.work.work import Work
from keystroke.protocol.chat import TextCompletion
from keystroke.protocol.faults import NoSuitableModel
from keystroke.protocol.field_table import ignored_fields
from keystroke.protocol.items import Item, Tool, content_text
from keystroke.protocol.requests import (
    ChatMessage,
    ChatRequest,
    ChatTool,
    CompletionRequest,
    CreateRequest,
)
from keystroke.protocol.response import Compacted, Routing

SerializerMaker = Callable[..., TextSerializer]


@dataclass(slots=True)
class TextRun:
    """One answer in progress. `over` is set at its end; `error` then says why it did not succeed."""

    work: Work
    answer: RunningAnswer
    serializer: Any
    over: asyncio.Event
    context_length: int

    @property
    def error(self) -> KeystrokeError | None:
        return self.answer.outcome.error if self.answer.outcome is not None else None

    def pause(self) -> None:
        self.work.ticket.pause()

    def resume(self) -> None:
        self.work.ticket.resume()

    def cancel(self, reason: KeystrokeError | None = None) -> None:
        self.work.cancel(reason)

    def disconnect(self, _sink: Sink, reason: KeystrokeError) -> None:
        self.work.cancel(reason)


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """A chat request after routing: its model, the form of its answer and what the prompt is made of."""

    entry: ServedModel
    routing: Routing
    form: AnswerForm
    items: list[Item]
    tools: list[Tool] | None
    read: list[Item]  # the items that the prompt contains
    size: int  # characters
    rank: tuple[Priority, Tier]
    effort: str | None = None  # of reasoning

    def messages(self, form: AnswerForm, *, apart: bool = False) -> list[prompts.Message]:
        words = "" if form.text is None else form.text.words
        return prompts.messages_of(None, self.read, toolset=form.toolset, words=words, apart=apart)


class TextCompletions:
    def __init__(self, service: Service, assist: AssistSettings | None = None) -> None:
        self.service = service
        self._edits = ForeignEdits(service, assist or AssistSettings())
        self._compactor = Compactor(service)

    async def chat(
        self,
        request: ChatRequest,
        caller: Caller,
        sink: Sink,
        *,
        on_done: Callable[[], None] | None = None,
        serializer: SerializerMaker = ChatSerializer,
    ) -> TextRun:
        """`on_done` is called when the last message has gone to the sink; `serializer` makes the messages of
        the API that was called."""
        service, plan = self.service, await self._plan_chat(request, caller)
        entry, form, items = plan.entry, plan.form, plan.items
        params = service.generation_params(
            request,
            request.max_completion_tokens or request.max_tokens,
            (request.top_logprobs or 0) if request.logprobs else None,
        )
        model = entry.model
        if model is not None:
            params, form = await constrain(model, params, form, items, plan.tools)
        elif plan.effort is not None and (plan.effort != "none" or serializer is ChatSerializer):
            # "none" only where the client wrote it: not every server knows it.
            form = replace(form, more={"reasoning_effort": plan.effort})
        affinity = request.prompt_cache_key or prompts.affinity(None, items)
        prompt, compacted = await self._fitting_prompt(plan, form, caller, affinity, params)
        job = prompt.job(params)
        if model is not None and isinstance(job, Job):
            job.drafter = service.make_drafter(model, request.prediction, len(job.prompt), request.drafts)
            job.protected = await self._protected_prefixes(model, plan, form, job.prompt)
        messages_out = serializer(
            new_id("chatcmpl"),
            entry.name,
            plan.routing,
            include_usage=_wants_usage(request.stream_options),
            shortened=prompts.describe_shortening(items, form.toolset),
        )
        messages_out.compacted = compacted
        messages_out.tier = shown_tier(request.service_tier, plan.rank[1])
        messages_out.notes += ignored_fields("POST /v1/chat/completions", request)
        if plan.effort not in (None, "none") and not reasons(model):
            messages_out.notes.append(f"reasoning was asked for, but {entry.name} does not reason")
        return await self._run(
            entry,
            job,
            messages_out,
            caller,
            sink,
            on_done,
            rank=plan.rank,
            buffer=request.buffer,
            toolset=form.toolset,
            parser=lambda: form.parser(model, job.prompt if isinstance(job, Job) else ()),
            edits=form.client_edits(service, entry, caller, items),
        )

    async def _fitting_prompt(
        self,
        plan: ChatPlan,
        form: AnswerForm,
        caller: Caller,
        affinity: str,
        params: GenerationParams,
    ) -> tuple[RenderedPrompt, Compacted | UnsetType]:
        """The prompt; where the conversation is too long, that of the compacted one."""
        entry = plan.entry
        reused = self._compactor.reuse(caller, affinity, plan.read)

        async def render(items: Sequence[Item]) -> RenderedPrompt:
            return await self._render_prompt(replace(plan, read=list(items)), form, affinity)

        items = plan.read if reused is None else reused.items
        prompt = await render(items)
        limit = compaction_limit(entry.context_length, params.max_tokens)
        if limit is None or prompt.size <= limit.tokens:
            return prompt, UNSET if reused is None else reused.compacted
        long = LongConversation(items, prompt, render, limit, entry, caller, affinity, reused)
        fitted = await self._compactor.fit(long)
        return (prompt, UNSET) if fitted is None else (fitted.prompt, fitted.compacted)

    async def _render_prompt(self, plan: ChatPlan, form: AnswerForm, affinity: str) -> RenderedPrompt:
        model = plan.entry.model
        if model is None:
            return RenderedPrompt.remote(plan.messages(form), form)
        return RenderedPrompt.local(await self._chat_tokens(model, plan, form), affinity)

    async def count_chat(self, request: ChatRequest, caller: Caller) -> int:
        """The tokens of the prompt that `chat` would use; for a remote model an estimate."""
        plan = await self._plan_chat(request, caller)
        return (await self._render_prompt(plan, plan.form, "")).size

    async def chat_prompt(self, request: ChatRequest, caller: Caller) -> tuple[Model, list[int]]:
        """The prompt that `chat` would use, and the model whose tokens it has. Raises NoSuitableModel for a
        remote model."""
        plan = await self._plan_chat(request, caller)
        model = plan.entry.model
        if model is None:
            raise NoSuitableModel(
                f"{plan.entry.name} runs on another server, which has its template; name one that runs here.",
                param="model",
            )
        return model, await self._chat_tokens(model, plan, plan.form)

    async def _plan_chat(self, request: ChatRequest, caller: Caller) -> ChatPlan:
        """Choose the model and the form of the answer. Raises what an invalid request raises."""
        service = self.service
        if request.audio is not None:
            raise InputError("audio is not supported: the models here write text only.", param="audio")
        if request.tool_choice is None:
            request.tool_choice = request.function_call
        answer_format = text_format(request.response_format, "response_format", request)
        items, tools = chat_items(request.messages), chat_tools(request)
        rank = service.priority_and_tier(
            caller, request.priority or request.lane, Priority.CHAT, request.service_tier
        )
        size = sum(len(content_text(i.content)) for i in items)
        words = next((content_text(i.content) for i in reversed(items) if i.role == "user"), "")
        entry, routing = await service.route(
            request.model,
            lambda: RoutingRequest(rank[0], words, size, effort=request.reasoning_effort, converses=True),
        )
        form = answer_form(
            request,
            tools,
            answer_format,
            items,
            declarations=service.tool_declarations,
            parameters=entry.parameters,
        )
        effort = request.reasoning_effort
        return ChatPlan(entry, routing, form, items, tools, prompts.items_of(items), size, rank, effort)

    async def _chat_tokens(self, model: Model, plan: ChatPlan, form: AnswerForm) -> list[int]:
        def render() -> list[int]:
            messages = plan.messages(form, apart=prompts.keeps_later_system(model))
            return prompts.render_conversation(model, messages, form.toolset.specs, effort=plan.effort)

        tokens: list[int] = await self.service.run_off_loop(plan.size, render, model)
        return tokens

    async def _protected_prefixes(
        self, model: Model, plan: ChatPlan, form: AnswerForm, tokens: Sequence[int]
    ) -> list[tuple[int, float]]:
        """Lengths of the prefixes of the prompt that the request marks, and for how many seconds."""
        lengths: list[tuple[int, float]] = []
        for items, seconds in cache_breakpoints(CreateRequest(), plan.read):
            part = replace(plan, read=items)
            lengths.append((common_prefix(await self._chat_tokens(model, part, form), tokens), seconds))
        return lengths

    async def foreign(self, request: CompletionRequest, caller: Caller) -> TextCompletion | None:
        """The answer to a prompt in the format of Zeta 2 or Sweep's models; None for other prompts, or where
        the model was trained for that format. An unknown model name means `auto` here."""
        if request.suffix is not None or request.literal or request.context is not None:
            return None
        parsed = parse_prompt(request.text)
        if parsed is None:
            return None
        known = request.model in self.service.registry.entries
        entry, routing = await self.service.route(
            request.model if known else AUTO, lambda: RoutingRequest(Priority.GHOST, here=True)
        )
        if handles_natively(entry):
            return None
        return await self._edits.answer(parsed, request, entry, routing, caller)

    async def complete(
        self,
        request: CompletionRequest,
        caller: Caller,
        sink: Sink,
        *,
        priority: Priority = Priority.GHOST,
        extra: str = "",
        on_done: Callable[[], None] | None = None,
        serializer: SerializerMaker = CompletionSerializer,
    ) -> TextRun:
        """`extra`, the text of other files, goes before the prompt."""
        service = self.service
        answer_format = text_format(request.response_format, "response_format", request)
        prefix, suffix = request.text, request.suffix
        priority, tier = service.priority_and_tier(
            caller, request.priority or request.lane, priority, request.service_tier
        )
        size = len(prefix) + len(suffix or "") + len(extra)
        entry, routing = await service.route(request.model, lambda: RoutingRequest(priority, "", size))
        params = service.generation_params(request, request.max_tokens, request.logprobs)
        job: Job | RemoteJob
        detector: EndingDetector | None = None
        model = entry.model
        if model is not None:
            if (budget := request.context) is not None:
                question = await service.run_off_loop(
                    size,
                    lambda: build_question(model, extra + prefix, suffix or "", budget=budget, params=params),
                )
                tokens, params = list(question.tokens), question.params
                if request.lines is not None:
                    detector = EndingDetector(
                        Ending.at(prefix, suffix or "", request.lines), question.repeated
                    )
            else:
                literal = bool(request.literal)
                tokens = await service.run_off_loop(
                    size, lambda: completion_tokens(model, extra, prefix, suffix, literal=literal)
                )
                if model.fim is not None and suffix is not None:
                    params = replace(params, stop_tokens=model.fim.stops)
            if answer_format is not None:
                params, _ = await constrain(model, params, AnswerForm(text=answer_format))
            job = Job(
                tokens, params, service.make_drafter(model, request.prediction, len(tokens), request.drafts)
            )
        else:
            form = AnswerForm(text=answer_format)
            job = RemoteJob(
                params, fields=form.remote, check=form.check, prompt=extra + prefix, suffix=suffix
            )
        messages_out = serializer(
            new_id("cmpl"),
            entry.name,
            routing,
            include_usage=_wants_usage(request.stream_options),
            echo=prefix if request.echo else "",
        )
        return await self._run(
            entry,
            job,
            messages_out,
            caller,
            sink,
            on_done,
            rank=(priority, tier),
            buffer=request.buffer,
            should_stop=detector,
        )

    async def _run(
        self,
        entry: ServedModel,
        job: Job | RemoteJob,
        serializer: TextSerializer,
        caller: Caller,
        sink: Sink,
        on_done: Callable[[], None] | None,
        *,
        rank: tuple[Priority, Tier],
        buffer: str | None,
        **parsing: Any,
    ) -> TextRun:
        """Queue the job; `parsing` are the options of `RunningAnswer` on how to read its text."""
        work = await self.service.enqueue(
            entry, job, caller, priority=rank[0], tier=rank[1], buffer=buffer, identity=serializer.id
        )
        over = asyncio.Event()
        serializer.input_tokens = job.input_tokens
        if isinstance(job, Job):
            serializer.marked_tokens = max((length for length, _ in job.protected), default=0)
        answer = RunningAnswer(
            work,
            serializer,
            sink,
            tokenizer=entry.tokenizer,
            on_end=lambda _answer, _outcome, _item: over.set(),
            on_done=on_done,
            **parsing,
        )
        return TextRun(work, answer, serializer, over, entry.context_length or 0)


def completion_tokens(
    model: Model, extra: str, prefix: str, suffix: str | None, *, literal: bool = False
) -> list[int]:
    """The prompt of a completion. A suffix that is not empty needs a model with infill. `literal`: control
    tokens in the prompt are plain text."""
    if suffix:
        if model.fim is None:
            raise UnsupportedModel(
                f"{model.name} cannot fill in the middle; leave out suffix or use a model that can."
            )
        return model.fim.tokens(model.tokenizer, extra + prefix, suffix)
    text = extra + prefix
    if model.fim is not None and suffix is not None:
        return model.fim.tokens(model.tokenizer, text, "")
    # A raw prompt may contain the model's control tokens.
    tokens = model.prompt(text, special=not literal)
    return tokens or [model.tokenizer.eos or 0]


def chat_items(messages: list[ChatMessage]) -> list[Item]:
    items: list[Item] = []
    for index, message in enumerate(messages):
        if message.role in ("tool", "function"):
            output = content_text(message.content)
            items.append(
                Item(type="function_call_output", call_id=message.tool_call_id or message.name, output=output)
            )
            continue
        prompts.refuse_images(message.content, f"messages[{index}]")
        if message.content is not None or not message.tool_calls:
            items.append(
                Item(role=message.role, content=message.content if message.content is not None else "")
            )
        for call in message.tool_calls or ():
            function = call.function
            items.append(
                Item(type="function_call", call_id=call.id, name=function.name, arguments=function.arguments)
            )
    return items


def chat_tools(request: ChatRequest) -> list[Tool] | None:
    older = [ChatTool(function=function) for function in request.functions or ()]
    if not request.tools and not older:
        return None
    tools: list[Tool] = []
    for one in (*(request.tools or ()), *older):
        f, c = one.function, one.custom
        if f is not None:
            tools.append(
                Tool(name=f.name, description=f.description, parameters=f.parameters, strict=f.strict)
            )
        elif c is not None:
            tools.append(Tool("custom", c.name, c.description, format=c.format))
    return tools


def _wants_usage(options: Any) -> bool:
    return bool(options is not None and options.include_usage)

"""Chat completions, completions (with a suffix) and infill: one question, one answer, nothing remembered.

Transport-free, like the Responses API beside it. Each function turns its request into a job and a
serializer; all three share one way of running.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

from keystroke.assist.completion import Ending
from keystroke.assist.completion.run import Decision, question
from keystroke.assist.next_edit.foreign import recognised
from keystroke.config import AssistSettings
from keystroke.engine.model import Model
from keystroke.errors import KeystrokeError, UnsupportedModel
from keystroke.gateway.access.keys import Caller
from keystroke.gateway.api import prompts
from keystroke.gateway.api.answer import Answer, Sink
from keystroke.gateway.api.answer_form import AnswerForm, TextFormat, answer_form, hold, text_format
from keystroke.gateway.api.foreign_edits import ForeignEdits, speaks_it
from keystroke.gateway.api.serializers import ChatSerializer, CompletionSerializer, Serializer
from keystroke.gateway.work.priority import Priority, Tier
from keystroke.gateway.work.registry import AUTO, ServedModel
from keystroke.gateway.work.remote import RemoteJob
from keystroke.gateway.work.routing import Task
from keystroke.gateway.work.scheduler import Job
from keystroke.gateway.work.service import Service, Wish, new_id
from keystroke.gateway.work.ticket import Ended, Steered
from keystroke.gateway.work.work import Outcome
from keystroke.protocol.chat import TextCompletion
from keystroke.protocol.items import Item, Part, Tool, text_of
from keystroke.protocol.requests import ChatMessage, ChatRequest, CompletionRequest
from keystroke.protocol.response import Routing


@dataclass(slots=True)
class TextRun:
    """One such answer under way. `over` is set at its end; `error` then says why it did not succeed."""

    answer: Answer
    serializer: Any
    over: asyncio.Event
    routing: Routing
    context_length: int = 0
    outcome: Outcome | None = None

    @property
    def error(self) -> KeystrokeError | None:
        return self.outcome.error if self.outcome is not None else None

    def cancel(self, reason: KeystrokeError | None = None) -> None:
        self.answer.cancel(reason)


@dataclass(frozen=True, slots=True)
class Plan:
    """A request made ready: what to run, for whom it speaks, and where it stands in the queue."""

    entry: ServedModel
    job: Job | RemoteJob
    serializer: Serializer
    routing: Routing
    priority: Priority
    tier: Tier
    buffer: str | None
    form: AnswerForm = field(default_factory=AnswerForm)
    plain: bool = False  # all text is text: no calls, no thoughts
    decided: Decision | None = None


class Texts:
    def __init__(self, service: Service, assist: AssistSettings | None = None) -> None:
        self.service = service
        self._edits = ForeignEdits(service, assist or AssistSettings())

    async def chat(self, request: ChatRequest, caller: Caller, sink: Sink) -> TextRun:
        service, wanted = self.service, _format(request)
        items, tools = chat_items(request.messages), chat_tools(request)
        priority, tier = service.ranking(
            caller, request.priority or request.lane, Priority.CHAT, request.service_tier
        )
        size = sum(len(text_of(i.content)) for i in items)
        words = next((text_of(i.content) for i in reversed(items) if i.role == "user"), "")
        entry, routing = await service.route(
            request.model, lambda: Task(priority, words, size, converses=True)
        )
        form = answer_form(
            tools,
            request.tool_choice,
            request.parallel_tool_calls,
            wanted,
            declarations=service.declarations,
            parameters=entry.parameters,
            items=items,
        )
        words = "" if wanted is None else wanted.words
        said = prompts.items_of(items)
        params = service.params(
            Wish(
                request.max_completion_tokens or request.max_tokens,
                request.temperature,
                request.top_p,
                request.top_k,
                request.seed,
                request.stop,
                (request.top_logprobs or 0) if request.logprobs else None,
            )
        )
        model, specs = entry.model, form.toolset.specs
        job: Job | RemoteJob
        if model is not None:
            params, form = await hold(model, params, form, items, tools)
            toolset = form.toolset

            def tokenised() -> list[int]:
                apart = prompts.stands_apart(model)
                messages = prompts.messages_of(None, said, toolset=toolset, words=words, apart=apart)
                return prompts.whole(model, messages, specs)

            tokens = await service.off_loop(size, tokenised, model)
            drafter = service.draft(model, request.prediction, len(tokens), request.drafts)
            job = Job(tokens, params, drafter, affinity=prompts.affinity(None, items))
        else:
            messages = prompts.messages_of(None, said, toolset=form.toolset, words=words)
            job = RemoteJob(params, messages, specs or None, form.remote, form.check)
        serializer = ChatSerializer(
            new_id("chatcmpl"),
            entry.name,
            routing,
            include_usage=_wants_usage(request.stream_options),
            shortened=prompts.shortened(items, form.toolset),
        )
        plan = Plan(entry, job, serializer, routing, priority, tier, request.buffer, form)
        return await self._run(plan, caller, sink)

    async def foreign(self, request: CompletionRequest, caller: Caller) -> TextCompletion | None:
        """The answer to a prompt made for Zeta 2 or Sweep's models; None where it is none, or the model
        was made for such prompts. Such a client's name for its model means whatever is here."""
        prompt = request.prompt if isinstance(request.prompt, str) else "".join(request.prompt)
        if request.suffix is not None or request.literal or request.context is not None:
            return None
        asked = recognised(prompt)
        if asked is None:
            return None
        known = request.model in self.service.registry.entries
        entry, routing = await self.service.route(
            request.model if known else AUTO, lambda: Task(Priority.GHOST, here=True)
        )
        if speaks_it(entry):
            return None
        return await self._edits.answer(asked, request, entry, routing, caller)

    async def complete(
        self,
        request: CompletionRequest,
        caller: Caller,
        sink: Sink,
        *,
        priority: Priority = Priority.GHOST,
        extra: str = "",
    ) -> TextRun:
        """`extra` goes before the prompt: other files, for models that know a separator."""
        service, wanted = self.service, _format(request)
        prefix = request.prompt if isinstance(request.prompt, str) else "".join(request.prompt)
        suffix = request.suffix
        priority, tier = service.ranking(
            caller, request.priority or request.lane, priority, request.service_tier
        )
        size = len(prefix) + len(suffix or "") + len(extra)
        entry, routing = await service.route(request.model, lambda: Task(priority, "", size))
        params = service.params(
            Wish(
                request.max_tokens,
                request.temperature,
                request.top_p,
                request.top_k,
                request.seed,
                request.stop,
                request.logprobs,
            )
        )
        job: Job | RemoteJob
        decided: Decision | None = None
        model = entry.model
        if model is not None:
            if (budget := request.context) is not None:
                asked = await service.off_loop(
                    size, lambda: question(model, extra + prefix, suffix or "", budget=budget, params=params)
                )
                tokens, params = list(asked.tokens), asked.params
                if request.lines is not None:
                    decided = Decision(Ending.at(prefix, suffix or "", request.lines), asked.held)
            else:
                literal = bool(request.literal)
                tokens = await service.off_loop(
                    size, lambda: middle(model, extra, prefix, suffix, literal=literal)
                )
                if model.fim is not None and suffix is not None:
                    params = replace(params, stop_tokens=model.fim.stops)
            if wanted is not None:
                params, _ = await hold(model, params, AnswerForm(text=wanted))
            job = Job(tokens, params, service.draft(model, request.prediction, len(tokens), request.drafts))
        else:
            form = AnswerForm(text=wanted)
            job = RemoteJob(
                params, fields=form.remote, check=form.check, prompt=extra + prefix, suffix=suffix
            )
        serializer = CompletionSerializer(
            new_id("cmpl"),
            entry.name,
            routing,
            include_usage=_wants_usage(request.stream_options),
            echo=prefix if request.echo else "",
        )
        plan = Plan(
            entry, job, serializer, routing, priority, tier, request.buffer, plain=True, decided=decided
        )
        return await self._run(plan, caller, sink)

    async def _run(self, plan: Plan, caller: Caller, sink: Sink) -> TextRun:
        service, entry, job, serializer = self.service, plan.entry, plan.job, plan.serializer
        permit = await service.admitted(entry, job, caller)
        work = service.submit(
            entry,
            job,
            caller,
            priority=plan.priority,
            tier=plan.tier,
            buffer=plan.buffer,
            identity=serializer.id,
            permit=permit,
        )
        over = asyncio.Event()

        def ended(_answer: Answer, outcome: Outcome, _item: Ended | Steered) -> None:
            run.outcome = outcome
            over.set()

        answer = Answer(
            work,
            serializer,
            sink,
            tokenizer=entry.tokenizer,
            toolset=plan.form.toolset,
            parser=None if plan.plain else lambda: plan.form.parser(local=entry.model is not None),
            decided=plan.decided,
            on_end=ended,
        )
        run = TextRun(answer, serializer, over, plan.routing, entry.context_length or 0)
        return run


def middle(model: Model, extra: str, prefix: str, suffix: str | None, *, literal: bool = False) -> list[int]:
    """The prompt of a completion. A suffix needs a model that fills the middle; an empty one does not.
    `literal`: what looks like a control token is text."""
    if suffix:
        if model.fim is None:
            raise UnsupportedModel(
                f"{model.name} cannot fill in the middle; leave out suffix or use a model that can."
            )
        return model.fim.tokens(model.tokenizer, extra + prefix, suffix)
    text = extra + prefix
    if model.fim is not None and suffix is not None:
        return model.fim.tokens(model.tokenizer, text, "")
    # A raw prompt may carry the model's own control tokens: that is what such clients send it for.
    tokens = model.prompt(text, special=not literal)
    return tokens or [model.tokenizer.eos or 0]


def chat_items(messages: list[ChatMessage]) -> list[Item]:
    items: list[Item] = []
    for message in messages:
        if message.role in ("tool", "function"):
            output = text_of(message.content)
            items.append(
                Item(type="function_call_output", call_id=message.tool_call_id or message.name, output=output)
            )
            continue
        if message.content is not None or not message.tool_calls:
            items.append(Item(role=message.role, content=_parts(message.content)))
        for call in message.tool_calls or ():
            function = call.function
            items.append(
                Item(type="function_call", call_id=call.id, name=function.name, arguments=function.arguments)
            )
    return items


def _parts(content: str | list[Part] | None) -> str | list[Part]:
    return "" if content is None else content


def chat_tools(request: ChatRequest) -> list[Tool] | None:
    if not request.tools:
        return None
    tools: list[Tool] = []
    for one in request.tools:
        f, c = one.function, one.custom
        if f is not None:
            tools.append(
                Tool(name=f.name, description=f.description, parameters=f.parameters, strict=f.strict)
            )
        elif c is not None:
            tools.append(Tool("custom", c.name, c.description, format=c.format))
    return tools


def _format(request: ChatRequest | CompletionRequest) -> TextFormat | None:
    return text_format(
        request.response_format,
        "response_format",
        grammar=request.grammar,
        json_schema=request.json_schema,
        guided_json=request.guided_json,
        guided_regex=request.guided_regex,
        guided_choice=request.guided_choice,
        guided_grammar=request.guided_grammar,
        structured_outputs=request.structured_outputs,
    )


def _wants_usage(options: Any) -> bool:
    return bool(options is not None and options.include_usage)

"""Ollama's API: translations onto the chat and completion requests, its lines, and descriptions of models.

What manages models at Ollama (create, delete) is refused with what to do here. Embeddings are refused by
name, because no model here makes them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib.metadata import version
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response as HttpResponse

from keystroke.assist.tool_calls.tools import OfferedTool, decode_arguments
from keystroke.engine.model import Model
from keystroke.errors import InputError, UsageError
from keystroke.gateway.api.endpoints import ApiRequest, Endpoints
from keystroke.gateway.api.models import model_catalog
from keystroke.gateway.api.serializers import TextSerializer
from keystroke.gateway.transport.http import OLLAMA, json_response
from keystroke.gateway.work.priority import Priority
from keystroke.gateway.work.registry import ModelRegistry, ServedModel
from keystroke.gateway.work.routing import RoutingRequest
from keystroke.gateway.work.work import WorkOutcome
from keystroke.protocol import ollama as wire
from keystroke.protocol.codec import encode_line
from keystroke.protocol.items import ChosenToken
from keystroke.protocol.requests import (
    ChatMessage,
    ChatRequest,
    ChatTool,
    ChatToolCall,
    ChatToolFunction,
    CompletionRequest,
    ToolCallFunction,
)

API_VERSION = "0.20.0"  # of Ollama, whose API this is; clients require a lowest one, Codex 0.13.4
_STARTED = datetime.now(UTC)
_LATEST = ":latest"
_CHAT = RoutingRequest(Priority.CHAT, converses=True)
_IGNORED = (
    "frequency_penalty", "presence_penalty", "repeat_penalty", "mirostat", "min_p", "tfs_z", "typical_p",
)  # fmt: skip
Calls = list[wire.OllamaToolCall]
_NS = 1e6  # nanoseconds of a millisecond


async def ollama_chat(api: Endpoints, call: ApiRequest[wire.OllamaChatRequest]) -> HttpResponse:
    request = call.body
    if not request.messages:
        return await _load(api, request, OllamaChatSerializer)
    tools = [_tool(tool) for tool in request.tools or ()] or None
    return await _converse(api, call, OllamaChatSerializer, list(_messages(request.messages)), tools)


async def ollama_generate(api: Endpoints, call: ApiRequest[wire.OllamaGenerateRequest]) -> HttpResponse:
    """A prompt is one message of a chat; with a suffix, `raw`, or a model that does not converse, text to be
    completed."""
    request = call.body
    for name, value, advice in (
        ("images", request.images, "the models here read text only"),
        ("template", request.template, "a model's own template is used; send the whole text with `raw`"),
        ("context", request.context, "send the conversation to /api/chat"),
    ):
        if value:
            raise InputError(f"{name} cannot be used here: {advice}.", param=name)
    if not request.prompt and not request.suffix:
        return await _load(api, request, OllamaGenerateSerializer)
    prompt = request.prompt or ""
    if request.suffix or request.raw or not _can_converse(api, plain_name(request.model)):
        completion = CompletionRequest(prompt=prompt, suffix=request.suffix, **_shared_fields(request))
        completion.logprobs = request.top_logprobs or 0 if request.logprobs else None
        serializer = partial(OllamaGenerateSerializer, **_answer_options(request))
        start = partial(api.texts.complete, serializer=serializer)
        return await api.answer_text(call.with_body(completion), start, OLLAMA)
    messages = [ChatMessage("system", request.system)] if request.system else []
    return await _converse(api, call, OllamaGenerateSerializer, [*messages, ChatMessage("user", prompt)])


async def _converse(
    api: Endpoints,
    call: ApiRequest[Any],
    serializer: type[OllamaSerializer],
    messages: list[ChatMessage],
    tools: list[ChatTool] | None = None,
) -> HttpResponse:
    request = call.body
    effort = _effort(request.think)
    chat = ChatRequest(messages=messages, tools=tools, reasoning_effort=effort, **_shared_fields(request))
    if request.logprobs:
        chat.logprobs, chat.top_logprobs = True, request.top_logprobs or 0
    start = partial(api.texts.chat, serializer=partial(serializer, **_answer_options(request)))
    return await api.answer_text(call.with_body(chat), start, OLLAMA)


# Requests


def plain_name(name: str) -> str:
    """The name as this server knows it: Ollama's clients add `:latest`."""
    return name.removesuffix(_LATEST)


def _shared_fields(request: wire.OllamaGenerationFields) -> dict[str, Any]:
    options = request.options or wire.OllamaOptions()
    return {
        "model": plain_name(request.model),
        "stream": request.stream is not False,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "seed": options.seed,
        "stop": options.stop or None,
        "max_tokens": options.num_predict if options.num_predict and options.num_predict > 0 else None,
        "response_format": _format(request.format),
    }


def _answer_options(request: wire.OllamaGenerationFields) -> dict[str, Any]:
    options = request.options
    ignored = () if options is None else [name for name in _IGNORED if getattr(options, name)]
    notes = [f"options.{name}: not sampled with here" for name in ignored]
    return {"thinking": request.think is not False, "notes": notes}


def _effort(think: bool | str | None) -> str | None:
    """The reasoning effort; None: the model's default."""
    if isinstance(think, bool):
        return "medium" if think else "none"
    return think or None


def _format(form: str | dict[str, Any] | None) -> dict[str, Any] | None:
    if not form:
        return None
    if form == "json":
        return {"type": "json_object"}
    if isinstance(form, str):
        raise InputError("format must be json or a JSON Schema.", param="format")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form, "strict": True}}


def _messages(messages: Sequence[wire.OllamaMessage]) -> Iterator[ChatMessage]:
    """Calls have no ids at Ollama: a result answers the first open call of its tool."""
    open_calls: list[tuple[str, str]] = []  # id and tool
    count = 0
    for index, message in enumerate(messages):
        if message.images:
            raise InputError(
                f"messages[{index}].images: the models here read text only; leave them out.",
                param=f"messages[{index}].images",
            )
        if message.role == "tool":
            name = message.tool_name
            found = next((c for c in open_calls if c[0] == message.tool_call_id or c[1] == name), None)
            found = found or (open_calls[0] if open_calls else ("", name or "tool"))
            if found in open_calls:
                open_calls.remove(found)
            yield ChatMessage("tool", message.content or "", found[1], tool_call_id=found[0] or None)
            continue
        calls = []
        for call in message.tool_calls or ():
            identity = call.id or f"call_{count}"
            count += 1
            open_calls.append((identity, call.function.name))
            arguments = msgspec.json.encode(call.function.arguments).decode()
            calls.append(ChatToolCall(ToolCallFunction(call.function.name, arguments), identity))
        content = message.content or (None if calls else "")
        yield ChatMessage(message.role, content, tool_calls=calls or None)


def _tool(tool: wire.OllamaTool) -> ChatTool:
    function = tool.function
    parameters = function.parameters or {"type": "object", "properties": {}}
    return ChatTool(function=ChatToolFunction(function.name, function.description, parameters))


def _can_converse(api: Endpoints, model: str) -> bool:
    routing = api.service.choose(model, lambda: _CHAT)
    candidates = api.service.registry.router.candidates
    known = next((c for c in candidates if c.name == routing.model), None)
    entry = api.service.registry.entries.get(routing.model)
    return entry.candidate.converses if entry is not None else known is None or known.converses


async def _load(
    api: Endpoints, request: wire.OllamaGenerationFields, serializer: type[OllamaSerializer]
) -> HttpResponse:
    """A request without input loads the model."""
    entry, routing = await api.service.route(plain_name(request.model), lambda: _CHAT)
    line = serializer("", entry.name, routing, include_usage=False, thinking=False, notes=[]).line("")
    line.done, line.done_reason = True, "load"
    return json_response(line)


# Answers


class OllamaSerializer(TextSerializer):
    """The lines of an answer. `thinking`: reasoning is sent. `notes`: what of the request was ignored."""

    def __init__(self, *rest: Any, thinking: bool, notes: list[str], **named: Any) -> None:
        super().__init__(*rest, **named)
        self._thinking = thinking
        self.notes += notes
        self._finished_calls: list[wire.OllamaToolCall] = []
        self._name = ""  # of the call that grows
        self._arguments: list[str] = []

    def line(
        self,
        text: str,
        thoughts: str = "",
        calls: Calls | None = None,
        logprobs: Sequence[ChosenToken] = (),
    ) -> Any:
        line = self._reply(text, thoughts or UNSET, calls or UNSET)
        line.logprobs = list(logprobs) or UNSET
        return line

    def _reply(self, text: str, thoughts: str | UnsetType, calls: Calls | UnsetType) -> Any:
        raise NotImplementedError

    def on_text(self, delta: str, logprobs: Sequence[ChosenToken]) -> list[Any]:
        if not delta and not logprobs:
            return []
        self._text.append(delta)
        self._logprobs += logprobs
        return [self.line(delta, logprobs=logprobs)]

    def on_reasoning(self, delta: str) -> list[Any]:
        if not self._thinking or not delta:
            return []
        self._thoughts.append(delta)
        return [self.line("", delta)]

    def on_call(self, tool: OfferedTool) -> list[Any]:
        self._name, self._arguments = tool.name, []
        return []

    def on_call_delta(self, delta: str) -> list[Any]:
        self._arguments.append(delta)
        return []

    def on_call_done(self) -> list[Any]:
        identity = f"call_{self.id.rpartition('_')[2]}_{len(self._finished_calls)}"
        function = wire.OllamaFunctionCall(self._name, decode_arguments("".join(self._arguments)))
        call = wire.OllamaToolCall(function, identity)
        self._finished_calls.append(call)
        return [self.line("", calls=[call])]

    def on_end(self, outcome: WorkOutcome) -> list[Any]:
        text, thoughts = "".join(self._text), "".join(self._thoughts)
        complete = self.line(text, thoughts, self._finished_calls, self._logprobs)
        last = self.line("")
        for line in (complete, last):
            self._finish(line, outcome)
        complete.shortened, complete.routing = self._shortened, self.routing
        self.body = complete
        return [wire.OllamaError(outcome.error.message)] if outcome.error is not None else [last]

    def _finish(self, line: wire.OllamaTimings, outcome: WorkOutcome) -> None:
        receipt = outcome.receipt
        line.notes, line.compacted = self.notes or UNSET, self.compacted
        line.done = True  # type: ignore[attr-defined]
        line.done_reason = "length" if outcome.finish in ("length", "grammar") else "stop"
        line.total_duration = round(receipt.total_ms * _NS)
        line.load_duration = 0
        line.prompt_eval_count = receipt.input_tokens
        line.prompt_cached_count = receipt.reused_tokens
        line.prompt_eval_duration = round(receipt.prompt_ms * _NS)
        line.eval_count = receipt.output_tokens
        line.eval_duration = round(receipt.decode_ms * _NS)


class OllamaChatSerializer(OllamaSerializer):
    def _reply(self, text: str, thoughts: str | UnsetType, calls: Calls | UnsetType) -> wire.OllamaChatReply:
        message = wire.OllamaAnswerMessage(text, thinking=thoughts, tool_calls=calls)
        return wire.OllamaChatReply(model=self.model, created_at=_time(), message=message)


class OllamaGenerateSerializer(OllamaSerializer):
    def _reply(self, text: str, thoughts: str | UnsetType, calls: Calls | UnsetType) -> Any:
        return wire.OllamaGenerateReply(
            model=self.model, created_at=_time(), response=text, thinking=thoughts
        )


def _time(at: datetime | None = None) -> str:
    return (at or datetime.now(UTC)).isoformat().replace("+00:00", "Z")


# Models


async def list_ollama_models(api: Endpoints, _call: ApiRequest[None]) -> HttpResponse:
    registry = api.service.registry
    names = [one["id"] for one in model_catalog(registry)["data"]]
    return json_response(wire.OllamaModels([_describe_model(registry, name) for name in names]))


async def list_loaded_ollama_models(api: Endpoints, _call: ApiRequest[None]) -> HttpResponse:
    registry = api.service.registry
    loaded = [
        msgspec.structs.replace(
            _describe_model(registry, entry.name),
            modified_at=UNSET,
            expires_at=_time(datetime.now(UTC) + timedelta(days=365)),
            size_vram=_gpu_bytes(entry.model),
            context_length=entry.context_length or 0,
        )
        for entry in registry.entries.values()
        if entry.model is not None
    ]
    return json_response(wire.OllamaModels(loaded))


async def show_ollama_model(api: Endpoints, call: ApiRequest[wire.OllamaModelRequest]) -> HttpResponse:
    registry = api.service.registry
    name = _requested_name(call.body)
    resolved = _resolve_name(api, name)
    entry = registry.entries.get(resolved)
    model = entry.model if entry is not None else None
    details = _details(entry)
    context = entry.context_length if entry is not None else None
    offer = registry.offers.get(resolved)
    context = context or (offer.context if offer is not None else None) or 32_768
    capabilities = ["completion"]
    if entry.candidate.converses if entry is not None else offer is None or offer.converses:
        capabilities.append("tools")
    if model is not None and model.fim is not None:
        capabilities.append("insert")
    if model is not None and model.chat is not None and "think" in model.chat.source:
        capabilities.append("thinking")
    info: dict[str, Any] = {
        "general.architecture": details.family,
        "general.basename": resolved,
        "general.parameter_count": entry.parameters if entry is not None else 0,
        f"{details.family}.context_length": context,
    }
    return json_response(
        wire.OllamaShown(
            modelfile=f"FROM {resolved}\n",
            parameters="",
            template=model.chat.source if model is not None and model.chat is not None else "",
            details=details,
            model_info=info,
            capabilities=capabilities,
            modified_at=_time(_STARTED),
        )
    )


async def pull_ollama_model(api: Endpoints, call: ApiRequest[wire.OllamaModelRequest]) -> HttpResponse:
    """A model that is served needs no download; others are added with the program."""
    name = _requested_name(call.body)
    try:
        _resolve_name(api, name)
    except UsageError as error:
        raise UsageError(
            f"{error.message} Add it with `keystroke models add`; nothing is pulled from here.", param="model"
        ) from None
    done = wire.OllamaStatus("success")
    if call.body.stream is False:
        return json_response(done)
    return HttpResponse(encode_line(done), media_type="application/x-ndjson")


async def ollama_version(_api: Endpoints, _call: ApiRequest[None]) -> HttpResponse:
    return json_response(wire.OllamaVersion(API_VERSION, version("keystroke")))


def refuse(sentence: str) -> Callable[[Endpoints, ApiRequest[None]], Awaitable[HttpResponse]]:
    """A handler of an endpoint that is not served: it says so, and what to do instead."""

    async def handle(_api: Endpoints, _call: ApiRequest[None]) -> HttpResponse:
        raise UsageError(sentence)

    return handle


def _requested_name(request: wire.OllamaModelRequest) -> str:
    name = request.model or request.name
    if not name:
        raise InputError("model is missing from the request body.", param="model")
    return plain_name(name)


def _resolve_name(api: Endpoints, name: str) -> str:
    """The model that a name or a role means. Raises ModelNotFound."""
    if name == "auto":
        return _default_name(api.service.registry)
    return api.service.choose(name, lambda: _CHAT).model


def _default_name(registry: ModelRegistry) -> str:
    """The model that `auto` prefers to converse with, else the first."""
    candidates = registry.router.candidates
    return next((c.name for c in candidates if c.converses), candidates[0].name)


def _describe_model(registry: ModelRegistry, name: str) -> wire.OllamaModel:
    served = _default_name(registry) if name == "auto" else registry.resolve(name)
    entry = registry.entries.get(served)
    shown = name if ":" in name else name + _LATEST
    model = entry.model if entry is not None else None
    return wire.OllamaModel(
        name=shown,
        model=shown,
        size=model.engine.info.weight_bytes if model is not None else 0,
        digest=hashlib.sha256(served.encode()).hexdigest(),
        details=_details(entry),
        modified_at=_time(_STARTED),
    )


def _gpu_bytes(model: Model) -> int:
    return model.engine.info.weight_bytes if "cuda" in type(model.engine).__module__ else 0


def _details(entry: ServedModel | None) -> wire.OllamaDetails:
    if entry is None or entry.model is None:
        return wire.OllamaDetails("", "unknown", [], "", "")
    info, path = entry.model.engine.info, entry.model.path
    form = path.suffix.removeprefix(".") if path is not None and path.suffix else "safetensors"
    size = f"{info.parameters / 1e9:.1f}B" if info.parameters >= 1e9 else f"{info.parameters / 1e6:.0f}M"
    return wire.OllamaDetails(form, info.architecture, [info.architecture], size, info.precision)

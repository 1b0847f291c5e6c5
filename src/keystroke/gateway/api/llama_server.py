"""Endpoints of llama.cpp's server beside completion: tokens, the chat template, its properties and slots."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version

from starlette.responses import Response as HttpResponse

from keystroke.engine.model import Model
from keystroke.engine.tokenizer import Tokenizer
from keystroke.errors import InputError
from keystroke.gateway.api.endpoints import ApiRequest, Endpoints
from keystroke.gateway.transport.http import json_response
from keystroke.gateway.work.priority import Priority
from keystroke.gateway.work.registry import AUTO, ServedModel
from keystroke.gateway.work.routing import RoutingRequest
from keystroke.protocol import llama_server as wire
from keystroke.protocol.faults import NoSuitableModel
from keystroke.protocol.requests import ChatRequest

_HERE = RoutingRequest(Priority.GHOST, here=True)


async def tokenize(api: Endpoints, call: ApiRequest[wire.TokenizeRequest]) -> HttpResponse:
    request = call.body
    _, model = await _local_model(api, request.model)

    def encode() -> list[int]:
        special = request.parse_special is not False
        if request.add_special:
            return model.prompt(request.content, special=special)
        return model.tokenizer.encode(request.content, special=special)

    tokens: list[int] = await api.service.run_off_loop(len(request.content), encode)
    if not request.with_pieces:
        return json_response(wire.TokenizeReply([*tokens]))
    return json_response(wire.TokenizeReply([_piece(model.tokenizer, token) for token in tokens]))


async def detokenize(api: Endpoints, call: ApiRequest[wire.DetokenizeRequest]) -> HttpResponse:
    _, model = await _local_model(api, call.body.model)
    size = model.tokenizer.vocab_size
    if any(token >= size for token in call.body.tokens):
        raise InputError(f"tokens must be smaller than {size}, the size of the vocabulary.", param="tokens")
    return json_response(wire.DetokenizeReply(_text(model.tokenizer, call.body.tokens)))


async def apply_template(api: Endpoints, call: ApiRequest[wire.TemplateRequest]) -> HttpResponse:
    body = call.body
    chat = ChatRequest(messages=body.messages, tools=body.tools, model=body.model or AUTO)
    model, tokens = await api.texts.chat_prompt(chat, call.caller)
    return json_response(wire.TemplateReply(_text(model.tokenizer, tokens)))


async def server_props(api: Endpoints, call: ApiRequest[None]) -> HttpResponse:
    entry, model = await _local_model(api, call.query_value("model") or None)
    defaults = api.service.defaults
    params = {
        "n_predict": defaults.max_tokens or -1,
        "temperature": defaults.temperature,
        "top_k": defaults.top_k,
        "top_p": defaults.top_p,
        "min_p": defaults.min_p,
        "stream": True,
    }
    settings = {"n_ctx": entry.context_length or 0, "params": params, "speculative": api.service.speculation}
    return json_response(
        wire.ServerProps(
            default_generation_settings=settings,
            total_slots=entry.scheduler.concurrent,
            model_alias=entry.name,
            model_path=str(model.path or ""),
            chat_template=model.chat.source if model.chat is not None else "",
            bos_token=_token_text(model.tokenizer, model.tokenizer.bos),
            eos_token=_token_text(model.tokenizer, model.tokenizer.eos),
            modalities={"vision": False, "audio": False},
            build_info=f"keystroke-{version('keystroke')}",
        )
    )


async def server_slots(api: Endpoints, _call: ApiRequest[None]) -> HttpResponse:
    """The places of every loaded model; those in use come first."""
    slots: list[wire.ServerSlot] = []
    for entry in api.service.registry.entries.values():
        queue = entry.scheduler
        for place in range(max(queue.concurrent, queue.running)):
            slots.append(
                wire.ServerSlot(
                    id=len(slots),
                    model=entry.name,
                    n_ctx=entry.context_length or 0,
                    is_processing=place < queue.running,
                    speculative=api.service.speculation,
                )
            )
    return json_response(slots)


async def _local_model(api: Endpoints, name: str | None) -> tuple[ServedModel, Model]:
    """The model that is named, or the one that answers while typing. Raises NoSuitableModel for a remote one,
    whose tokens are not known here."""
    entry, _ = await api.service.route(name or AUTO, lambda: _HERE)
    if entry.model is None:
        raise NoSuitableModel(
            f"{entry.name} runs on another server, which knows its tokens; name a model that runs here.",
            param="model",
        )
    return entry, entry.model


def _text(tokenizer: Tokenizer, tokens: Iterable[int]) -> str:
    """The text of tokens with the names of special ones."""
    return b"".join([tokenizer.token_bytes(token) for token in tokens]).decode("utf-8", "replace")


def _token_text(tokenizer: Tokenizer, token: int | None) -> str:
    return "" if token is None else _text(tokenizer, [token])


def _piece(tokenizer: Tokenizer, token: int) -> wire.TokenPiece:
    raw = tokenizer.token_bytes(token)
    try:
        return wire.TokenPiece(token, raw.decode("utf-8"))
    except UnicodeDecodeError:
        return wire.TokenPiece(token, list(raw))

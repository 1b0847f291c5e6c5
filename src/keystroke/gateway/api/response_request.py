"""Reads a Responses request: validation, answer format, routing facts, and the response object it starts
with."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Mapping, Sequence

import msgspec

from keystroke.engine.model import Model
from keystroke.errors import Forbidden, InputError
from keystroke.gateway.api import prompts
from keystroke.gateway.api.answer_form import TextFormat, text_format
from keystroke.gateway.work.priority import Priority
from keystroke.gateway.work.routing import RoutingRequest
from keystroke.gateway.work.service import new_id
from keystroke.protocol.field_table import ignored_fields
from keystroke.protocol.items import Item, content_text
from keystroke.protocol.requests import CreateRequest, ResponseCreate
from keystroke.protocol.response import Response, Routing

TURN_STATE = "x-codex-turn-state"
_STATE = re.compile(r"[A-Za-z0-9_.:/+=-]{1,128}")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_BREAKPOINTS = 4  # of a request are written
METADATA = (16, 64, 512)  # pairs, characters of a name, characters of a value: every event carries them


def turn_state(headers: Mapping[str, str]) -> str | None:
    """What the client repeats of an earlier reply, so that requests of one turn reach the same engine."""
    given = headers.get(TURN_STATE, "")
    return given if _STATE.fullmatch(given) else None


def key_state(key: str | None) -> str | None:
    """A client's `prompt_cache_key` as turn state: unchanged where a header may carry it, else its digest."""
    if not key or _STATE.fullmatch(key):
        return key or None
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def check_request(request: CreateRequest) -> None:
    """Raises InputError or Forbidden for fields that contradict each other or are not supported."""
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
    if request.prompt is not None:
        raise InputError(
            "prompt is not supported, no prompt templates are stored here; send instructions and input.",
            param="prompt",
        )
    if request.background and request.store is False:
        raise Forbidden(
            "A background response must be stored to be found again; leave store out.", param="store"
        )


def is_warm_up(request: CreateRequest) -> bool:
    """Whether the prompt is only read into the cache."""
    options = request.prompt_cache_options
    if options is not None and options.prewarm:
        return True
    return isinstance(request, ResponseCreate) and request.generate is False


def requested_format(request: CreateRequest) -> TextFormat | None:
    given = (request.text or {}).get("format")
    if given is not None and not isinstance(given, dict):
        raise InputError("text.format must be an object.", param="text.format")
    return text_format(given, "text.format", request)


def requested_logprobs(request: CreateRequest) -> int | None:
    if request.top_logprobs is None and "message.output_text.logprobs" in (request.include or ()):
        return 0
    return request.top_logprobs


def routing_request(
    request: CreateRequest, items: Sequence[Item], own_items: Sequence[Item], priority: Priority
) -> RoutingRequest:
    words = next((content_text(i.content) for i in reversed(own_items) if i.role == "user"), "")
    effort = None if request.reasoning is None else request.reasoning.effort
    return RoutingRequest(
        priority, words, prompts.text_length(items), bool(request.background), effort, converses=True
    )


def reasons(model: Model | None) -> bool:
    """Whether a model's template has room for reasoning; a remote model may reason."""
    if model is None:
        return True
    source = model.chat.source if model.chat is not None else ""
    return any(word in source for word in ("think", "reasoning"))


def request_notes(request: CreateRequest, name: str, model: Model | None) -> list[str]:
    """What of a request was ignored, one sentence each."""
    notes = ignored_fields("POST /v1/responses", request)
    effort = None if request.reasoning is None else request.reasoning.effort
    if effort not in (None, "none") and not reasons(model):
        notes.append(f"reasoning.effort is ignored: {name} does not reason")
    return notes


def cache_breakpoints(request: CreateRequest, items: Sequence[Item]) -> list[tuple[list[Item], float]]:
    """The conversation up to each marked part, and for how many seconds it is protected; the newest four."""
    default = (request.prompt_cache_options.ttl if request.prompt_cache_options else None) or "30m"
    found: list[tuple[list[Item], float]] = []
    for at, item in enumerate(items):
        parts = item.content if isinstance(item.content, list) else []
        for count, part in enumerate(parts, 1):
            if part.prompt_cache_breakpoint is not None:
                ttl = part.prompt_cache_breakpoint.ttl or default
                upto = [*items[:at], msgspec.structs.replace(item, content=parts[:count])]
                found.append((upto, int(ttl[:-1]) * _SECONDS[ttl[-1]]))
    return found[-_BREAKPOINTS:]


def new_response(request: CreateRequest, model: str, routing: Routing, *, tier: str, store: bool) -> Response:
    """The response object as its first event shows it."""
    return Response(
        id=new_id("resp"),
        created_at=int(time.time()),
        model=model,
        status="queued" if request.background else "in_progress",
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning=None if request.reasoning is None else msgspec.to_builtins(request.reasoning),
        service_tier=tier,
        store=store,
        temperature=request.temperature or 0.0,
        text=request.text or {"format": {"type": "text"}},
        tool_choice="auto" if request.tool_choice is None else request.tool_choice,
        tools=request.tools or [],
        top_logprobs=request.top_logprobs or 0,
        top_p=1.0 if request.top_p is None else request.top_p,
        truncation=request.truncation or "disabled",
        user=request.user,
        safety_identifier=request.safety_identifier,
        max_tool_calls=request.max_tool_calls,
        routing=routing,
    )

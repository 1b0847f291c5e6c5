"""The OpenAI wire format: request bodies, and the bytes of an event stream to stream items. Does no I/O.

Handles the variants of vLLM, SGLang, llama.cpp, Ollama and cloud services. Input is not trusted: event sizes
are limited, and unexpected payloads raise EngineError.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from keystroke.engine.generation import Chunk, Finish, GenerationParams
from keystroke.errors import ContextOverflow, EngineError, UsageError

MAX_EVENT_BYTES = 8 * 1024 * 1024  # real events are small
DONE = "[DONE]"


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A fragment of a tool call. `id` and `name` come with the first fragment of each `index`."""

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class RemoteReasoning:
    """Reasoning text, which the server reports separately from the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Usage:
    """The token counts that a server reports."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


StreamItem = Chunk | ToolCallDelta | RemoteReasoning | Usage


class SseDecoder:
    """Decodes server-sent events: bytes in, `data:` payloads out."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self._data: list[str] = []
        self._size = 0

    def feed(self, data: bytes) -> Iterator[str]:
        self._pending += data
        *lines, rest = self._pending.split(b"\n")
        self._pending = rest
        for line in lines:
            payload = self._read_line(line.removesuffix(b"\r"))
            if payload is not None:
                yield payload
        if len(self._pending) + self._size > MAX_EVENT_BYTES:
            raise EngineError(f"the server sent one event of more than {MAX_EVENT_BYTES >> 20} MiB")

    def _read_line(self, line: bytes | bytearray) -> str | None:
        if not line:
            payload = "\n".join(self._data) if self._data else None
            self._data, self._size = [], 0
            return payload
        field, _, value = line.partition(b":")
        # Some builds of llama.cpp report a failure as an "error:" field rather than as data.
        if field in (b"data", b"error"):
            text = value.removeprefix(b" ").decode("utf-8", "replace")
            self._data.append(text if field == b"data" else f'{{"error":{text}}}')
            self._size += len(value)
        return None

    def close(self) -> str | None:
        """The last event, if the server omitted the blank line after it."""
        if self._pending:
            self._read_line(bytes(self._pending).removesuffix(b"\r"))
            self._pending = bytearray()
        return self._read_line(b"")


class AnswerReader:
    """Converts the payloads of one answer to stream items. The chunk with `finish` is delayed until the
    stream ends, so that it is always the last item, after the usage."""

    def __init__(self) -> None:
        self._parse_finish: Finish | None = None
        self.done = False

    def read(self, payload: str) -> Iterator[StreamItem]:
        if payload.strip() == DONE:
            self.done = True
            return
        event = decode_object(payload.encode())
        if (error := event.get("error")) or event.get("object") == "error":
            raise request_error(error_message(error or event), None)
        usage = event.get("usage")
        choices = event.get("choices")
        if isinstance(choices, list) and choices:
            yield from self._read_choice(choices[0])
        if isinstance(usage, dict):
            yield _parse_usage(usage)

    def end(self) -> Chunk | None:
        """The final chunk; None if the stream broke off."""
        if self._parse_finish is None and not self.done:
            return None
        return Chunk(text="", tokens=(), logprobs=(), finish=self._parse_finish or Finish.STOP)

    def _read_choice(self, choice: Any) -> Iterator[StreamItem]:
        if not isinstance(choice, dict):
            raise EngineError("the server sent a choice that is not an object")
        # "delta": a streamed chat; "message": a whole one; "text": a completion.
        delta = choice.get("delta") or choice.get("message") or {}
        if not isinstance(delta, dict):
            raise EngineError("the server sent a delta that is not an object")
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        if isinstance(thought, str) and thought:
            yield RemoteReasoning(thought)
        text = delta.get("content") or choice.get("text")
        if isinstance(text, str) and text:
            yield Chunk(text=text, tokens=(), logprobs=(), finish=None)
        for position, call in enumerate(delta.get("tool_calls") or ()):
            yield _tool_call(position, call)
        reason = choice.get("finish_reason")
        if reason == "content_filter":
            raise EngineError("the server's content filter ended the answer")
        if isinstance(reason, str):
            self._parse_finish = _parse_finish(reason, choice.get("stop_reason"))


def chat_body(
    model: str,
    messages: list[Mapping[str, Any]],
    params: GenerationParams,
    tools: list[Mapping[str, Any]] | None,
) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "messages": messages, **_common_body(params)}
    if tools:
        body["tools"] = tools
    return body


def completion_body(model: str, prompt: str, suffix: str | None, params: GenerationParams) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "prompt": prompt, **_common_body(params)}
    if suffix is not None:
        body["suffix"] = suffix
    return body


def _common_body(params: GenerationParams) -> dict[str, Any]:
    sampling = params.sampling
    if sampling.logprobs is not None:
        raise UsageError(
            "a remote model reports no token ids, so it has no log-probabilities; leave them out"
        )
    body: dict[str, Any] = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": sampling.temperature,
    }
    if params.max_tokens is not None:
        body["max_tokens"] = params.max_tokens
    if params.stop:
        body["stop"] = list(params.stop)
    if sampling.temperature > 0:
        body["seed"] = sampling.seed
        if sampling.top_p < 1:
            body["top_p"] = sampling.top_p
    # Not part of OpenAI's API: sent only if set, since a service may refuse unknown fields.
    if sampling.top_k:
        body["top_k"] = sampling.top_k
    if sampling.min_p:
        body["min_p"] = sampling.min_p
    if params.ignore_eos:
        body["ignore_eos"] = True
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    return body


# Fields that some servers refuse, and the name to use instead (None: omit the field).
_ALTERNATIVES = {
    "max_tokens": "max_completion_tokens",
    "stream_options": None,
    "temperature": None,
    "seed": None,
    "top_p": None,
    "logit_bias": None,
    # Constraints of the answer: the caller validates it if the server does not support the field.
    "response_format": None,
    "tool_choice": None,
    "parallel_tool_calls": None,
    "grammar": None,
    "guided_regex": None,
    "guided_choice": None,
    "guided_grammar": None,
    "structured_outputs": None,
}


def without_refused(body: dict[str, Any], message: str) -> dict[str, Any] | None:
    """`body` without the optional field that an error message names; None if it names none."""
    lowered = message.lower()
    if not any(
        word in lowered for word in ("unsupported", "not support", "unknown", "unrecognized", "extra")
    ):
        return None
    # Only if quoted or after "parameter": a field's name alone may be part of any sentence.
    named = [f for f in _ALTERNATIVES if f in body and re.search(rf"(['\"`]|\bparameter:? ){f}\b", lowered)]
    if not named:
        return None
    kept = {key: value for key, value in body.items() if key != named[0]}
    other = _ALTERNATIVES[named[0]]
    return {**kept, other: body[named[0]]} if other else kept


def decode_object(data: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise EngineError(f"the server sent something that is not JSON: {excerpt(data)}") from error
    if not isinstance(value, dict):
        raise EngineError(f"the server sent JSON that is not an object: {excerpt(data)}")
    return value


def excerpt(data: bytes, limit: int = 120) -> str:
    """The start of `data` on one printable line."""
    text = " ".join(data[: limit * 4].decode("utf-8", "replace").split())
    text = "".join(c if c.isprintable() else "�" for c in text)
    return text if len(text) <= limit else text[:limit] + "…"


def error_message(error: object) -> str:
    """The message of an error object of any known shape."""
    if isinstance(error, dict):
        for key in ("message", "detail", "error"):
            if error.get(key):
                return error_message(error[key])
    if isinstance(error, list) and error:
        return error_message(error[0].get("msg", error[0]) if isinstance(error[0], dict) else error[0])
    return excerpt(str(error).encode(), 300)


_OVERFLOW = (
    "context_length_exceeded",
    "maximum context length",
    "context size",
    "exceeds the context",
    "context window",
)


def request_error(message: str, code: object) -> EngineError | UsageError:
    """The error for a refused request or an error event in a stream."""
    if code == "context_length_exceeded" or any(mark in message.lower() for mark in _OVERFLOW):
        return ContextOverflow(f"the prompt does not fit the model's context: {message}")
    return EngineError(f"the server reported: {message}")


def _parse_finish(reason: str, stop_reason: object) -> Finish:
    if reason == "length":
        return Finish.LENGTH
    # vLLM and SGLang report the stop string that matched; others do not distinguish it from the end.
    return Finish.STOP_STRING if reason == "stop" and isinstance(stop_reason, str) else Finish.STOP


def _tool_call(position: int, call: Any) -> ToolCallDelta:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise EngineError("the server sent a tool call without a function")
    index = call.get("index")
    arguments = function.get("arguments") or ""
    if not isinstance(arguments, str):  # Ollama sends the arguments as an object
        arguments = msgspec.json.encode(arguments).decode()
    return ToolCallDelta(
        index=index if isinstance(index, int) else position,
        id=call.get("id") or None,
        name=function.get("name") or None,
        arguments=arguments,
    )


def _parse_usage(usage: dict[str, Any]) -> Usage:
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    return Usage(_count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens")), _count(cached))


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0

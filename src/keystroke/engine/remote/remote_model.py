"""A model behind an OpenAI-compatible server, as an asynchronous stream of text.

Turns messages or a prompt into one request and the server's events into stream items. Every stream ends with
a chunk that carries `finish`, or raises a KeystrokeError. Must be used in one event loop.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx

from keystroke.engine.base import Interrupt
from keystroke.engine.generation import Chunk, Finish, GenerationParams
from keystroke.engine.remote import wire
from keystroke.engine.remote.fim import RemoteFim, fim_for
from keystroke.engine.remote.transport import Endpoint, InterruptibleWait, Transport
from keystroke.engine.remote.wire import StreamItem
from keystroke.errors import (
    ConfigError,
    EngineError,
    Interrupted,
    KeystrokeError,
    Unavailable,
    UnsupportedModel,
    UsageError,
)


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model that a server offers; `context_length` is None if the server does not state it."""

    id: str
    context_length: int | None


@dataclass(frozen=True, slots=True)
class Health:
    """The result of a probe. `detail` says why the server is not usable."""

    ok: bool
    seconds: float
    models: tuple[ListedModel, ...] = ()
    detail: str = ""


class RemoteModel:
    """`model` at `endpoint`. `fim` overrides the fill-in-the-middle format guessed from the name."""

    def __init__(self, endpoint: Endpoint, model: str, *, fim: RemoteFim | None = None) -> None:
        if not model:
            raise ConfigError("a remote model needs the name it has at its server", param="model")
        self.name = model
        self.endpoint = endpoint
        self.fim = fim or fim_for(model)
        self._transport = Transport(endpoint)
        self._takes_suffix = True  # until the server refuses one
        self._refused: list[str] = []  # the server's messages about optional fields that it does not support

    async def __aenter__(self) -> RemoteModel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._transport.aclose()

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: GenerationParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        interrupt: Interrupt | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[StreamItem, None]:
        """`fields` are additional fields of the request, such as tool_choice and response_format."""
        body = wire.chat_body(self.name, list(messages), params or GenerationParams(), list(tools or ()))
        return self._stream("/chat/completions", {**body, **(fields or {})}, interrupt or Interrupt())

    async def stream_completion(
        self,
        prompt: str,
        suffix: str | None = None,
        params: GenerationParams | None = None,
        interrupt: Interrupt | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[StreamItem, None]:
        """Text that follows `prompt` and, if given, precedes `suffix`."""
        params, interrupt, extra = params or GenerationParams(), interrupt or Interrupt(), fields or {}
        if suffix and self._takes_suffix:
            started = False
            try:
                async with aclosing(self._complete(prompt, suffix, params, interrupt, extra)) as items:
                    async for item in items:
                        started = True
                        yield item
                return
            except (UsageError, EngineError) as error:
                # Refused before any text: the server does not support a suffix. Other errors are raised.
                if started or not _is_about_suffix(error):
                    raise
                self._takes_suffix = False
        if suffix:
            prompt, params = self._fill_in_the_middle(prompt, suffix, params)
        async with aclosing(self._complete(prompt, None, params, interrupt, extra)) as items:
            async for item in items:
                yield item

    async def models(self, interrupt: Interrupt | None = None) -> tuple[ListedModel, ...]:
        """The models that the server offers."""
        with InterruptibleWait(interrupt or Interrupt()) as watch:
            answer = await self._transport.get_json("/models", watch, self.endpoint.read_timeout)
        rows = answer.get("data")
        if not isinstance(rows, list):
            raise EngineError(f"{self._transport.name} did not list its models")
        return tuple(
            _listing(row) for row in rows if isinstance(row, dict) and isinstance(row.get("id"), str)
        )

    async def probe(self) -> Health:
        """Whether the server answers, how fast, and whether it has this model. Raises nothing."""
        began = time.perf_counter()
        try:
            models = await self.models()
        except KeystrokeError as error:
            return Health(False, time.perf_counter() - began, detail=str(error))
        took = time.perf_counter() - began
        if models and self.name not in {m.id for m in models}:
            offered = ", ".join(m.id for m in models[:5])
            return Health(
                False, took, models, f"{self._transport.name} has no model {self.name}; it has {offered}"
            )
        return Health(True, took, models)

    def _complete(
        self,
        prompt: str,
        suffix: str | None,
        params: GenerationParams,
        interrupt: Interrupt,
        fields: Mapping[str, Any],
    ) -> AsyncGenerator[StreamItem, None]:
        body = wire.completion_body(self.name, prompt, suffix, params)
        return self._stream("/completions", {**body, **fields}, interrupt)

    async def _stream(
        self, path: str, body: dict[str, Any], interrupt: Interrupt
    ) -> AsyncGenerator[StreamItem, None]:
        try:
            with InterruptibleWait(interrupt) as watch:
                async with self._open_response(path, body, watch) as response:
                    async for item in self._read_items(response, watch):
                        yield item
        except Interrupted:
            yield Chunk(text="", tokens=(), logprobs=(), finish=Finish.INTERRUPTED)

    @asynccontextmanager
    async def _open_response(
        self, path: str, body: dict[str, Any], watch: InterruptibleWait
    ) -> AsyncGenerator[httpx.Response, None]:
        """The server's response. An optional field that it refuses is omitted from then on."""
        for refused in self._refused:
            body = wire.without_refused(body, refused) or body
        while True:
            async with AsyncExitStack() as stack:
                try:
                    response = await stack.enter_async_context(
                        self._transport.open("POST", path, body, watch)
                    )
                except UsageError as error:
                    spared = wire.without_refused(body, str(error))
                    if spared is None:
                        raise
                    body = spared
                    self._refused.append(str(error))
                    continue
                yield response
                return

    async def _read_items(
        self, response: httpx.Response, watch: InterruptibleWait
    ) -> AsyncGenerator[StreamItem, None]:
        reader = wire.AnswerReader()
        async with aclosing(self._read_payloads(response, watch)) as payloads:
            async for payload in payloads:
                for item in reader.read(payload):
                    yield item
        last = reader.end()
        if last is None:
            raise Unavailable(f"{self._transport.name} broke off in the middle of the answer; ask again")
        yield last

    async def _read_payloads(
        self, response: httpx.Response, watch: InterruptibleWait
    ) -> AsyncGenerator[str, None]:
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "application/json":  # the server does not stream
            whole = await self._next(self._transport.read_body(response), watch, first=True)
            yield whole.decode("utf-8", "replace")
            return
        if kind not in ("text/event-stream", ""):
            raise EngineError(
                f"{self._transport.name} answered with {wire.excerpt(kind.encode())} instead of an event "
                "stream; check that base_url is the address of its OpenAI-compatible interface"
            )
        sse = wire.SseDecoder()
        first = True
        async with aclosing(self._transport.stream_body(response)) as parts:
            while part := await self._next(anext(parts, b""), watch, first):
                for payload in sse.feed(part):
                    first = False
                    yield payload
        if (rest := sse.close()) is not None:
            yield rest

    async def _next(self, work: Any, watch: InterruptibleWait, first: bool) -> bytes:
        limit = self.endpoint.first_token_timeout if first else self.endpoint.read_timeout
        what = "sent no token" if first else "fell silent in the middle of the answer"
        data: bytes = await watch.wait(
            work, limit, f"{self._transport.name} {what} for {limit:g} s; ask again"
        )
        return data

    def _fill_in_the_middle(
        self, prompt: str, suffix: str, params: GenerationParams
    ) -> tuple[str, GenerationParams]:
        if self.fim is None:
            raise UnsupportedModel(
                f"{self._transport.name} takes no suffix and {self.name} is not known to fill in the middle; "
                "use a code model such as qwen2.5-coder, or complete without a suffix"
            )
        stop = tuple(dict.fromkeys((*params.stop, *self.fim.stop)))
        return self.fim.template.prompt(prompt, suffix), replace(params, stop=stop)


def _is_about_suffix(error: KeystrokeError) -> bool:
    text = str(error).lower()
    return any(
        word in text for word in ("suffix", "insert", "infill", "fim", "extra inputs", "not implemented")
    )


def _listing(row: dict[str, Any]) -> ListedModel:
    meta = row.get("meta")
    candidates = [row.get("max_model_len"), row.get("context_length"), row.get("context_window")]
    candidates += [meta.get("n_ctx"), meta.get("n_ctx_train")] if isinstance(meta, dict) else []
    return ListedModel(row["id"], next((c for c in candidates if isinstance(c, int)), None))

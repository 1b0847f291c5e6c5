"""A real HTTP server on loopback that speaks the OpenAI wire, with faults to order.

Started in a thread on a free port. Each path has a queue of behaviours; the last one stays. A behaviour
is a Starlette endpoint; the helpers below build the usual ones. Requests and disconnects are recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from prompt_server import PromptServer

Behaviour = Callable[[Request, dict[str, Any]], Awaitable[Response]]


class OpenAIServer:
    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.cut = threading.Event()  # a client went away in the middle of a stream
        self.streaming = threading.Event()  # the first part of a stream is on its way
        self._behaviours: dict[str, list[Behaviour]] = {}
        app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._endpoint, methods=["POST"]),
                Route("/v1/completions", self._endpoint, methods=["POST"]),
                Route("/v1/models", self._endpoint, methods=["GET"]),
            ]
        )
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        config = uvicorn.Config(
            app, log_level="error", lifespan="off", timeout_graceful_shutdown=1, loop="asyncio"
        )
        self._server = PromptServer(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True
        )
        self.on("/models", answer({"object": "list", "data": [{"id": "test-model", "max_model_len": 4096}]}))
        self.on("/chat/completions", chat("Hello", " world"))
        self.on("/completions", text("return", " a + b"))

    def __enter__(self) -> OpenAIServer:
        self._socket.listen()  # from now on a connection waits for the thread instead of being refused
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()
        self._thread.join(timeout=60)
        self._socket.close()

    def on(self, path: str, *behaviours: Behaviour) -> None:
        self._behaviours[path] = list(behaviours)

    async def _endpoint(self, request: Request) -> Response:
        queue = self._behaviours[request.url.path.removeprefix("/v1")]
        behaviour = queue.pop(0) if len(queue) > 1 else queue[0]
        body = json.loads(await request.body() or b"{}")
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        response = await behaviour(request, body)
        if isinstance(response, StreamingResponse):
            response.body_iterator = self._watched(response.body_iterator)
        return response

    async def _watched(self, parts: Any) -> AsyncIterator[Any]:
        ended = False
        try:
            async for part in parts:
                yield part
                self.streaming.set()
            ended = True
        finally:
            if not ended:
                self.cut.set()


def answer(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Behaviour:
    async def behave(_request: Request, _body: dict[str, Any]) -> Response:
        if isinstance(body, (bytes, str)):
            return Response(
                body, status, headers, media_type=(headers or {}).get("content-type", "text/html")
            )
        return JSONResponse(body, status, headers)

    return behave


def stream(*parts: bytes | float | type[BaseException], kind: str = "text/event-stream") -> Behaviour:
    """Bytes are sent, numbers are seconds of silence, an exception breaks the connection off."""

    async def send() -> AsyncIterator[bytes]:
        for part in parts:
            if isinstance(part, bytes):
                yield part
            elif isinstance(part, (int, float)):
                await asyncio.sleep(part)
            else:
                raise part

    async def behave(_request: Request, _body: dict[str, Any]) -> Response:
        return StreamingResponse(send(), media_type=kind)

    return behave


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def delta(content: str | None = None, finish: str | None = None, **more: Any) -> bytes:
    message = {**({"content": content} if content is not None else {}), **more}
    return event({"choices": [{"index": 0, "delta": message, "finish_reason": finish}]})


DONE = event(b"[DONE]")
USAGE = event(
    {
        "choices": [],
        "usage": {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}},
    }
)


def chat(*pieces: str, pause: float = 0.0) -> Behaviour:
    parts: list[bytes | float] = []
    for piece in pieces:
        parts += [delta(piece), pause] if pause else [delta(piece)]
    return stream(*parts, delta(None, "stop"), USAGE, DONE)


def text(*pieces: str) -> Behaviour:
    events = [event({"choices": [{"index": 0, "text": piece, "finish_reason": None}]}) for piece in pieces]
    last = event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
    return stream(*events, last, DONE)


def echo_chat(*, words: Sequence[str] = (), pause: float = 0.0, count: int = 1) -> Behaviour:
    """Answers with the last message's text, then `words`, `count` times over."""

    async def behave(request: Request, body: dict[str, Any]) -> Response:
        said = body["messages"][-1]["content"]
        pieces = [f"you said {said}.", *(list(words) * count)]
        return await chat(*pieces, pause=pause)(request, body)

    return behave


@contextlib.contextmanager
def running() -> Iterator[OpenAIServer]:
    with OpenAIServer() as server:
        yield server

"""The responses API over HTTP, for networks that let no WebSocket through.

Has the methods of a `GatewaySocket`: client events go in, the server's events come out as frames with the id
of their stream. Each response is a request of its own with server-sent events; steering needs a WebSocket.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import httpx
import msgspec

from keystroke.errors import KeystrokeError, Unavailable
from keystroke.protocol import codec, events
from keystroke.protocol.requests import ResponseCancel, ResponseCreate, ResponseResume, ResponseSteer
from keystroke.protocol.response import ErrorBody, ErrorDetail

_CONNECT_S = 10.0
_SOCKET_FIELDS = ("type", "stream_id", "generate")


class HttpLink:
    def __init__(
        self,
        url: str,
        api_key: str | None,
        on_frame: Callable[[bytes], None],
        on_lost: Callable[[KeystrokeError], None],
        context: ssl.SSLContext | None,
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers=headers,
            timeout=httpx.Timeout(_CONNECT_S, read=None),
            verify=context or True,
        )
        self._on_frame, self._on_lost = on_frame, on_lost
        self._stream_ids: dict[str, str | None] = {}  # of running responses
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def send(self, text: str | bytes) -> None:
        """Carry out one client event. Raises Unavailable once the link is closed."""
        if self._closed:
            raise Unavailable("The connection is closed.")
        event = codec.decode_client_event(text)
        if isinstance(event, ResponseCreate):
            self._spawn(self._stream(event.stream_id, "POST", "/v1/responses", _body(event)))
        elif isinstance(event, ResponseResume):
            path = f"/v1/responses/{event.response_id}?stream=true&starting_after={event.starting_after}"
            self._spawn(self._stream(event.stream_id, "GET", path, None))
        elif isinstance(event, ResponseCancel):
            response_ids = [event.response_id] if event.response_id is not None else list(self._stream_ids)
            for response_id in response_ids:
                self._spawn(self._cancel(response_id))
        elif isinstance(event, ResponseSteer):
            self._refuse_steer(event)

    def abort(self) -> None:
        """Stop everything; `on_lost` is not called."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        closing = asyncio.get_running_loop().create_task(self._client.aclose())
        self._tasks.add(closing)
        closing.add_done_callback(self._tasks.discard)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _stream(self, stream_id: str | None, method: str, path: str, body: bytes | None) -> None:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        try:
            request = self._client.stream(method, path, content=body, headers=headers)
            async with request as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    self._report(answer, stream_id)
                    return
                async for event in _server_sent(answer):
                    self._pass_on(event, stream_id)
        except httpx.TransportError as error:
            self._lose(error)

    def _pass_on(self, event: dict[str, Any], stream_id: str | None) -> None:
        response = event.get("response")
        if isinstance(response, dict):
            if event["type"] == "response.created":
                self._stream_ids[response["id"]] = stream_id
            elif response.get("status") not in ("queued", "in_progress"):
                self._stream_ids.pop(response["id"], None)
        if stream_id is not None:
            event["stream_id"] = stream_id
        self._on_frame(msgspec.json.encode(event))

    def _report(self, answer: httpx.Response, stream_id: str | None) -> None:
        try:
            detail = msgspec.json.decode(answer.content, type=ErrorBody).error
        except msgspec.DecodeError:
            text = f"The server answered with status {answer.status_code}."
            detail = ErrorDetail("server_error", "bad_answer", text)
        after = answer.headers.get("retry-after")
        failed = events.ErrorEvent(answer.status_code, detail)
        if stream_id is not None:
            failed.stream_id = stream_id
        if after is not None:
            failed.headers = {"retry-after": after}
        self._on_frame(codec.encode(failed))

    async def _cancel(self, response_id: str) -> None:
        try:
            await self._client.post(f"/v1/responses/{response_id}/cancel")
        except httpx.TransportError as error:
            self._lose(error)

    def _refuse_steer(self, event: ResponseSteer) -> None:
        failed = events.SteerFailed(
            events.SteerReturned(event.previous_response_id, event.input),
            events.SteerError("not_supported", "Steering needs a WebSocket, which could not be opened."),
            0,
        )
        stream_id = self._stream_ids.get(event.previous_response_id)
        if stream_id is not None:
            failed.stream_id = stream_id
        asyncio.get_running_loop().call_soon(self._on_frame, codec.encode(failed))

    def _lose(self, error: Exception) -> None:
        if not self._closed:
            self.abort()
            self._on_lost(Unavailable(f"The connection to the server was lost ({error or type(error)})."))


def _body(event: ResponseCreate) -> bytes:
    fields = {name: value for name, value in msgspec.to_builtins(event).items() if value is not None}
    if event.generate is False:
        options = fields.get("prompt_cache_options") or {}
        fields["prompt_cache_options"] = {**options, "prewarm": True}
    body = {name: value for name, value in fields.items() if name not in _SOCKET_FIELDS}
    return msgspec.json.encode({**body, "stream": True})


async def _server_sent(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.aiter_lines():
        if line.startswith("data: "):
            event = msgspec.json.decode(line.removeprefix("data: "))
            if isinstance(event, dict):
                yield event

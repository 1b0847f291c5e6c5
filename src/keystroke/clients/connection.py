"""A client of the responses API: many concurrent streams over one WebSocket that reconnects when lost.

After a reconnect each stream resumes behind its last event, so every event is delivered exactly once. A
stream without an event yet is requested again. If the server no longer knows a response, the request is sent
again and the stream yields `Restarted` first, so that the reader discards what it has. Where no WebSocket can
be opened, the same streams run over HTTP.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from msgspec import UNSET

from keystroke.clients.gateway_socket import (
    GatewayConnection,
    GatewaySocket,
    HandshakeFailed,
    WebSocketRefused,
)
from keystroke.clients.http_link import HttpLink
from keystroke.errors import (
    EngineError,
    KeystrokeError,
    ProtocolError,
    RateLimited,
    Restarting,
    Unavailable,
    UsageError,
)
from keystroke.protocol import codec, events
from keystroke.protocol.faults import ConnectionLimitReached
from keystroke.protocol.items import Item, as_input
from keystroke.protocol.requests import ResponseCancel, ResponseCreate, ResponseResume, ResponseSteer
from keystroke.protocol.response import ErrorDetail, Response

STREAMS = 15  # of the 16 responses a connection may run; one stays free for background work
_BACKOFF = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0)  # seconds before each attempt to reconnect
_RESTART = (2.0,) * 45  # and after those, where the server said that it starts again


class Restarted:
    """The connection was lost during the answer and the server forgot it: the answer starts over."""


class RemoteError(EngineError):
    """An error that the server returned. `code` and `status` are the server's."""

    def __init__(self, detail: ErrorDetail, status: int) -> None:
        super().__init__(detail.message, param=detail.param)
        self.code = detail.code  # type: ignore[misc]
        self.status = status  # type: ignore[misc]


Event = events.Event | Restarted


class AnswerStream:
    """One running answer. Iterate for events, or over `text()`; `response` is set at the end."""

    def __init__(self, client: Client, request: ResponseCreate, stream_id: str) -> None:
        self._client = client
        self._request = request
        self._stream_id = stream_id
        self._events: deque[Event] = deque()
        self._news = asyncio.Event()  # there are events, or it has ended
        self._error: KeystrokeError | None = None
        self._has_text = False
        self._successors = 0  # accepted steers whose successor response has not started
        self._sequence = -1  # number of the last event of the current response
        self._resuming = False  # a resume request was sent and no event has arrived since
        self.id: str | None = None
        self.response: Response | None = None

    @property
    def ended(self) -> bool:
        return self.response is not None or self._error is not None

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            while self._events:
                yield self._events.popleft()
            if self._error is not None:
                raise self._error
            if self.response is not None:
                return
            self._news.clear()
            await self._news.wait()

    async def text(self) -> AsyncIterator[str]:
        """The text as it arrives. Restarts are not visible here; iterate over events to see them."""
        async for event in self:
            if isinstance(event, events.TextDelta):
                yield event.delta

    async def result(self) -> Response:
        """Wait for the end and return the response. Raises the server's error."""
        async for _ in self:
            pass
        assert self.response is not None
        return self.response

    async def cancel(self) -> None:
        """Stop the answer; the stream ends with `response.cancelled`."""
        if not self.ended and self.id is not None:
            self._client._send(ResponseCancel(response_id=self.id))

    async def steer(self, text: str) -> None:
        """Redirect the running answer. The text so far stays; a successor response continues from it."""
        if self.ended or self.id is None:
            raise UsageError("Only a running answer can be steered.")
        self._successors += 1
        self._client._send(ResponseSteer(previous_response_id=self.id, input=text))

    def _receive(self, event: events.Event) -> None:
        if isinstance(event, events.ErrorEvent):
            if self._resuming:
                self._client._resend(self)
            else:
                self._fail(_remote_error(event))
            return
        self._resuming = False
        self._sequence = max(self._sequence, event.sequence_number)
        if isinstance(event, events.Failed) and _announces_restart(event):
            self._client._await_restart()
            return
        if isinstance(event, events.Created):
            if event.response.id == self.id and self._has_text:  # taken up by another gateway
                self._events.append(Restarted())
            self.id, self._sequence = event.response.id, event.sequence_number
            if event.response.previous_response_id != self._request.previous_response_id:
                self._successors = max(0, self._successors - 1)
        elif isinstance(event, events.SteerFailed):
            self._successors = max(0, self._successors - 1)
        elif isinstance(event, events.TextDelta):
            self._has_text = True
        self._events.append(event)
        if isinstance(event, events.TERMINAL):
            steered = event.response.incomplete_details
            if not (steered is not None and steered.reason == "steered"):
                self.response = event.response
                self._client._release(self)
        self._news.set()

    def _fail(self, error: KeystrokeError) -> None:
        self._error = error
        self._client._release(self)
        self._news.set()

    def _resume_request(self) -> ResponseResume | None:
        """The request that resumes this stream; None if the response has not started."""
        if self.id is None:
            return None
        self._resuming = True
        return ResponseResume(response_id=self.id, starting_after=self._sequence, stream_id=self._stream_id)

    def _restart(self) -> None:
        if self._has_text:
            self._events.append(Restarted())
            self._news.set()
        self._has_text, self.id, self._sequence, self._resuming = False, None, -1, False


class ChainedConversation:
    """Consecutive turns. Sends only new items, or all of them if the server has forgotten the rest."""

    def __init__(self, client: Client, settings: dict[str, Any]) -> None:
        self._client = client
        self._settings = settings
        self._items: list[Item] = []
        self._previous: str | None = None

    async def ask(self, content: str | list[Item], **settings: Any) -> Response:
        """Send a turn and wait for the whole response."""
        new = [Item(role="user", content=content)] if isinstance(content, str) else content
        merged = {**self._settings, **settings}
        stream = await self._client.respond(new, previous_response_id=self._previous, **merged)
        try:
            response = await stream.result()
        except RemoteError as error:
            if error.code != "previous_response_not_found":
                raise
            stream = await self._client.respond([*self._items, *new], **merged)
            response = await stream.result()
        self._items += [*new, *map(as_input, response.output)]
        self._previous = response.id
        return response


class Client(GatewayConnection):
    """`url` is the server's address, http or https. Use as an async context manager."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:8012",
        *,
        api_key: str | None = None,
        tls: ssl.SSLContext | None = None,
        attempts: int = len(_BACKOFF),
    ) -> None:
        super().__init__(url, "/v1/responses", api_key, tls)
        self._attempts = attempts
        self._restarting = False
        self._opening = asyncio.Lock()
        self._http: HttpLink | None = None  # in place of the socket, where none can be opened
        self._without_socket = False
        self._streams: dict[str, AnswerStream] = {}
        self._free = [f"s{n}" for n in range(STREAMS)]
        self._free_slots = asyncio.Semaphore(STREAMS)

    async def __aenter__(self) -> Client:
        await self._connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        self._disconnect()
        if self._http is not None:
            self._http.abort()
        for stream in tuple(self._streams.values()):
            stream._fail(Unavailable("The client was closed."))

    async def respond(self, content: str | list[Item] | None = None, **settings: Any) -> AnswerStream:
        """Request a response; `settings` are the fields of `response.create`. Waits only for a free id."""
        items = [Item(role="user", content=content)] if isinstance(content, str) else content
        stream_id = await self._acquire_stream_id()
        settings.setdefault("on_disconnect", "continue")
        request = ResponseCreate(input=items, stream_id=stream_id, **settings)
        stream = AnswerStream(self, request, stream_id)
        self._streams[stream_id] = stream
        try:
            socket = await self._connect()
            socket.send(codec.encode(request))
        except Unavailable:
            if self._reconnecting is None:
                self._release(stream)
                raise
        return stream

    async def ask(self, content: str | list[Item], **settings: Any) -> Response:
        """Request a response and wait for all of it."""
        return await (await self.respond(content, **settings)).result()

    async def warm(self, content: str | list[Item], **settings: Any) -> Response:
        """Load a prompt into the server's cache ahead of time; chain from the response's id."""
        return await self.ask(content, generate=False, **settings)

    def conversation(self, **settings: Any) -> ChainedConversation:
        return ChainedConversation(self, settings)

    # Stream ids

    async def _acquire_stream_id(self) -> str:
        if self._closed:
            raise Unavailable("The client was closed.")
        await self._free_slots.acquire()
        return self._free.pop()

    def _release(self, stream: AnswerStream) -> None:
        if self._streams.pop(stream._stream_id, None) is not None:
            self._free.append(stream._stream_id)
            self._free_slots.release()

    # The socket

    async def _connect(self) -> GatewaySocket | HttpLink:
        if (link := self._socket or self._http) is not None:
            return link
        async with self._opening:
            if (link := self._socket or self._http) is not None:
                return link
            if not self._without_socket:
                try:
                    return await self._open_socket()
                except (WebSocketRefused, HandshakeFailed):
                    self._without_socket = True
            self._http = HttpLink(self._base, self._api_key, self._on_frame, self._on_lost, self._tls)
            return self._http

    def _send(self, event: Any) -> None:
        link = self._socket or self._http
        if link is None:
            raise Unavailable("The connection is being reopened; try again in a moment.")
        link.send(codec.encode(event))

    def _on_frame(self, frame: bytes) -> None:
        try:
            event = codec.decode_server_event(frame)
        except (ProtocolError, UsageError):
            return  # an event that only newer clients know
        if isinstance(event, events.ErrorEvent) and event.error.code == ConnectionLimitReached.code:
            self._hand_over()
            return
        stream_id = getattr(event, "stream_id", UNSET)
        if isinstance(event, events.ErrorEvent) and stream_id is UNSET and event.error.param == "response_id":
            return  # a cancel that arrived after the end; it concerns no open stream
        stream = self._streams.get(stream_id) if isinstance(stream_id, str) else self._only_stream()
        if stream is not None:
            stream._receive(event)

    def _only_stream(self) -> AnswerStream | None:
        """The stream that an event without an id belongs to, if there is only one."""
        return next(iter(self._streams.values())) if len(self._streams) == 1 else None

    def _hand_over(self) -> None:
        """The connection reached its maximum age: continue its streams on another. It is dropped without a
        close frame, so that the server keeps what runs."""
        if self._socket is not None:
            self._socket.abort()
            self._on_lost(Unavailable("The connection reached its maximum age."))

    def _await_restart(self) -> None:
        """The server said that it starts again: continue the streams when it is back."""
        self._restarting = True
        self._hand_over()

    def _on_lost(self, error: KeystrokeError) -> None:
        self._socket = self._http = None
        if self._closed or not self._streams:
            return
        self._reconnecting = asyncio.get_running_loop().create_task(self._reconnect(error))

    def _resend(self, stream: AnswerStream) -> None:
        """Send the request of a stream that the server does not know."""
        stream._restart()
        try:
            self._send(stream._request)
        except Unavailable:
            return  # the connection was lost again; the reconnect sends it again

    async def _reconnect(self, error: KeystrokeError) -> None:
        patient = _RESTART if self._restarting else ()
        self._restarting = False
        for delay in (*_BACKOFF[: self._attempts], *patient):
            await asyncio.sleep(delay)
            try:
                socket = await self._connect()
            except Unavailable as failure:
                error = failure
                continue
            except KeystrokeError as failure:
                error = failure
                break
            for stream in tuple(self._streams.values()):
                resume = stream._resume_request()
                if resume is not None:
                    socket.send(codec.encode(resume))
                else:
                    self._resend(stream)
            self._reconnecting = None
            return
        self._reconnecting = None
        for stream in tuple(self._streams.values()):
            stream._fail(error)


def _announces_restart(event: events.Failed) -> bool:
    error = event.response.error
    return error is not None and error.code == Restarting.code


def _remote_error(event: events.ErrorEvent) -> KeystrokeError:
    if event.status == 429:
        headers = event.headers if isinstance(event.headers, dict) else {}
        return RateLimited(event.error.message, retry_after=float(headers.get("retry-after", 1)))
    return RemoteError(event.error, event.status)

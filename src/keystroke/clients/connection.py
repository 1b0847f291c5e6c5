"""The client every client of ours uses: many streams over one socket that comes back when it is lost.

Speaks the protocol's types, never raw JSON. Each stream has an id of its own while it runs. When the
socket is lost it is opened again: what had begun is taken up behind the last event it has, each event exactly
once; what had said nothing yet is asked again unseen; what the server no longer knows is asked again and says
`Restarted` first, so that its reader drops what it has. A conversation whose server forgot it sends itself
whole.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

from msgspec import UNSET

from keystroke.clients.gateway_socket import GatewaySocket
from keystroke.errors import EngineError, KeystrokeError, ProtocolError, RateLimited, Unavailable, UsageError
from keystroke.protocol import codec, events
from keystroke.protocol.items import Item, as_input
from keystroke.protocol.requests import ResponseCancel, ResponseCreate, ResponseResume, ResponseSteer
from keystroke.protocol.response import ErrorDetail, Response

STREAMS = 15  # of the 16 responses a connection may run; one stays free for background work
_BACKOFF = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0)  # seconds before each attempt to come back


class Restarted:
    """The connection was lost in the middle of this answer and the server forgot it; it begins anew after
    this."""


class RemoteError(EngineError):
    """What the server answered instead of a response. `code` and `status` are the server's."""

    def __init__(self, detail: ErrorDetail, status: int) -> None:
        super().__init__(detail.message, param=detail.param)
        self.code = detail.code  # type: ignore[misc]
        self.status = status  # type: ignore[misc]


Event = events.Event | Restarted


class AnswerStream:
    """One answer under way. Iterate for events; `text()` for the text alone; `response` once it ended."""

    def __init__(self, client: Client, request: ResponseCreate, stream_id: str) -> None:
        self._client = client
        self._request = request
        self._stream_id = stream_id
        self._events: deque[Event] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: KeystrokeError | None = None
        self._spoke = False
        self._successors = 0  # steers accepted whose successor is still to come
        self._number = -1  # of the last event, counted by response
        self._resuming = False  # the server was asked to go on, and has not said anything yet
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
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    async def text(self) -> AsyncIterator[str]:
        """The text as it comes. A restart is not visible here: use events where that matters."""
        async for event in self:
            if isinstance(event, events.TextDelta):
                yield event.delta

    async def result(self) -> Response:
        """The response once it ended; raises what the server answered instead."""
        async for _ in self:
            pass
        assert self.response is not None
        return self.response

    async def cancel(self) -> None:
        """Stop it; the stream ends with `response.cancelled`."""
        if not self.ended and self.id is not None:
            self._client._send(ResponseCancel(response_id=self.id))

    async def steer(self, text: str) -> None:
        """Redirect the answer under way. What was said stays; a successor goes on from it."""
        if self.ended or self.id is None:
            raise UsageError("Only an answer under way can be steered.")
        self._successors += 1
        self._client._send(ResponseSteer(previous_response_id=self.id, input=text))

    def _receive(self, event: events.Event) -> None:
        if isinstance(event, events.ErrorEvent):
            if self._resuming:
                self._client._ask_again(self)
            else:
                self._fail(_remote_error(event))
            return
        self._resuming = False
        self._number = max(self._number, event.sequence_number)
        if isinstance(event, events.Created):
            self.id, self._number = event.response.id, event.sequence_number
            if event.response.previous_response_id != self._request.previous_response_id:
                self._successors = max(0, self._successors - 1)
        elif isinstance(event, events.SteerFailed):
            self._successors = max(0, self._successors - 1)
        elif isinstance(event, events.TextDelta):
            self._spoke = True
        self._events.append(event)
        if isinstance(event, events.TERMINAL):
            steered = event.response.incomplete_details
            if not (steered is not None and steered.reason == "steered"):
                self.response = event.response
                self._client._release(self)
        self._wake()

    def _fail(self, error: KeystrokeError) -> None:
        self._error = error
        self._client._release(self)
        self._wake()

    def _resume(self) -> ResponseResume | None:
        """How to go on where it broke off; None where nothing had begun."""
        if self.id is None:
            return None
        self._resuming = True
        return ResponseResume(response_id=self.id, starting_after=self._number, stream_id=self._stream_id)

    def _restart(self) -> None:
        if self._spoke:
            self._events.append(Restarted())
            self._wake()
        self._spoke, self.id, self._number, self._resuming = False, None, -1, False

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class ChainedConversation:
    """Turns that follow each other. Only what is new is sent; the whole where the server asks for it."""

    def __init__(self, client: Client, settings: dict[str, Any]) -> None:
        self._client = client
        self._settings = settings
        self._items: list[Item] = []
        self._previous: str | None = None

    async def ask(self, content: str | list[Item], **settings: Any) -> Response:
        """Say something and wait for the whole answer."""
        new = [Item(role="user", content=content)] if isinstance(content, str) else content
        wanted = {**self._settings, **settings}
        stream = await self._client.respond(new, previous_response_id=self._previous, **wanted)
        try:
            response = await stream.result()
        except RemoteError as error:
            if error.code != "previous_response_not_found":
                raise
            stream = await self._client.respond([*self._items, *new], **wanted)
            response = await stream.result()
        self._items += [*new, *map(as_input, response.output)]
        self._previous = response.id
        return response


class Client:
    """`url` is the server's address, http or https. Use as an async context manager."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:8012",
        *,
        api_key: str | None = None,
        tls: ssl.SSLContext | None = None,
        attempts: int = len(_BACKOFF),
    ) -> None:
        base = url.rstrip("/").removesuffix("/v1")
        if not base.startswith(("http://", "https://")):
            raise UsageError(
                f"{url:.100} is not the address of a server; write it like http://127.0.0.1:8012."
            )
        self._url = f"ws{base.removeprefix('http')}/v1/responses"
        self._api_key = api_key or os.environ.get("KEYSTROKE_API_KEY") or None
        self._tls = tls
        self._attempts = attempts
        self._socket: GatewaySocket | None = None
        self._opening = asyncio.Lock()
        self._streams: dict[str, AnswerStream] = {}
        self._free = [f"s{n}" for n in range(STREAMS)]
        self._room = asyncio.Semaphore(STREAMS)
        self._coming_back: asyncio.Task[None] | None = None
        self._closed = False

    async def __aenter__(self) -> Client:
        await self._connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        self._closed = True
        if self._coming_back is not None:
            self._coming_back.cancel()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        for stream in tuple(self._streams.values()):
            stream._fail(Unavailable("The client was closed."))

    async def respond(self, content: str | list[Item] | None = None, **settings: Any) -> AnswerStream:
        """Ask for a response; `settings` are the fields of `response.create`. Waits only for a free id."""
        items = [Item(role="user", content=content)] if isinstance(content, str) else content
        stream_id = await self._take_stream_id()
        settings.setdefault("on_disconnect", "continue")
        request = ResponseCreate(input=items, stream_id=stream_id, **settings)
        stream = AnswerStream(self, request, stream_id)
        self._streams[stream_id] = stream
        try:
            socket = await self._connect()
            socket.send(codec.encode(request))
        except Unavailable:
            if self._coming_back is None:
                self._release(stream)
                raise
        return stream

    async def ask(self, content: str | list[Item], **settings: Any) -> Response:
        """Ask and wait for the whole response."""
        return await (await self.respond(content, **settings)).result()

    async def warm(self, content: str | list[Item], **settings: Any) -> Response:
        """Bring a prompt into the server's cache ahead of time; chain from the response's id."""
        return await self.ask(content, generate=False, **settings)

    def conversation(self, **settings: Any) -> ChainedConversation:
        return ChainedConversation(self, settings)

    # Stream ids

    async def _take_stream_id(self) -> str:
        if self._closed:
            raise Unavailable("The client was closed.")
        await self._room.acquire()
        return self._free.pop()

    def _release(self, stream: AnswerStream) -> None:
        if self._streams.pop(stream._stream_id, None) is not None:
            self._free.append(stream._stream_id)
            self._room.release()

    # The socket

    async def _connect(self) -> GatewaySocket:
        if self._socket is not None:
            return self._socket
        async with self._opening:
            if self._socket is None:
                self._socket = await GatewaySocket.open(
                    self._url,
                    api_key=self._api_key,
                    on_frame=self._on_frame,
                    on_lost=self._on_lost,
                    context=self._tls,
                )
            return self._socket

    def _send(self, event: Any) -> None:
        if self._socket is None:
            raise Unavailable("The connection is being opened again; try in a moment.")
        self._socket.send(codec.encode(event))

    def _on_frame(self, frame: bytes) -> None:
        try:
            event = codec.decode_server_event(frame)
        except (ProtocolError, UsageError):
            return  # an event of a newer server; everything it depends on comes in events we know
        stream_id = getattr(event, "stream_id", UNSET)
        if isinstance(event, events.ErrorEvent) and stream_id is UNSET and event.error.param == "response_id":
            return  # a cancel that came after the end: nobody waits for it, least of all the next stream
        stream = self._streams.get(stream_id) if isinstance(stream_id, str) else self._alone()
        if stream is not None:
            stream._receive(event)

    def _alone(self) -> AnswerStream | None:
        """Whose an event without an id is: the only stream there is."""
        return next(iter(self._streams.values())) if len(self._streams) == 1 else None

    def _on_lost(self, error: KeystrokeError) -> None:
        self._socket = None
        if self._closed or not self._streams:
            return
        self._coming_back = asyncio.get_running_loop().create_task(self._come_back(error))

    def _ask_again(self, stream: AnswerStream) -> None:
        """From the beginning: the server does not know it."""
        stream._restart()
        try:
            self._send(stream._request)
        except Unavailable:
            return  # the socket is lost once more, and so tried once more

    async def _come_back(self, error: KeystrokeError) -> None:
        for delay in _BACKOFF[: self._attempts]:
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
                resume = stream._resume()
                if resume is not None:
                    socket.send(codec.encode(resume))
                else:
                    self._ask_again(stream)
            self._coming_back = None
            return
        self._coming_back = None
        for stream in tuple(self._streams.values()):
            stream._fail(error)


def _remote_error(event: events.ErrorEvent) -> KeystrokeError:
    if event.status == 429:
        headers = event.headers if isinstance(event.headers, dict) else {}
        return RateLimited(event.error.message, retry_after=float(headers.get("retry-after", 1)))
    return RemoteError(event.error, event.status)

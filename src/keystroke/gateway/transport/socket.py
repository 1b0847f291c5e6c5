"""One WebSocket: reads text frames, writes messages, and detects clients that stall or disappear.

Both socket endpoints use this loop; a `SocketConnection` interprets the frames. There is one reading and one
writing task, none per message. No frame ends the connection except a close; `on_disconnect` is called
exactly once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from keystroke.errors import KeystrokeError, ProtocolError
from keystroke.gateway.transport.outbox import Outbox
from keystroke.protocol.codec import encode
from keystroke.protocol.faults import RequestTooLarge, SlowClient, error_detail
from keystroke.protocol.response import ErrorBody

log = logging.getLogger("keystroke.socket")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
SendMessage = Callable[[Message], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class SocketLimits:
    max_frame_bytes: int = 16 << 20
    lifetime: float = 3600.0  # seconds; clients open the next one
    handover: float = 900.0  # seconds that running answers get to end after it
    clock: Callable[[], float] = time.monotonic  # measures both
    tick: float = 5.0  # seconds between two looks at the clock
    patience: float = 30.0  # seconds a client may read nothing while an answer waits for it


class SocketConnection:
    """One connection: interprets the frames of its socket."""

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = self._closed = False

    async def serve(self) -> None:
        """Serve until the client disconnects."""
        await self._socket.serve(self)

    @property
    def busy(self) -> bool:
        """Whether a request is being answered."""
        raise NotImplementedError

    def close_when_idle(self) -> None:
        """Close with the restart code as soon as no request is being answered; idempotent."""
        self._closing = True
        if not self.busy and not self._closed:
            self._closed = True
            self._spawn(self._socket.close("this gateway restarts; connect again", 1012))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def handle_frame(self, frame: str) -> None:
        """One text frame within the limits. Must not raise."""
        raise NotImplementedError

    def reject_frame(self, error: KeystrokeError) -> None:
        """Report a frame that was not read."""
        raise NotImplementedError

    def on_disconnect(self) -> None:
        """The client is gone. Called once."""
        raise NotImplementedError

    def on_stalled(self, reason: SlowClient) -> None:
        """The client reads nothing and is being dropped: cancel what `on_disconnect` would not."""

    def pause(self) -> None:
        """The client is far behind: generate nothing more until `resume`. Short answers are not paused."""

    def resume(self) -> None:
        """The client has caught up."""


class Socket:
    """`fast_path` holds optional functions of the server's frame protocol: `write` sends frames at once,
    `abort` drops the connection. `headers` go with the handshake."""

    def __init__(
        self,
        receive: Receive,
        send: SendMessage,
        limits: SocketLimits | None = None,
        fast_path: Mapping[str, Any] | None = None,
        *,
        subprotocol: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._headers = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        self.limits = limits or SocketLimits()
        self.closed = False
        self.closed_by_client = False  # with a close frame: the connection did not just break
        self._receive, self._send = receive, send
        self._subprotocol = subprotocol
        fast_path = fast_path or {}
        self._write_now: Callable[[list[bytes]], bool] | None = fast_path.get("write")
        self._abort: Callable[[], None] = fast_path.get("abort", lambda: None)
        self._reader: SocketConnection
        self._outbox: Outbox
        self._writing_since = 0.0

    async def serve(self, reader: SocketConnection) -> None:
        """Accept, then read until the client disconnects."""
        self._reader, self._outbox = reader, Outbox(reader.pause, reader.resume)
        accept = {"type": "websocket.accept", "subprotocol": self._subprotocol, "headers": self._headers}
        await self._send(accept)
        writer = asyncio.create_task(self._write())
        watch = asyncio.create_task(self._watch())
        try:
            await self._read()
        finally:
            watch.cancel()
            self._disconnect()
            await asyncio.wait({writer}, timeout=1.0)
            writer.cancel()

    @property
    def paused(self) -> bool:
        return self._outbox.paused

    def put(self, messages: list[Any], owner: Any = None) -> None:
        """Send at once where nothing waits and the socket accepts it, else queue in order. The time it takes
        is added to `owner.network_seconds`."""
        if self.closed:
            return
        if self._write_now is not None and self._outbox.idle:
            payloads = [encode(message) for message in messages]
            began = time.perf_counter()
            if self._write_now(payloads):
                if owner is not None:
                    owner.network_seconds += time.perf_counter() - began
                return
        self._outbox.put(owner, messages)
        if self._outbox.full:
            self._drop_client("The client reads nothing while its answers pile up.")

    async def close(self, reason: str, code: int = 1000) -> None:
        """Send a close frame; `on_disconnect` follows once the client answered or is gone."""
        await self._send({"type": "websocket.close", "code": code, "reason": reason})

    async def _read(self) -> None:
        limit = self.limits.max_frame_bytes
        while True:
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                self.closed_by_client = message.get("code") in (1000, 1001)
                return
            frame = message.get("text")
            if frame is None:
                self._reader.reject_frame(
                    ProtocolError("Frames must be text; send one JSON event per frame.")
                )
            elif len(frame) > limit:
                self._reader.reject_frame(
                    RequestTooLarge(f"The frame has {len(frame):,} characters; at most {limit:,} are read.")
                )
            else:
                self._reader.handle_frame(frame)

    async def _write(self) -> None:
        """Write what is queued for a client that is behind."""
        outbox, clock = self._outbox, time.perf_counter
        try:
            while (batch := await outbox.next_batch()) is not None:
                for owner, message in batch:
                    began = self._writing_since = clock()
                    await self._send({"type": "websocket.send", "text": encode(message).decode()})
                    if owner is not None:
                        owner.network_seconds += clock() - began
                self._writing_since = 0.0
                outbox.mark_written()
        except Exception as error:  # the socket is gone; `_read` sees it too
            log.debug("a socket could not be written: %s", type(error).__name__)
            self._disconnect()

    async def _watch(self) -> None:
        """Drop a client that reads nothing: its answers hold memory and places in the queue. A close frame
        would wait behind unread data, so the connection is aborted."""
        patience = self.limits.patience
        while True:
            await asyncio.sleep(patience / 4)
            since = self._writing_since
            if since and time.perf_counter() - since > patience:
                self._drop_client(f"The client read nothing for {patience:.0f} s.")
                return

    def _drop_client(self, why: str) -> None:
        log.warning("a client was dropped: %s", why)
        self._reader.on_stalled(SlowClient(why))
        self._abort()
        self._disconnect()

    def _disconnect(self) -> None:
        if not self.closed:
            self.closed = True
            self._outbox.close(gone=True)
            self._reader.on_disconnect()


async def deny(send: SendMessage, error: KeystrokeError, scope: Message) -> None:
    """Refuse the upgrade with a status and a body where the server supports it, else with a plain close."""
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1008, "reason": error.message[:100]})
        return
    headers = [(b"content-type", b"application/json")]
    await send({"type": "websocket.http.response.start", "status": error.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": encode(ErrorBody(error_detail(error)))})

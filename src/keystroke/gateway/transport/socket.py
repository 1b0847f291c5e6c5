"""One WebSocket: text frames in, messages out, and a client that stalls or vanishes noticed.

The one loop that both sockets run. It reads and writes and knows nothing of what a frame means: that is
its reader's. One reader, one writer, no task per message. Nothing a client sends ends the connection except
closing it; however it ends, the reader is told exactly once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

from keystroke.errors import KeystrokeError, ProtocolError
from keystroke.gateway.transport.outbox import Outbox
from keystroke.protocol.codec import encode
from keystroke.protocol.faults import SlowClient, TooLarge, detail
from keystroke.protocol.response import ErrorBody

log = logging.getLogger("keystroke.socket")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
SendMessage = Callable[[Message], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class SocketLimits:
    max_frame_bytes: int = 16 << 20
    lifetime: float = 3600.0  # seconds; clients open the next one
    patience: float = 30.0  # seconds a client may read nothing while an answer waits for it


class SocketReader(Protocol):
    """Who makes sense of the frames."""

    def take(self, frame: str) -> None:
        """One text frame within the limits. Must not raise."""

    def refuse(self, error: KeystrokeError) -> None:
        """A frame that is not to be read; tell the client why."""

    def stalled(self, reason: SlowClient) -> None:
        """The client reads nothing and is let go: stop what it holds up."""

    def left(self) -> None:
        """The client is gone. Called once."""

    def pause(self) -> None:
        """The client is far behind: make nothing more for it until `resume`."""

    def resume(self) -> None: ...


class Socket:
    """`fast_path` holds what the server's own frame protocol offers: `write` puts frames on the wire at once,
    `abort` drops the connection. Both may be missing."""

    def __init__(
        self,
        receive: Receive,
        send: SendMessage,
        limits: SocketLimits | None = None,
        fast_path: Mapping[str, Any] | None = None,
        *,
        subprotocol: str | None = None,
    ) -> None:
        self.limits = limits or SocketLimits()
        self.closed = False
        self.goodbye = False  # the client took its leave: the connection did not just break
        self._receive, self._send = receive, send
        self._subprotocol = subprotocol
        fast_path = fast_path or {}
        self._write_now: Callable[[list[bytes]], bool] | None = fast_path.get("write")
        self._abort: Callable[[], None] = fast_path.get("abort", lambda: None)
        self._reader: SocketReader
        self._outbox: Outbox
        self._writing_since = 0.0

    async def serve(self, reader: SocketReader) -> None:
        """Accept, then read until the client goes."""
        self._reader, self._outbox = reader, Outbox(reader.pause, reader.resume)
        await self._send({"type": "websocket.accept", "subprotocol": self._subprotocol})
        writer = asyncio.create_task(self._write())
        watch = asyncio.create_task(self._watch())
        try:
            await self._read()
        finally:
            watch.cancel()
            self._leave()
            await asyncio.wait({writer}, timeout=1.0)
            writer.cancel()

    @property
    def paused(self) -> bool:
        return self._outbox.paused

    def put(self, messages: list[Any], owner: Any = None) -> None:
        """Out at once where nothing waits and the socket takes it; else in order behind what waits. The time
        it takes is added to `owner.network_seconds`."""
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
            self._let_go("The client reads nothing while what it asked for piles up.")

    async def close(self, reason: str, code: int = 1000) -> None:
        """Say goodbye; the reader is told once the client has answered or gone."""
        await self._send({"type": "websocket.close", "code": code, "reason": reason})

    async def _read(self) -> None:
        limit = self.limits.max_frame_bytes
        while True:
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                self.goodbye = message.get("code") in (1000, 1001)
                return
            frame = message.get("text")
            if frame is None:
                self._reader.refuse(ProtocolError("Frames must be text; send one JSON event per frame."))
            elif len(frame) > limit:
                self._reader.refuse(
                    TooLarge(f"The frame has {len(frame):,} characters; at most {limit:,} are read.")
                )
            else:
                self._reader.take(frame)

    async def _write(self) -> None:
        """The writer of a client that is behind."""
        outbox, clock = self._outbox, time.perf_counter
        try:
            while (batch := await outbox.take()) is not None:
                for owner, message in batch:
                    began = self._writing_since = clock()
                    await self._send({"type": "websocket.send", "text": encode(message).decode()})
                    if owner is not None:
                        owner.network_seconds += clock() - began
                self._writing_since = 0.0
                outbox.written()
        except Exception as error:  # the socket is gone; the reader sees it too
            log.debug("a socket could not be written: %s", type(error).__name__)
            self._leave()

    async def _watch(self) -> None:
        """Give up a client that reads nothing: its answers hold memory and places in the queue. A close frame
        would wait behind what it does not read, so the connection is dropped."""
        patience = self.limits.patience
        while True:
            await asyncio.sleep(patience / 4)
            since = self._writing_since
            if since and time.perf_counter() - since > patience:
                self._let_go(f"The client read nothing for {patience:.0f} s.")
                return

    def _let_go(self, why: str) -> None:
        log.info("a client was let go: %s", why)
        self._reader.stalled(SlowClient(why))
        self._abort()
        self._leave()

    def _leave(self) -> None:
        if not self.closed:
            self.closed = True
            self._outbox.close(gone=True)
            self._reader.left()


async def deny(send: SendMessage, error: KeystrokeError, scope: Message) -> None:
    """Refuse the upgrade with a status and a body, where the server can; with a plain close elsewhere."""
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1008, "reason": error.message[:100]})
        return
    headers = [(b"content-type", b"application/json")]
    await send({"type": "websocket.http.response.start", "status": error.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": encode(ErrorBody(detail(error)))})

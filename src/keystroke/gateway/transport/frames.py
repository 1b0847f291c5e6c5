"""The protocol classes that uvicorn runs: its own, with a fast path for text frames and a way to abort.

Handshake, reading, pings and closing are uvicorn's and `websockets`'. Only outgoing text takes the fast
path: without compression a server frame is a header of two to ten bytes before the payload, and all waiting
frames go out in one write. Applications find both functions as an extension of their scope. Connections that
send half a request or read nothing time out; large input is parsed in slices, so that a flood of tiny frames
does not block other connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Opcode
from websockets.protocol import State

EXTENSION = "keystroke.frames"
SLICE = 32 << 10  # bytes parsed in one turn of the loop; a flood of pings of this size takes some 20 ms
FRAGMENTS = 64  # of one message, from which they are joined: separate objects take three times the memory


@dataclass(frozen=True, slots=True)
class WireLimits:
    """Timeouts in seconds, and the number of connections."""

    headers: float = 10.0  # from the first byte of a request, or the connection, to the end of its headers
    body: float = 30.0  # between two pieces of a request's body
    stall: float = 35.0  # while the client reads nothing; event streams give up a little sooner
    connections: int = 512


_LIMITS = WireLimits()


def text_frame_header(size: int) -> bytes:
    """The header of a final, unmasked text frame (RFC 6455, section 5.2)."""
    if size < 126:
        return bytes((0x81, size))
    if size < 65_536:
        return b"\x81\x7e" + size.to_bytes(2, "big")
    return b"\x81\x7f" + size.to_bytes(8, "big")


class AbortableHttp(H11Protocol):
    """uvicorn's HTTP, with timeouts and a way to abort: a clean close would wait for data that is never
    read."""

    def __init__(self, *arguments: Any, limits: WireLimits = _LIMITS, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._limits = limits
        self._timeout: asyncio.TimerHandle | None = None  # timeout for more of a request
        self._stalled: asyncio.TimerHandle | None = None  # timeout for a client that reads nothing
        self._upgraded = False  # the connection is a WebSocket: no HTTP timeouts

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        app: ASGIApp = self.app

        async def with_abort(scope: Scope, receive: Receive, send: Send) -> None:
            scope.setdefault("extensions", {})[EXTENSION] = {"abort": transport.abort}
            await app(scope, receive, send)

        self.app = with_abort
        if len(self.connections) > self._limits.connections:
            transport.abort()
            return
        self._start_timeout(self._limits.headers)

    def handle_websocket_upgrade(self, event: Any) -> None:
        self._upgraded = True
        super().handle_websocket_upgrade(event)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        state = self.conn.their_state
        if self._upgraded:  # h11 never saw the end of that request and would wait for a body
            self._stop_timeout()
        elif state is h11.IDLE:
            if self._timeout is None:
                self._start_timeout(self._limits.headers)  # not restarted by each byte
        elif state is h11.SEND_BODY:
            self._start_timeout(self._limits.body)
        else:
            self._stop_timeout()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timeout()
        self.resume_writing()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._stop_timeout()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stalled is None:
            self._stalled = self.loop.call_later(self._limits.stall, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _start_timeout(self, seconds: float) -> None:
        self._stop_timeout()
        self._timeout = self.loop.call_later(seconds, self._on_timeout)

    def _stop_timeout(self) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None

    def _on_timeout(self) -> None:
        self._timeout = None
        if self.flow.read_paused:  # the server itself paused reading
            self._start_timeout(self._limits.body)
        else:
            self.transport.abort()


class FrameProtocol(WebSocketsSansIOProtocol):
    """Adds `write(payloads)` to the scope's extensions: it sends frames at once, or returns False where the
    client is behind or gone and the application has to use `send`."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._backlog = bytearray()  # received and not yet parsed; reading is paused meanwhile
        self._parsing = False  # the next slice is scheduled
        self._recv_frame = self.conn.recv_frame
        setattr(self.conn, "recv_frame", self._accept_close)  # noqa: B010 - not assignable for mypy

    def _accept_close(self, frame: Any) -> None:
        """Allow a close frame inside a fragmented message (RFC 6455, section 5.4); `websockets` treats it as
        an error."""
        if frame.opcode is Opcode.CLOSE and getattr(self.conn, "current_size", None) is not None:
            self.conn.current_size = None
        self._recv_frame(frame)

    def data_received(self, data: bytes) -> None:
        if not self._backlog and len(data) <= SLICE:
            super().data_received(data)
            return
        self._backlog += data
        self.transport.pause_reading()
        self._parse_more()

    async def receive(self) -> Any:
        """The next message. Parsing continues once the application has taken all messages, so that no client
        is read faster than it is served."""
        message = await self.queue.get()
        if self.read_paused and self.queue.empty():
            self.read_paused = False
            self._parse_more()
        return message

    def connection_lost(self, exc: Exception | None) -> None:
        if self._backlog:  # parse what was sent before the end
            rest, self._backlog = bytes(self._backlog), bytearray()
            super().data_received(rest)
        super().connection_lost(exc)

    def _parse_more(self) -> None:
        """Schedule the next slice; resume reading where nothing is left."""
        if self.transport.is_closing() or self.read_paused:
            return
        if not self._backlog:
            self.transport.resume_reading()
        elif not self._parsing:
            self._parsing = True
            self.loop.call_soon(self._parse)

    def _parse(self) -> None:
        self._parsing = False
        if not self.read_paused and self._backlog:
            piece = bytes(self._backlog[:SLICE])
            del self._backlog[:SLICE]
            super().data_received(piece)
            self._parse_more()

    def handle_cont(self, event: Any) -> None:
        pieces: Any = self.frames
        if len(pieces) >= FRAGMENTS:
            joined = pieces[0] if isinstance(pieces[0], bytearray) else bytearray()
            for piece in pieces[1:] if pieces[0] is joined else pieces:
                joined += piece
            pieces[:] = [joined]
        super().handle_cont(event)

    def send_receive_event_to_app(self) -> None:
        """As uvicorn does, except that invalid UTF-8 closes the connection without a log entry."""
        if self.curr_msg_data_type != "text" or self.close_sent:
            super().send_receive_event_to_app()
            return
        pieces: Any = self.frames
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self.frames = []
        try:
            text = data.decode()
        except UnicodeDecodeError:
            self.conn.send_close(1007)
            self.handle_parser_exception()
            return
        self.queue.put_nowait({"type": "websocket.receive", "text": text})
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()

    def handle_ping(self) -> None:
        """Do not answer pings of a client that reads nothing: the pongs would pile up."""
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()

    def handle_connect(self, event: Any) -> None:
        super().handle_connect(event)
        if hasattr(self, "scope"):
            self.scope["extensions"][EXTENSION] = {
                "write": self.write_frames,
                "abort": self.transport.abort,
            }

    def write_frames(self, payloads: Sequence[bytes]) -> bool:
        if not self.writable.is_set() or self.disconnected or self.close_sent:
            return False
        if self.conn.state is not State.OPEN or not self.handshake_complete:
            return False
        if len(payloads) == 1:
            payload = payloads[0]
            self.transport.write(text_frame_header(len(payload)) + payload)
            return True
        parts: list[bytes] = []
        for payload in payloads:
            parts.append(text_frame_header(len(payload)))
            parts.append(payload)
        self.transport.write(b"".join(parts))
        return True

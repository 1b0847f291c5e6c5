"""The protocol classes uvicorn runs for us: the shipped ones, with a short way out and a way to hang up.

The handshake, reading, pings and closing are uvicorn's and `websockets`' own. Only text going out takes
the short way: without compression a server frame is a header of two to ten bytes before the payload, and all
frames that wait go out in one write. Applications find both ways as an extension of their scope. Whoever
sends half a request, or reads nothing, is waited for a while only; what arrives at once is read in pieces, so
that a flood of tiny frames takes its turn like everybody.
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
SLICE = (
    32 << 10
)  # bytes that are parsed before others have their turn; a flood of pings in it takes some 20 ms
FRAGMENTS = (
    64  # pieces of one message from which they are kept as one: a Python object each would be thrice as large
)


@dataclass(frozen=True, slots=True)
class WireLimits:
    """How long a connection is waited for, in seconds, and how many there may be."""

    headers: float = 10.0  # from the first byte of a request, or the connection, to the end of its headers
    body: float = 30.0  # between two pieces of a request's body
    stall: float = 35.0  # while the client reads nothing; streams that know why give up a little sooner
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
    """HTTP as uvicorn serves it, with a way to drop a connection whose client reads nothing: a polite close
    would wait for what is never read."""

    def __init__(self, *arguments: Any, limits: WireLimits = _LIMITS, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._limits = limits
        self._awaited: asyncio.TimerHandle | None = None  # until more of a request must have come
        self._stalled: asyncio.TimerHandle | None = None  # until the client must have read something
        self._upgraded = False  # the connection is a WebSocket now, and no longer ours to time

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
        self._expect(self._limits.headers)

    def handle_websocket_upgrade(self, event: Any) -> None:
        self._upgraded = True
        super().handle_websocket_upgrade(event)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        state = self.conn.their_state
        if self._upgraded:  # h11 was never told the end of that request, and would wait for a body
            self._cease()
        elif state is h11.IDLE:
            if self._awaited is None:
                self._expect(self._limits.headers)  # not anew for each byte of them
        elif state is h11.SEND_BODY:
            self._expect(self._limits.body)
        else:
            self._cease()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cease()
        self.resume_writing()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._cease()
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

    def _expect(self, seconds: float) -> None:
        self._cease()
        self._awaited = self.loop.call_later(seconds, self._overdue)

    def _cease(self) -> None:
        if self._awaited is not None:
            self._awaited.cancel()
            self._awaited = None

    def _overdue(self) -> None:
        self._awaited = None
        if self.flow.read_paused:  # it is us who do not read
            self._expect(self._limits.body)
        else:
            self.transport.abort()


class FrameProtocol(WebSocketsSansIOProtocol):
    """Offers the application, as an extension of its scope, `write(payloads)`: frames out at once, or False
    where the client is behind or gone and the application must wait with `send` as usual."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._backlog = bytearray()  # arrived and not yet parsed; nothing more is read meanwhile
        self._parsing = False  # a turn for its next slice is coming
        self._take_frame = self.conn.recv_frame
        setattr(self.conn, "recv_frame", self._heed_close)  # noqa: B010 - the parser's own way out

    def _heed_close(self, frame: Any) -> None:
        """A close may come in the middle of a message (RFC 6455, section 5.4); `websockets` takes it for a
        fault of the client."""
        if frame.opcode is Opcode.CLOSE and getattr(self.conn, "current_size", None) is not None:
            self.conn.current_size = None
        self._take_frame(frame)

    def data_received(self, data: bytes) -> None:
        if not self._backlog and len(data) <= SLICE:
            super().data_received(data)
            return
        self._backlog += data
        self.transport.pause_reading()
        self._go_on()

    async def receive(self) -> Any:
        """The next message. What waits to be parsed goes on once the application has taken all there is:
        nobody is read faster than it is answered."""
        message = await self.queue.get()
        if self.read_paused and self.queue.empty():
            self.read_paused = False
            self._go_on()
        return message

    def connection_lost(self, exc: Exception | None) -> None:
        if self._backlog:  # what was sent before leaving counts
            rest, self._backlog = bytes(self._backlog), bytearray()
            super().data_received(rest)
        super().connection_lost(exc)

    def _go_on(self) -> None:
        """Parse the next slice in a turn of its own; read on where nothing waits."""
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
            self._go_on()

    def handle_cont(self, event: Any) -> None:
        pieces: Any = self.frames
        if len(pieces) >= FRAGMENTS:
            whole = pieces[0] if isinstance(pieces[0], bytearray) else bytearray()
            for piece in pieces[1:] if pieces[0] is whole else pieces:
                whole += piece
            pieces[:] = [whole]
        super().handle_cont(event)

    def send_receive_event_to_app(self) -> None:
        """As uvicorn does it, but text that is none closes the connection without a word in the log: anybody
        could fill it."""
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
        """Pings of a client that reads nothing are not answered: the answers would pile up."""
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

"""The protocol classes uvicorn runs for us: the shipped ones, with a short way out and a way to hang up.

Law: the handshake, reading, pings and closing are uvicorn's and `websockets`' own. Only text going out takes
the short way: without compression a server frame is a header of two to ten bytes before the payload, and all
frames that wait go out in one write. Applications find both ways as an extension of their scope.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.protocol import State

EXTENSION = "keystroke.frames"


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

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        app: ASGIApp = self.app

        async def with_abort(scope: Scope, receive: Receive, send: Send) -> None:
            scope.setdefault("extensions", {})[EXTENSION] = {"abort": transport.abort}
            await app(scope, receive, send)

        self.app = with_abort


class FrameProtocol(WebSocketsSansIOProtocol):
    """Offers the application, as an extension of its scope, `write(payloads)`: frames out at once, or False
    where the client is behind or gone and the application must wait with `send` as usual."""

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

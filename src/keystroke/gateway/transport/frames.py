"""The WebSocket protocol class uvicorn runs for us: the shipped sans-I/O one with a short way out.

Law: the handshake, reading, pings and closing are uvicorn's and `websockets`' own. Only text going out takes
the short way: without compression a server frame is a header of two to ten bytes before the payload, and all
frames that wait go out in one write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


class FrameProtocol(WebSocketsSansIOProtocol):
    """Offers the application, as an extension of its scope, `write(payloads)`: frames out at once, or False
    where the client is behind or gone and the application must wait with `send` as usual."""

    def handle_connect(self, event: Any) -> None:
        super().handle_connect(event)
        if hasattr(self, "scope"):
            self.scope["extensions"][EXTENSION] = {"write": self.write_frames}

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

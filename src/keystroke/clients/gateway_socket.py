"""One WebSocket connection to a gateway: received frames go to a callback, sent frames are written at once.

Handles the handshake and control frames. `on_lost` is called exactly once with the reason when the connection
ends, unless the owner closed it. The content of frames is not interpreted here.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable
from typing import Any, cast

import msgspec
from websockets.client import ClientProtocol
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.uri import parse_uri

from keystroke.errors import (
    AccessError,
    Forbidden,
    KeystrokeError,
    Unauthorized,
    Unavailable,
    UsageError,
)

MAX_FRAME = 256 << 20  # bytes
_NO_UPGRADE = (400, 404, 405, 406, 410, 426, 501)  # statuses of servers and proxies without WebSockets


class WebSocketRefused(AccessError):
    """The server or a proxy answers HTTP but opens no WebSocket."""


class HandshakeFailed(Unavailable):
    """The connection was opened, but the handshake got no answer."""


def websocket_url(url: str, path: str) -> str:
    """The WebSocket URL of `path` on the server at `url` (http or https). Raises UsageError."""
    base = url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise UsageError(f"{url:.100} is not the address of a server; write it like http://127.0.0.1:8012.")
    return f"ws{base.removeprefix('http')}{path}"


class GatewayConnection:
    """The address of a server, and the socket to it while there is one."""

    def __init__(self, url: str, path: str, api_key: str | None, tls: ssl.SSLContext | None) -> None:
        self._base = url
        self._url = websocket_url(url, path)
        self._api_key = api_key or os.environ.get("KEYSTROKE_API_KEY") or None
        self._tls = tls
        self._socket: GatewaySocket | None = None
        self._reconnecting: asyncio.Task[None] | None = None
        self._closed = False

    async def _open_socket(self) -> GatewaySocket:
        socket = GatewaySocket(self._url, self._api_key, self._on_frame, self._on_lost)
        await socket.connect(self._tls)
        self._socket = socket
        return socket

    def _disconnect(self) -> None:
        """Close the socket for good."""
        self._closed = True
        if self._reconnecting is not None:
            self._reconnecting.cancel()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _on_frame(self, frame: bytes) -> None:
        raise NotImplementedError

    def _on_lost(self, error: KeystrokeError) -> None:
        raise NotImplementedError


class GatewaySocket(asyncio.Protocol):
    def __init__(
        self,
        url: str,
        api_key: str | None,
        on_frame: Callable[[bytes], None],
        on_lost: Callable[[KeystrokeError], None],
    ) -> None:
        self._uri = parse_uri(url)
        self._protocol = ClientProtocol(self._uri, max_size=MAX_FRAME)
        self._api_key = api_key
        self._on_frame, self._on_lost = on_frame, on_lost
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._parts: list[bytes] = []
        self._closed = False

    async def connect(self, context: ssl.SSLContext | None = None, timeout_s: float = 10.0) -> None:
        """Connect and complete the handshake. Raises Unavailable, Unauthorized or Forbidden."""
        uri = self._uri
        tls = (context or ssl.create_default_context()) if uri.secure else None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                await loop.create_connection(lambda: self, uri.host, uri.port, ssl=tls)
                await self._opened
        except TimeoutError:
            self.abort()
            kind = Unavailable if self._transport is None else HandshakeFailed
            raise kind(f"{uri.host}:{uri.port} did not answer within {timeout_s:g} s.") from None
        except OSError as error:
            raise Unavailable(
                f"No server answers at {uri.host}:{uri.port} ({error.strerror or error}); "
                "start one with `keystroke serve`."
            ) from None

    def send(self, text: str | bytes) -> None:
        """Write one text frame. Raises Unavailable once the connection is over."""
        if self._closed or self._transport is None:
            raise Unavailable("The connection is closed.")
        self._protocol.send_text(text.encode() if isinstance(text, str) else text)
        self._flush()

    def close(self) -> None:
        """Send a close frame and disconnect; `on_lost` is not called."""
        if not self._closed and self._transport is not None:
            self._closed = True
            try:
                self._protocol.send_close(1000)
                self._flush()
            except WebSocketException:
                pass
            self._transport.close()

    def abort(self) -> None:
        """Drop the connection without a close frame."""
        self._closed = True
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        request = self._protocol.connect()
        if self._api_key:
            request.headers["Authorization"] = f"Bearer {self._api_key}"
        self._protocol.send_request(request)
        self._flush()

    def data_received(self, data: bytes) -> None:
        self._protocol.receive_data(data)
        for event in self._protocol.events_received():
            if isinstance(event, Frame):
                self._on_data_frame(event)
            elif isinstance(event, Response):
                self._on_handshake(event)
        self._flush()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._opened.done():
            why = "The server closed the connection during the handshake."
            self._opened.set_exception(HandshakeFailed(why))
        if not self._closed:
            self._closed = True
            close = self._protocol.close_rcvd
            reason = f" ({close.reason})" if close is not None and close.reason else ""
            self._on_lost(Unavailable(f"The connection to the server was lost{reason}."))

    def _on_handshake(self, response: Response) -> None:
        if self._opened.done():
            return
        failure = self._protocol.handshake_exc
        if failure is None:
            self._opened.set_result(None)
            return
        self._closed = True
        self._opened.set_exception(_handshake_error(failure, response))

    def _on_data_frame(self, frame: Frame) -> None:
        if frame.opcode in (Opcode.TEXT, Opcode.CONT):
            if frame.fin and not self._parts:
                self._on_frame(bytes(frame.data))
                return
            self._parts.append(bytes(frame.data))
            if frame.fin:
                message, self._parts = b"".join(self._parts), []
                self._on_frame(message)

    def _flush(self) -> None:
        assert self._transport is not None
        for data in self._protocol.data_to_send():
            if data:
                self._transport.write(data)
            else:
                self._transport.close()  # the protocol marks the end of the stream with empty data


def _handshake_error(failure: Exception, response: Response) -> KeystrokeError:
    if not isinstance(failure, InvalidStatus):
        return WebSocketRefused(f"The server does not speak WebSocket ({failure}).")
    message = _message(response.body)
    if response.status_code == 401:
        return Unauthorized(message or "The server needs a key.")
    if response.status_code == 403:
        return Forbidden(message or "The server refused the connection.")
    kind: type[KeystrokeError] = AccessError
    if response.status_code in _NO_UPGRADE or response.status_code < 400:
        kind = WebSocketRefused
    elif response.status_code >= 500 or response.status_code == 429:
        kind = Unavailable
    return kind(message or f"The server refused the connection with status {response.status_code}.")


def _message(body: bytes | bytearray | None) -> str:
    try:
        decoded: Any = msgspec.json.decode(body or b"")
        return str(decoded["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return ""

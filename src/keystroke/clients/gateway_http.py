"""A blocking HTTP client for a gateway: plain requests and one stream at a time.

Uses only the standard library, so that a command that needs a running gateway starts quickly. Closing the
connection, from any thread, stops an answer. The server's errors are raised as their own classes; a
connection that fails or breaks raises GatewayGone.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec

from keystroke.clients.gateway_address import GatewayAddress
from keystroke.errors import EngineError, KeystrokeError, ProtocolError, RateLimited, Unavailable
from keystroke.protocol.chat import ChatChunk, TextCompletion
from keystroke.protocol.response import ErrorBody, ErrorDetail
from keystroke.protocol.status import GatewayStatus, LoadStep, ModelStatus, WaitingNotice

Event = ChatChunk | TextCompletion

_CONNECT_TIMEOUT = 5.0  # seconds
_READ_TIMEOUT = 60.0  # seconds without data; the gateway sends progress every quarter of a second
_DONE = b"[DONE]"


class GatewayGone(Unavailable):
    """The gateway cannot be reached, or the connection broke."""

    code = "gateway_gone"


class GatewayHttp:
    def __init__(self, address: GatewayAddress) -> None:
        self._url = urlsplit(address.url)
        self._headers = {"Content-Type": "application/json", "X-Keystroke-Progress": "1"}
        if address.token:
            self._headers["Authorization"] = f"Bearer {address.token}"

    def status(self) -> GatewayStatus:
        """The models the gateway has loaded. Raises GatewayGone."""
        with self._request("GET", "/v1/status", None) as (_, answer), _transport_errors():
            return msgspec.json.decode(answer.read(), type=GatewayStatus)

    def load(self, model: str, on_progress: Callable[[str, int, int], None]) -> ModelStatus:
        """Load `model`, reporting progress to `on_progress`. Raises GatewayGone, or what loading raised."""
        with self._request("POST", "/v1/models/load", {"model": model}) as (_, answer):
            while line := _line(answer):
                step = msgspec.json.decode(line, type=LoadStep)
                if step.state == "ready" and step.model is not None:
                    return step.model
                if step.state == "failed" and step.error is not None:
                    raise error_from_detail(step.error, step.status)
                on_progress(step.what, step.done, step.total)
        raise GatewayGone("The gateway ended while it loaded the model; run the command again.")

    @contextlib.contextmanager
    def stream(self, path: str, body: dict[str, Any], kind: type[Event]) -> Iterator[SseStream]:
        """The events of one answer. Leaving the block stops the answer."""
        with self._request("POST", path, {**body, "stream": True}) as (connection, answer):
            yield SseStream(connection, answer, kind)

    @contextlib.contextmanager
    def _request(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> Iterator[tuple[http.client.HTTPConnection, http.client.HTTPResponse]]:
        connection = http.client.HTTPConnection(
            self._url.hostname or "", self._url.port, timeout=_CONNECT_TIMEOUT
        )
        try:
            with _transport_errors():
                connection.connect()
                connection.sock.settimeout(_READ_TIMEOUT)
                data = None if body is None else msgspec.json.encode(body)
                connection.request(method, path, data, self._headers)
                answer = connection.getresponse()
                if answer.status != 200:
                    raise error_from_body(answer.read(), answer.status)
            yield connection, answer
        finally:
            connection.close()


class SseStream(Iterator[Event | WaitingNotice]):
    """Iterate for events and progress; `close` ends the stream and may be called from any thread."""

    def __init__(
        self, connection: http.client.HTTPConnection, answer: http.client.HTTPResponse, kind: type[Event]
    ) -> None:
        self._connection, self._answer = connection, answer
        self._decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(kind)
        self.closed = False

    def __next__(self) -> Event | WaitingNotice:
        while True:
            line = _line(self._answer, quiet=lambda: self.closed)
            if self.closed:
                raise StopIteration
            if not line:
                raise GatewayGone("The gateway ended during the answer; run the command again.")
            if line.startswith(b": "):
                return msgspec.json.decode(line[2:], type=WaitingNotice)
            if not line.startswith(b"data: "):
                continue
            data = line[6:].strip()
            if data == _DONE:
                raise StopIteration
            if data.startswith(b'{"error"'):
                raise error_from_detail(msgspec.json.decode(data, type=ErrorBody).error, 500)
            return self._decoder.decode(data)

    def close(self) -> None:
        self.closed = True
        with contextlib.suppress(OSError, AttributeError):
            self._connection.sock.shutdown(socket.SHUT_RDWR)


def _line(answer: http.client.HTTPResponse, quiet: Callable[[], bool] = lambda: False) -> bytes:
    """The next line; empty at the end, or if this side closed the connection (`quiet` returns True)."""
    try:
        with _transport_errors():
            return answer.readline()
    except GatewayGone:
        if quiet():
            return b""
        raise
    except (ValueError, AttributeError):  # closed by another thread while reading
        return b""


@contextlib.contextmanager
def _transport_errors() -> Iterator[None]:
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        why = getattr(error, "strerror", None) or type(error).__name__
        raise GatewayGone(f"The gateway no longer answers ({why}); run the command again.") from None


def error_from_body(body: bytes, status: int) -> KeystrokeError:
    """The error in the body of a refused request."""
    try:
        return error_from_detail(msgspec.json.decode(body, type=ErrorBody).error, status)
    except msgspec.MsgspecError:
        return ProtocolError(f"The gateway answered {status} without a reason.")


def error_from_detail(detail: ErrorDetail, status: int) -> KeystrokeError:
    """An error of the class that has the detail's code, or of a general class for an unknown code."""
    kind = _error_classes().get(detail.code or "", EngineError if status >= 500 else KeystrokeError)
    if issubclass(kind, RateLimited):
        return kind(detail.message, retry_after=1.0, param=detail.param)
    return kind(detail.message, param=detail.param)


def _error_classes() -> dict[str, type[KeystrokeError]]:
    classes: dict[str, type[KeystrokeError]] = {}
    pending: list[type[KeystrokeError]] = [KeystrokeError]
    while pending:
        kind = pending.pop()
        classes.setdefault(kind.code, kind)
        pending += kind.__subclasses__()
    return classes

"""A gateway asked by a program without an event loop: plain requests and one stream at a time.

Speaks the protocol's types over HTTP with the standard library alone, so a command that asks a warm
gateway starts in no time. An answer is stopped by closing its connection, from any thread. What the server
refuses is raised as the error it is; a server that went away is Gone.
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

_CONNECT = 5.0  # seconds to reach a process of this machine
_SILENCE = 60.0  # seconds without a sign of life; signs come every quarter of a second
_DONE = b"[DONE]"


class GatewayGone(Unavailable):
    """The gateway cannot be reached, or went away in the middle."""

    code = "gateway_gone"


class GatewayHttp:
    def __init__(self, place: GatewayAddress) -> None:
        self._where = urlsplit(place.url)
        self._headers = {"Content-Type": "application/json", "X-Keystroke-Progress": "1"}
        if place.token:
            self._headers["Authorization"] = f"Bearer {place.token}"

    def status(self) -> GatewayStatus:
        """What the gateway has loaded. Raises Gone."""
        with self._asked("GET", "/v1/status", None) as (_, answer):
            return msgspec.json.decode(_body(answer), type=GatewayStatus)

    def load(self, model: str, on_progress: Callable[[str, int, int], None]) -> ModelStatus:
        """Have `model` loaded, telling `watch` how far that has come. Raises Gone, or what loading raised."""
        with self._asked("POST", "/v1/models/load", {"model": model}) as (_, answer):
            while line := _line(answer):
                step = msgspec.json.decode(line, type=LoadStep)
                if step.state == "ready" and step.model is not None:
                    return step.model
                if step.state == "failed" and step.error is not None:
                    raise error_from_detail(step.error, step.status)
                on_progress(step.what, step.done, step.total)
        raise GatewayGone("The gateway went away while it loaded the model; run the command again.")

    @contextlib.contextmanager
    def stream(self, path: str, body: dict[str, Any], kind: type[Event]) -> Iterator[SseStream]:
        """The events of one answer. Leaving the block ends the answer."""
        with self._asked("POST", path, {**body, "stream": True}) as (connection, answer):
            yield SseStream(connection, answer, kind)

    @contextlib.contextmanager
    def _asked(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> Iterator[tuple[http.client.HTTPConnection, http.client.HTTPResponse]]:
        connection = http.client.HTTPConnection(
            self._where.hostname or "", self._where.port, timeout=_CONNECT
        )
        try:
            with _reached():
                connection.connect()
                connection.sock.settimeout(_SILENCE)
                data = None if body is None else msgspec.json.encode(body)
                connection.request(method, path, data, self._headers)
                answer = connection.getresponse()
                if answer.status != 200:
                    raise _refused(answer)
            yield connection, answer
        finally:
            connection.close()


class SseStream(Iterator[Event | WaitingNotice]):
    """Iterate for events and signs of life; `close` may be called from any thread and ends it."""

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
                raise GatewayGone("The gateway went away in the middle of the answer; run the command again.")
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
    """The next line; empty at the end, or where the connection was closed here (`quiet`)."""
    try:
        with _reached():
            return answer.readline()
    except GatewayGone:
        if quiet():
            return b""
        raise
    except (ValueError, AttributeError):  # closed under the reader's feet
        return b""


@contextlib.contextmanager
def _reached() -> Iterator[None]:
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        why = getattr(error, "strerror", None) or type(error).__name__
        raise GatewayGone(f"The gateway does not answer any more ({why}); run the command again.") from None


def _body(answer: http.client.HTTPResponse) -> bytes:
    with _reached():
        return answer.read()


def _refused(answer: http.client.HTTPResponse) -> KeystrokeError:
    try:
        return error_from_detail(msgspec.json.decode(answer.read(), type=ErrorBody).error, answer.status)
    except msgspec.MsgspecError:
        return ProtocolError(f"The gateway answered {answer.status} without saying why.")


def error_from_detail(detail: ErrorDetail, status: int) -> KeystrokeError:
    """The error that a server's words stand for: of the kind that has its code, where that is known."""
    kind = _kinds().get(detail.code or "", EngineError if status >= 500 else KeystrokeError)
    if issubclass(kind, RateLimited):
        return kind(detail.message, retry_after=1.0, param=detail.param)
    return kind(detail.message, param=detail.param)


def _kinds() -> dict[str, type[KeystrokeError]]:
    found: dict[str, type[KeystrokeError]] = {}
    waiting: list[type[KeystrokeError]] = [KeystrokeError]
    while waiting:
        kind = waiting.pop()
        found.setdefault(kind.code, kind)
        waiting += kind.__subclasses__()
    return found

"""State of one WebSocket connection: its streams, their order and limits, and the last turn of each.

Sans-I/O: frames and ends of responses go in; actions come out (start, steer, cancel, send an event), which
the owner of the socket carries out. A finished turn is an opaque value here.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET

from keystroke.errors import Interrupted, KeystrokeError, QueueFull
from keystroke.protocol import codec, events
from keystroke.protocol.faults import InvalidStreamId, StreamLimitReached, error_detail
from keystroke.protocol.requests import ResponseCancel, ResponseCreate, ResponseResume, ResponseSteer

STREAM_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


@dataclass(frozen=True, slots=True)
class StartResponse:
    """Start this response now. It occupies `stream` until `end_response(stream)`."""

    request: ResponseCreate
    stream: str


@dataclass(frozen=True, slots=True)
class CancelResponse:
    """Stop this response; None: every response of the connection."""

    response_id: str | None


@dataclass(frozen=True, slots=True)
class ResumeResponse:
    """Resume this response. It occupies `stream` until `end_response(stream)`."""

    request: ResponseResume
    stream: str


@dataclass(frozen=True, slots=True)
class SendEvent:
    event: events.Event


Action = StartResponse | ResponseSteer | CancelResponse | ResumeResponse | SendEvent


@dataclass(slots=True)
class StreamQueue:
    """A FIFO of requests of which at most one runs, and the turn it finished last."""

    busy: bool = False
    waiting: deque[ResponseCreate] = field(default_factory=deque)
    latest: tuple[str, Any] | None = None

    @property
    def idle(self) -> bool:
        return not self.busy and not self.waiting


@dataclass(frozen=True, slots=True)
class SessionLimits:
    in_flight: int = 16  # responses at once on one connection; more wait
    streams: int = 32  # stream ids a connection may name
    waiting: int = 64  # requests that may wait on one connection


class ConnectionSession:
    def __init__(self, limits: SessionLimits | None = None) -> None:
        self.limits = limits or SessionLimits()
        self._streams: dict[str, StreamQueue] = {"": StreamQueue()}
        self._running = 0
        self._detached = 0

    def handle_frame(self, frame: str | bytes) -> list[Action]:
        """Handle one frame from the client. An invalid frame yields an error event; the connection stays
        open."""
        request: ResponseCreate | ResponseResume | None = None
        try:
            event = codec.decode_client_event(frame)
            if isinstance(event, ResponseSteer):
                return [event]
            if isinstance(event, ResponseCancel):
                return self._cancel(event)
            request = event
            return self._create(event) if isinstance(event, ResponseCreate) else self._resume(event)
        except KeystrokeError as error:
            return [SendEvent(error_event(error, request.stream_id if request is not None else None))]

    def end_response(self, stream: str, response_id: str | None, turn: Any) -> list[Action]:
        """Mark the response on `stream` as ended. `turn` is what a continuation needs; None (it failed)
        forgets the stream's last turn, so that the client has to send its full input again."""
        state = self._streams[stream]
        state.busy = False
        self._running -= 1
        if response_id is not None:
            state.latest = None if turn is None else (response_id, turn)
        return self._start_waiting()

    def find_turn(self, response_id: str) -> Any | None:
        """The turn of a response that is the last one of some stream of this connection."""
        latest = filter(None, (state.latest for state in self._streams.values()))
        return next((turn for known, turn in latest if known == response_id), None)

    def forget_turn(self, response_id: str) -> None:
        for state in self._streams.values():
            if state.latest is not None and state.latest[0] == response_id:
                state.latest = None

    @property
    def waiting(self) -> int:
        return sum(len(state.waiting) for state in self._streams.values())

    def _create(self, request: ResponseCreate) -> list[Action]:
        state = self._streams[self._stream_of(request)]
        if self.waiting >= self.limits.waiting:
            raise QueueFull(
                f"{self.waiting} requests already wait on this connection; wait for one to end.",
                retry_after=1.0,
            )
        state.waiting.append(request)
        return self._start_waiting()

    def _resume(self, request: ResponseResume) -> list[Action]:
        name = self._stream_of(request)
        state = self._streams[name]
        if not state.idle:
            raise InvalidStreamId(
                "Another response runs on this stream; resume before anything else.", param="stream_id"
            )
        state.busy = True
        self._running += 1
        return [ResumeResponse(request, name)]

    def _stream_of(self, request: ResponseCreate | ResponseResume) -> str:
        stream_id = request.stream_id
        if stream_id is None and isinstance(request, ResponseCreate) and request.background:
            # Background work gets a stream of its own, so that later turns do not wait for it.
            self._detached += 1
            stream_id = request.stream_id = f"background_{self._detached}"
        if stream_id is None:
            return ""
        if not STREAM_ID.fullmatch(stream_id):
            raise InvalidStreamId(
                "stream_id must be 1 to 64 letters, digits, '.', ':', '_' or '-'.", param="stream_id"
            )
        if stream_id not in self._streams:
            if len(self._streams) > self.limits.streams:
                idle = next(
                    (n for n, s in self._streams.items() if n.startswith("background_") and s.idle), None
                )
                if idle is None:
                    raise StreamLimitReached(
                        f"This connection already uses {self.limits.streams} streams; reuse one of them.",
                        param="stream_id",
                    )
                del self._streams[idle]
            self._streams[stream_id] = StreamQueue()
        return stream_id

    def _start_waiting(self) -> list[Action]:
        started: list[Action] = []
        for name, state in self._streams.items():
            if self._running >= self.limits.in_flight:
                break
            if state.waiting and not state.busy:
                state.busy = True
                self._running += 1
                started.append(StartResponse(state.waiting.popleft(), name))
        return started

    def _cancel(self, request: ResponseCancel) -> list[Action]:
        if request.response_id is not None:
            return [CancelResponse(request.response_id)]
        dropped: list[Action] = []
        for state in self._streams.values():
            for waiting in state.waiting:
                error = Interrupted("The request was cancelled before it began.")
                dropped.append(SendEvent(error_event(error, waiting.stream_id)))
            state.waiting.clear()
        return [*dropped, CancelResponse(None)]


def error_event(
    error: KeystrokeError, stream_id: str | None = None, headers: dict[str, str] | None = None
) -> events.ErrorEvent:
    return events.ErrorEvent(
        status=error.status,
        error=error_detail(error),
        stream_id=UNSET if stream_id is None else stream_id,
        headers=UNSET if headers is None else headers,
    )

"""HTTP bodies and server-sent events.

A request body is bounded before it is decoded. A client that hangs up stops its answer within one step,
streamed or not. JSON is written by the codec alone.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from secrets import token_hex
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.types import Receive, Scope, Send

from keystroke.errors import Interrupted, KeystrokeError, RateLimited
from keystroke.gateway.transport.frames import EXTENSION
from keystroke.gateway.transport.outbox import Outbox
from keystroke.protocol.codec import SSE_DONE, encode, encode_comment, encode_data, encode_line, encode_sse
from keystroke.protocol.faults import RequestTooLarge, SlowClient, error_detail
from keystroke.protocol.messages import MessagesPing, messages_error
from keystroke.protocol.ollama import OllamaError
from keystroke.protocol.response import ErrorBody
from keystroke.protocol.status import WaitingNotice

log = logging.getLogger("keystroke.http")

Result = TypeVar("Result")
JSON = "application/json"
PROGRESS = "x-keystroke-progress"  # header that requests progress comments before the first token
PROGRESS_INTERVAL = 0.25  # seconds
PING_INTERVAL = 5.0  # seconds; clients of the Messages API give up on a stream that is silent for long
STALL_TIMEOUT = 30.0  # seconds a client may read nothing while an answer waits for it


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> HttpResponse:
    return HttpResponse(encode(body), status, dict(headers or {}), JSON)


def text_response(body: Any, *, stream: bool) -> HttpResponse:
    """A whole text completion, as one body or as the one event of a stream."""
    if not stream:
        return json_response(body)
    return HttpResponse(encode_data(body) + SSE_DONE, 200, {"cache-control": "no-store"}, "text/event-stream")


def error_response(error: KeystrokeError, path: str = "") -> HttpResponse:
    """The error in the shape of the API that `path` belongs to."""
    headers = {}
    if isinstance(error, RateLimited):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
        headers["retry-after-ms"] = str(max(1, math.ceil(error.retry_after * 1000)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    body: Any = ErrorBody(error_detail(error))
    if path.startswith("/v1/messages"):
        headers["request-id"] = request_id = new_request_id()
        body = messages_error(error, request_id)
    elif path.startswith("/api/"):
        body = OllamaError(error.message)
    return json_response(body, error.status, headers)


def new_request_id() -> str:
    return f"req_{token_hex(12)}"


async def read_body(request: Request, limit: int) -> bytes:
    """The body, refused as soon as it is known to be too large."""
    too_large = RequestTooLarge(f"The body is larger than {limit:,} bytes; send less.")
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise too_large
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise too_large
        parts.append(part)
    return b"".join(parts)


async def wait_or_cancel(
    request: Request, over: asyncio.Event, cancel: Callable[[KeystrokeError], object]
) -> None:
    """Wait until `over` is set; call `cancel` first if the client hangs up."""
    disconnected = asyncio.create_task(_wait_for_disconnect(request.receive))
    done = asyncio.create_task(over.wait())
    try:
        await asyncio.wait({disconnected, done}, return_when=asyncio.FIRST_COMPLETED)
        if not over.is_set():
            cancel(Interrupted("The client went away."))
            await over.wait()
    finally:
        disconnected.cancel()
        done.cancel()


async def run_or_cancel(request: Request, work: Awaitable[Result]) -> Result:
    """Await `work`, cancelled if the client hangs up. Raises what it raises."""
    task, over = asyncio.ensure_future(work), asyncio.Event()
    task.add_done_callback(lambda _task: over.set())
    await asyncio.sleep(0)  # most calls end here: no need to listen for a hang-up
    if not task.done():
        await wait_or_cancel(request, over, lambda _reason: task.cancel())
    if task.cancelled():
        raise Interrupted("The client went away.")
    return task.result()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class StreamedRun(Protocol):
    """An answer whose messages an `EventStream` writes."""

    work: Any  # its Work; None until it is queued

    def pause(self) -> None:
        """The reader is far behind: generate nothing more until `resume`."""

    def resume(self) -> None:
        """The reader has caught up."""

    def disconnect(self, sink: Callable[[list[Any]], None], reason: KeystrokeError) -> None:
        """The reader is gone: stop the answer, unless it may continue without one."""


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """How an API writes the messages of a stream, its end, and the notices before the first token."""

    encode: Callable[[Any], bytes]
    end: bytes = b""
    notice: Callable[[Any], bytes] = encode_comment
    media_type: str = "text/event-stream"


_PING = encode_sse(MessagesPing())  # type: ignore[arg-type]
RESPONSES = StreamFormat(encode_sse)
CHAT = StreamFormat(encode_data, SSE_DONE)
MESSAGES = StreamFormat(encode_sse, notice=lambda _notice: _PING)
OLLAMA = StreamFormat(encode_line, media_type="application/x-ndjson")


class EventStream(HttpResponse):
    """The messages of one answer as a stream. `progress`: until the first token a notice every so many
    seconds reports how far the prompt has been read."""

    def __init__(self, form: StreamFormat, *, progress: float | None = None) -> None:
        super().__init__(media_type=form.media_type)
        self._form = form
        self._progress = progress
        self._outbox = Outbox(self._pause, self._resume)
        self._writing_since = 0.0
        self._abort: Callable[[], None] = lambda: None
        self._run: StreamedRun | None = None

    def attach(self, run: StreamedRun, headers: Mapping[str, str]) -> None:
        """Set the run whose messages go to `sink`, and more headers."""
        self._run = run
        self.headers.update(headers)

    def sink(self, messages: list[Any]) -> None:
        self._outbox.put(self._run.work if self._run is not None else None, messages)
        if self._outbox.paused:
            self._pause()

    def finish(self) -> None:
        self._outbox.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(k, v) for k, v in self.raw_headers if k != b"content-length"] + [
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]
        self._abort = scope.get("extensions", {}).get(EXTENSION, {}).get("abort", self._abort)
        watchers = [self._watch_disconnect(receive), self._watch_stall()]
        if self._progress is not None:
            watchers.append(self._report_progress(self._progress))
        tasks = [asyncio.create_task(watcher) for watcher in watchers]
        clock = time.perf_counter
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while (batch := await self._outbox.next_batch()) is not None:
                body = b"".join([self._encode(message) for _, message in batch])
                began = self._writing_since = clock()
                await send({"type": "http.response.body", "body": body, "more_body": True})
                self._writing_since = 0.0
                owner = batch[0][0]
                if owner is not None:
                    owner.network_seconds += clock() - began
                self._outbox.mark_written()
            await send({"type": "http.response.body", "body": self._form.end})
        finally:
            for task in tasks:
                task.cancel()
            self._disconnect(Interrupted("The client went away."))

    def _encode(self, message: Any) -> bytes:
        return self._form.notice(message) if type(message) is WaitingNotice else self._form.encode(message)

    async def _report_progress(self, interval: float) -> None:
        assert self._run is not None
        ticket = self._run.work.ticket
        while True:
            await asyncio.sleep(interval)
            if ticket.timing.first or ticket.done:
                return
            read = ticket.read() if ticket.timing.started else 0
            prompt = ticket.job.input_tokens
            self._outbox.put(None, [WaitingNotice(position=ticket.position, read=read, prompt=prompt)])

    async def _watch_disconnect(self, receive: Receive) -> None:
        await _wait_for_disconnect(receive)
        self._disconnect(Interrupted("The client went away."))

    async def _watch_stall(self) -> None:
        while True:
            await asyncio.sleep(STALL_TIMEOUT / 8)  # in time before WireLimits.stall, which logs nothing
            if self._writing_since and time.perf_counter() - self._writing_since > STALL_TIMEOUT:
                why = f"The client read nothing for {STALL_TIMEOUT:.0f} s."
                log.warning("a client was dropped: %s", why)
                self._disconnect(SlowClient(why))
                self._abort()
                return

    def _disconnect(self, reason: KeystrokeError) -> None:
        self._outbox.close(gone=True)
        if self._run is not None:
            self._run.disconnect(self.sink, reason)

    def _pause(self) -> None:
        if self._run is not None:
            self._run.pause()

    def _resume(self) -> None:
        if self._run is not None:
            self._run.resume()

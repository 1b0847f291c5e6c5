"""The HTTP side: plain bodies and server-sent events.

Reads a bounded body, finds out who asks, hands a typed request on, and writes what comes back. A client
that hangs up stops its answer within one step, streamed or not. JSON exists only through the codec.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.types import Receive, Scope, Send

from keystroke.errors import Interrupted, KeystrokeError, RateLimited
from keystroke.gateway.transport.frames import EXTENSION
from keystroke.gateway.transport.outbox import Outbox
from keystroke.protocol.codec import SSE_DONE, encode, encode_comment, encode_data, encode_sse
from keystroke.protocol.faults import SlowClient, TooLarge, detail
from keystroke.protocol.response import ErrorBody
from keystroke.protocol.status import Waiting

Made = TypeVar("Made")
JSON = "application/json"
PROGRESS = "x-keystroke-progress"  # the header by which a client asks for signs of life before the first word
SIGN = 0.25  # seconds between them
PATIENCE = 30.0  # seconds a client may read nothing while an answer waits for it


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> HttpResponse:
    return HttpResponse(encode(body), status, dict(headers or {}), JSON)


def text_response(body: Any, *, stream: bool) -> HttpResponse:
    """A whole text completion, as one body or as the one event of a stream."""
    if not stream:
        return json_response(body)
    return HttpResponse(encode_data(body) + SSE_DONE, 200, {"cache-control": "no-store"}, "text/event-stream")


def error_response(error: KeystrokeError) -> HttpResponse:
    headers = {}
    if isinstance(error, RateLimited):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
        headers["retry-after-ms"] = str(max(1, math.ceil(error.retry_after * 1000)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response(ErrorBody(detail(error)), error.status, headers)


async def read_body(request: Request, limit: int) -> bytes:
    """The body, refused as soon as it is known to be too large."""
    too_large = TooLarge(f"The body is larger than {limit:,} bytes; send less.")
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


class Answering:
    """A request whose answer is awaited whole: the client hanging up cancels it."""

    def __init__(self, request: Request) -> None:
        self._request = request

    async def until(self, over: asyncio.Event, cancel: Callable[[KeystrokeError], None]) -> None:
        gone = asyncio.create_task(self._gone())
        done = asyncio.create_task(over.wait())
        try:
            await asyncio.wait({gone, done}, return_when=asyncio.FIRST_COMPLETED)
            if not over.is_set():
                cancel(Interrupted("The client went away."))
                await over.wait()
        finally:
            gone.cancel()
            done.cancel()

    async def whole(self, making: Coroutine[Any, Any, Made]) -> Made:
        """What `making` makes; the client hanging up cancels it. Raises what it raises."""
        task, over = asyncio.ensure_future(making), asyncio.Event()
        task.add_done_callback(lambda _task: over.set())
        await asyncio.sleep(0)  # most prompts are none of these: no need to listen for a hang-up

        def stop(_reason: KeystrokeError) -> None:
            task.cancel()

        if not task.done():
            await self.until(over, stop)
        if task.cancelled():
            raise Interrupted("The client went away.")
        return task.result()

    async def _gone(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass


class EventStream(HttpResponse):
    """Server-sent events of one answer. `named` writes `event:` lines (Responses); otherwise data lines
    that end with [DONE] (chat, completions). `progress`: comments tell how far it is from its first word."""

    def __init__(
        self, *, named: bool, headers: Mapping[str, str] | None = None, progress: bool = False
    ) -> None:
        super().__init__(headers=dict(headers or {}), media_type="text/event-stream")
        self._encode_event: Callable[[Any], bytes] = encode_sse if named else encode_data
        self._named = named
        self._progress = progress
        self._outbox = Outbox(self._pause, self._resume)
        self._writing_since = 0.0
        self._abort: Callable[[], None] = lambda: None
        self.run: Any = None  # set by whoever makes the answer
        self.detached = False  # a background answer outlives its reader

    def sink(self, messages: list[Any]) -> None:
        work = self.run.answer.work if self.run is not None and self.run.answer is not None else None
        self._outbox.put(work, messages)
        if self._outbox.paused and work is not None:
            work.ticket.pause()

    def finish(self) -> None:
        self._outbox.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(k, v) for k, v in self.raw_headers if k != b"content-length"] + [
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]
        self._abort = scope.get("extensions", {}).get(EXTENSION, {}).get("abort", self._abort)
        watch = asyncio.create_task(self._watch(receive))
        signs = asyncio.create_task(self._signs_of_life()) if self._progress else None
        clock = time.perf_counter
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while (batch := await self._outbox.take()) is not None:
                body = b"".join([self._encode(message) for _, message in batch])
                began = self._writing_since = clock()
                await send({"type": "http.response.body", "body": body, "more_body": True})
                self._writing_since = 0.0
                owner = batch[0][0]
                if owner is not None:
                    owner.network_seconds += clock() - began
                self._outbox.written()
            await send({"type": "http.response.body", "body": b"" if self._named else SSE_DONE})
        finally:
            watch.cancel()
            if signs is not None:
                signs.cancel()
            self._leave(Interrupted("The client went away."))

    def _encode(self, message: Any) -> bytes:
        return encode_comment(message) if type(message) is Waiting else self._encode_event(message)

    async def _signs_of_life(self) -> None:
        """Until its first word, tell how far the answer is from it."""
        while True:
            await asyncio.sleep(SIGN)
            ticket = self.run.answer.work.ticket
            if ticket.timing.first or ticket.done:
                return
            read = ticket.read() if ticket.timing.started else 0
            prompt = ticket.job.input_tokens
            self._outbox.put(None, [Waiting(position=ticket.position, read=read, prompt=prompt)])

    async def _watch(self, receive: Receive) -> None:
        """Notice the client hanging up, and one that reads nothing."""
        stalled = asyncio.create_task(self._stalled())
        try:
            while (await receive())["type"] != "http.disconnect":
                pass
            self._leave(Interrupted("The client went away."))
        finally:
            stalled.cancel()

    async def _stalled(self) -> None:
        while True:
            await asyncio.sleep(PATIENCE / 4)
            if self._writing_since and time.perf_counter() - self._writing_since > PATIENCE:
                self._leave(SlowClient(f"The client read nothing for {PATIENCE:.0f} s."))
                self._abort()
                return

    def _leave(self, reason: KeystrokeError) -> None:
        self._outbox.close(gone=True)
        if self.run is not None:
            replay = getattr(self.run, "replay", None)
            if replay is not None:
                replay.let_go(self.sink)
            elif self.detached:
                self._resume()
            else:
                self.run.cancel(reason)

    def _pause(self) -> None:
        if self.run is not None and self.run.answer is not None:
            self.run.answer.work.ticket.pause()

    def _resume(self) -> None:
        if self.run is not None and self.run.answer is not None:
            self.run.answer.work.ticket.resume()

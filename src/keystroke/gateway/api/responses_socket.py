"""`/v1/responses` as a WebSocket: frames to actions, answers to frames.

Law: owns one socket and carries out what the sans-I/O session says. One reader, one writer, no task per
token. A client that goes away, with or without a close frame, stops its answers within one step;
background ones run on. Nothing a client sends ends the connection except closing it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from keystroke.errors import Interrupted, KeystrokeError, ProtocolError, RateLimited
from keystroke.gateway.access.keys import Caller
from keystroke.gateway.api.answer import Answer
from keystroke.gateway.api.prompts import Turn
from keystroke.gateway.api.response_run import ResponseRun, steer_failed
from keystroke.gateway.api.responses import Responses
from keystroke.gateway.transport.outbox import Outbox
from keystroke.protocol.codec import encode
from keystroke.protocol.faults import ConnectionLimitReached, ResponseNotFound, SlowClient, TooLarge, detail
from keystroke.protocol.requests import ResponseSteer
from keystroke.protocol.response import ErrorBody
from keystroke.protocol.session import Action, Cancel, ConnectionSession, Send, Start, Steer, error_event

log = logging.getLogger("keystroke.websocket")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
SendMessage = Callable[[Message], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class SocketLimits:
    max_frame_bytes: int = 16 << 20
    lifetime: float = 3600.0  # seconds; clients open the next one
    patience: float = 30.0  # seconds a client may read nothing while an answer waits for it


class Connection:
    def __init__(
        self,
        responses: Responses,
        caller: Caller,
        receive: Receive,
        send: SendMessage,
        limits: SocketLimits | None = None,
        *,
        write_now: Callable[[Sequence[bytes]], bool] | None = None,
    ) -> None:
        self._responses = responses
        self._caller = caller
        self._receive, self._send = receive, send
        self._write_now = write_now
        self._limits = limits or SocketLimits()
        self._session = ConnectionSession()
        self._runs: dict[str, ResponseRun] = {}
        self._outbox = Outbox(self._pause, self._resume)
        self._tasks: set[asyncio.Task[None]] = set()
        self._writing_since = 0.0
        self._closed = False

    async def serve(self) -> None:
        """Until the client goes or the connection's time is over."""
        await self._send({"type": "websocket.accept"})
        loop = asyncio.get_running_loop()
        writer = asyncio.create_task(self._write())
        expiry = loop.call_later(self._limits.lifetime, self._expire)
        watch = asyncio.create_task(self._watch())
        try:
            await self._read()
        finally:
            expiry.cancel()
            watch.cancel()
            self._leave()
            await asyncio.wait({writer}, timeout=1.0)
            writer.cancel()
            for task in tuple(self._tasks):
                task.cancel()

    # In

    async def _read(self) -> None:
        limit = self._limits.max_frame_bytes
        while True:
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                return
            frame = message.get("text")
            if frame is None:
                self._say([error_event(ProtocolError("Frames must be text; send one JSON event per frame."))])
            elif len(frame) > limit:
                large = TooLarge(f"The frame has {len(frame):,} characters; at most {limit:,} are read.")
                self._say([error_event(large)])
            else:
                self._act(self._session.receive(frame))

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Start):
                task = asyncio.create_task(self._start(action))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            elif isinstance(action, Send):
                self._say([action.event])
            elif isinstance(action, Steer):
                self._steer(action.request)
            else:
                self._cancel(action)

    async def _start(self, action: Start) -> None:
        request, stream = action.request, action.stream
        turns: list[tuple[str, Turn | None]] = []

        def done() -> None:
            response_id, turn = turns[-1] if turns else (None, None)
            for ended, _ in turns:
                self._runs.pop(ended, None)
            self._act(self._session.ended(stream, response_id, turn))

        run: ResponseRun | None = None

        def sink(messages: list[Any]) -> None:
            self._put(run.answer if run is not None else None, messages)
            if run is None or run.answer is None:
                return
            if run.id not in self._runs and not run.over.is_set():
                self._runs[run.id] = run  # a steered successor
            if self._outbox.paused:
                run.answer.ticket.pause()

        try:
            run = await self._responses.create(
                request, self._caller, sink, recall=self._session.recall, on_turn=turns.append, on_done=done
            )
        except KeystrokeError as error:
            headers = None
            if isinstance(error, RateLimited):
                headers = {"retry-after": str(max(1, round(error.retry_after)))}
            self._responses.service.metrics.rejected.labels(error.code).inc()
            self._say([error_event(error, request.stream_id, headers)])
            if request.previous_response_id is not None:
                self._session.forget(request.previous_response_id)
            self._act(self._session.ended(stream, None, None))
            return
        except Exception:
            log.exception("a request could not be started")
            failure = KeystrokeError("The server failed on this request; its log says how.")
            self._say([error_event(failure, request.stream_id)])
            self._act(self._session.ended(stream, None, None))
            return
        if not run.over.is_set():
            self._runs[run.id] = run
        if self._closed and not request.background:
            run.cancel()

    def _steer(self, request: ResponseSteer) -> None:
        wanted = request.previous_response_id
        run = self._runs.get(wanted)
        if run is not None and run.id == wanted and run.answer is not None and not run.answer.ended:
            try:
                self._say(run.steer(request.input))
                return
            except KeystrokeError as error:
                code, message = "invalid_input", error.message
                stream = run.stream_id
        else:
            stream = None
            if self._session.recall(wanted) is not None:
                code, message = "response_already_completed", "The response has ended; send response.create."
            else:
                code, message = "response_not_found", f"No response {wanted:.80} runs on this connection."
        self._say([steer_failed(wanted, request.input, code, message, None, 0, stream)])

    def _cancel(self, action: Cancel) -> None:
        wanted = action.response_id
        runs = [r for r in self._runs.values() if wanted is None or r.id == wanted]
        for run in runs:
            run.cancel()
        if wanted is not None and not runs:
            missing = ResponseNotFound(
                f"No response {wanted:.80} runs on this connection.", param="response_id"
            )
            self._say([error_event(missing)])

    # Out

    def _say(self, messages: list[Any]) -> None:
        self._put(None, messages)

    def _put(self, owner: Answer | None, messages: list[Any]) -> None:
        """Out at once where nothing waits and the socket takes it; else in order behind what waits."""
        if self._write_now is not None and self._outbox.idle and not self._closed:
            payloads = [encode(message) for message in messages]
            began = time.perf_counter()
            if self._write_now(payloads):
                if owner is not None:
                    owner.network_seconds += time.perf_counter() - began
                return
        self._outbox.put(owner, messages)

    async def _write(self) -> None:
        """The writer of a client that is behind."""
        outbox, clock = self._outbox, time.perf_counter
        try:
            while (batch := await outbox.take()) is not None:
                for owner, message in batch:
                    began = self._writing_since = clock()
                    await self._send({"type": "websocket.send", "text": encode(message).decode()})
                    if owner is not None:
                        owner.network_seconds += clock() - began
                self._writing_since = 0.0
                outbox.written()
        except Exception as error:  # the socket is gone; the reader sees it too
            log.debug("a socket could not be written: %s", type(error).__name__)
            self._leave()

    def _pause(self) -> None:
        for run in self._runs.values():
            if run.answer is not None:
                run.answer.ticket.pause()

    def _resume(self) -> None:
        for run in self._runs.values():
            if run.answer is not None:
                run.answer.ticket.resume()

    async def _watch(self) -> None:
        """Give up a client that reads nothing: its answers hold memory and places in the queue."""
        patience = self._limits.patience
        while True:
            await asyncio.sleep(patience / 4)
            since = self._writing_since
            if since and time.perf_counter() - since > patience:
                log.info("a client read nothing for %.0f s and was let go", patience)
                slow = SlowClient(f"The client read nothing for {patience:.0f} s.")
                for run in tuple(self._runs.values()):
                    run.cancel(slow)
                self._abort()
                return

    def _abort(self) -> None:
        """Drop the TCP connection: a close frame would wait behind what the client does not read."""
        transport = getattr(getattr(self._send, "__self__", None), "transport", None)
        if transport is not None:
            transport.abort()

    def _expire(self) -> None:
        minutes = round(self._limits.lifetime / 60)
        over = ConnectionLimitReached(f"A connection lives at most {minutes} minutes; open another.")
        self._say([error_event(over)])
        for run in tuple(self._runs.values()):
            if not run.request.background:
                run.cancel()
        task = asyncio.create_task(self._close_soon())
        self._tasks.add(task)

    async def _close_soon(self) -> None:
        await asyncio.sleep(0.1)  # let the endings out
        await self._send({"type": "websocket.close", "code": 1000, "reason": "connection lifetime"})

    def _leave(self) -> None:
        """Stop everything that nobody will read."""
        if self._closed:
            return
        self._closed = True
        self._outbox.close()
        for run in tuple(self._runs.values()):
            if run.request.background:
                if run.answer is not None:
                    run.answer.ticket.resume()
            else:
                run.cancel(Interrupted("The client went away."))


async def deny(send: SendMessage, error: KeystrokeError, scope: Message) -> None:
    """Refuse the upgrade with a status and a body, where the server can; with a plain close elsewhere."""
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1008, "reason": error.message[:100]})
        return
    headers = [(b"content-type", b"application/json")]
    await send({"type": "websocket.http.response.start", "status": error.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": encode(ErrorBody(detail(error)))})

"""`/v1/responses` as a WebSocket: frames become actions, answers become frames.

Executes the actions of the sans-I/O session, without a task per token. When the client disconnects, with or
without a close frame, its answers stop within one step; background answers continue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from keystroke.errors import Interrupted, KeystrokeError, RateLimited
from keystroke.gateway.access.keys import Caller
from keystroke.gateway.api.answer import Sink
from keystroke.gateway.api.prompts import ConversationTurn
from keystroke.gateway.api.response_run import ResponseRun, steer_failed
from keystroke.gateway.api.responses import Responses
from keystroke.gateway.transport.socket import Socket, SocketConnection
from keystroke.protocol import events
from keystroke.protocol.faults import ConnectionLimitReached, ResponseNotFound, SlowClient
from keystroke.protocol.requests import ResponseSteer
from keystroke.protocol.response import Receipt
from keystroke.protocol.session import (
    Action,
    CancelResponse,
    ConnectionSession,
    ResumeResponse,
    SendEvent,
    StartResponse,
    error_event,
)

log = logging.getLogger("keystroke.websocket")

_Turns = list[tuple[str, ConversationTurn | None]]  # the responses of a run that ended


def _with_timings(messages: list[Any]) -> list[Any]:
    """The messages, with an event of timings before the end of a response."""
    out: list[Any] = []
    for message in messages:
        if isinstance(message, events.TERMINAL) and isinstance(message.response.receipt, Receipt):
            spent = events.timing_metrics(message.response.receipt)
            out.append(events.WebSocketTiming(spent, message.stream_id))
        out.append(message)
    return out


class _StartingRequest:
    """A request whose prompt is being made."""

    cancelled = False


class ResponsesConnection(SocketConnection):
    """`turn_state`: routing that the client repeats. `timing`: an event with timings precedes the end of
    each response."""

    def __init__(
        self,
        responses: Responses,
        caller: Caller,
        socket: Socket,
        *,
        turn_state: str | None = None,
        timing: bool = False,
    ) -> None:
        super().__init__(socket)
        self._turn_state, self._timing = turn_state, timing
        self._responses = responses
        self._caller = caller
        self._session = ConnectionSession()
        self._runs: dict[str, ResponseRun] = {}
        self._sinks: dict[ResponseRun, Sink] = {}
        self._starting: set[_StartingRequest] = set()
        self._expired = False  # the maximum lifetime is over: nothing new starts here

    async def serve(self) -> None:
        """Serve until the client disconnects or the connection reaches its maximum lifetime."""
        expiry = asyncio.create_task(self._watch_age())
        try:
            await super().serve()
        finally:
            expiry.cancel()
            for task in tuple(self._tasks):
                task.cancel()

    @property
    def busy(self) -> bool:
        """Whether a turn runs or is being started."""
        return bool(self._runs or self._starting or self._tasks)

    # Callbacks of the socket

    def handle_frame(self, frame: str) -> None:
        if not self._closed:  # else the client sends it again on its next connection
            self._execute(self._session.handle_frame(frame))

    def reject_frame(self, error: KeystrokeError) -> None:
        self._send(error_event(error))

    def on_stalled(self, reason: SlowClient) -> None:
        for run in tuple(self._runs.values()):
            if run.replay is None:
                run.cancel(reason)

    def on_disconnect(self) -> None:
        """Stop what nobody will read, except background answers and those that the client may resume."""
        reason, by_client = Interrupted("The client went away."), self._socket.closed_by_client
        for run in tuple(self._runs.values()):
            run.disconnect(self._sinks[run], reason, by_client=by_client)

    def pause(self) -> None:
        for run in self._runs.values():
            run.pause()

    def resume(self) -> None:
        for run in self._runs.values():
            run.resume()

    # Actions

    def _execute(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, StartResponse) and self._expired:
                self._refuse(action, self._age_error())
            elif isinstance(action, StartResponse):
                starting = _StartingRequest()
                self._starting.add(starting)  # now: the next frame may be a cancel
                self._spawn(self._start(action, starting))
            elif isinstance(action, SendEvent):
                self._send(action.event)
            elif isinstance(action, ResponseSteer):
                self._steer(action)
            elif isinstance(action, ResumeResponse):
                self._resume(action)
            else:
                self._cancel(action)

    async def _start(self, action: StartResponse, starting: _StartingRequest) -> None:
        request, recall = action.request, self._session.find_turn
        create = partial(
            self._responses.create, request, self._caller, recall=recall, turn_state=self._turn_state
        )
        try:
            run = await self._begin(action.stream, create)
        except Exception as error:
            headers = None
            if isinstance(error, RateLimited):
                headers = {"retry-after": str(max(1, round(error.retry_after)))}
            if isinstance(error, KeystrokeError):
                self._responses.service.metrics.rejected.labels(error.code).inc()
                if request.previous_response_id is not None:
                    self._session.forget_turn(request.previous_response_id)
            else:
                log.exception("a request could not be started")
                error = KeystrokeError("The server failed on this request; its log says how.")
            self._refuse(action, error, headers)
            return
        finally:  # only this one: the stream may already have begun its next
            self._starting.discard(starting)
        if starting.cancelled:
            run.cancel()

    async def _begin(self, stream: str, begin: Callable[..., Awaitable[ResponseRun]]) -> ResponseRun:
        """Start a run whose events go to this socket. Raises what `begin` raises."""
        turns, owner = _Turns(), list[ResponseRun]()
        sink = self._make_sink(owner)
        run = await begin(
            sink=sink,
            on_turn=turns.append,
            on_done=lambda: self._on_run_done(stream, turns, owner[0] if owner else None),
        )
        owner.append(run)
        if not run.over.is_set():
            self._runs[run.id] = run
            self._sinks[run] = sink
        if self._socket.closed:
            run.disconnect(sink, Interrupted("The client went away."))
        return run

    def _resume(self, action: ResumeResponse) -> None:
        """Continue a response whose connection broke on this one."""
        request, turns = action.request, _Turns()
        try:
            run = self._responses.find_run(request.response_id, self._caller)
            sink = self._make_sink([run])
            run.resume_events(
                sink,
                request.response_id,
                request.starting_after,
                on_turn=turns.append,
                on_done=lambda: self._on_run_done(action.stream, turns, run),
            )
        except KeystrokeError as error:
            if self._responses.journal is not None and isinstance(error, ResponseNotFound):
                self._spawn(self._resume_turn(action))
                return
            self._refuse(action, error)
            return
        if run.over.is_set():
            self._execute(self._session.end_response(action.stream, *(run.latest or (None, None))))
            return
        self._runs[run.id] = run
        self._sinks[run] = sink

    async def _resume_turn(self, action: ResumeResponse) -> None:
        """Continue a response that another gateway began."""
        name, stream_id = action.request.response_id, action.request.stream_id
        resume = partial(self._responses.resume_turn, name, self._caller, stream_id=stream_id)
        try:
            await self._begin(action.stream, resume)
        except KeystrokeError as error:
            self._refuse(action, error)

    def _refuse(
        self,
        action: StartResponse | ResumeResponse,
        error: KeystrokeError,
        headers: dict[str, str] | None = None,
    ) -> None:
        self._send(error_event(error, action.request.stream_id, headers))
        self._execute(self._session.end_response(action.stream, None, None))

    def _make_sink(self, owner: list[ResponseRun]) -> Sink:
        """A sink that writes a run's events to this socket. `owner` holds the run once it exists."""

        def sink(messages: list[Any]) -> None:
            run = owner[0] if owner else None
            work = run.work if run is not None else None
            self._socket.put(_with_timings(messages) if self._timing else messages, work)
            if run is None or work is None:
                return
            if run.id not in self._runs and not run.over.is_set():
                self._runs[run.id] = run  # a steered successor
            if self._socket.paused:
                run.pause()

        return sink

    def _on_run_done(self, stream: str, turns: _Turns, run: ResponseRun | None) -> None:
        if run is not None:
            self._sinks.pop(run, None)
        response_id, turn = turns[-1] if turns else (None, None)
        for ended, _ in turns:
            self._runs.pop(ended, None)
        self._execute(self._session.end_response(stream, response_id, turn))
        if self._closing:
            self.close_when_idle()
        if self._expired and not self._must_finish():
            self._expire()

    def _steer(self, request: ResponseSteer) -> None:
        response_id = request.previous_response_id
        run = self._runs.get(response_id)
        if run is not None and run.id == response_id and run.is_active:
            try:
                run.steer(request.input)
                return
            except KeystrokeError as error:
                code, message = "invalid_input", error.message
                stream = run.stream_id
        else:
            stream = None
            if self._session.find_turn(response_id) is not None:
                code, message = "response_already_completed", "The response has ended; send response.create."
            else:
                code = "response_not_found"
                message = f"No response {response_id:.80} runs on this connection."
        self._send(steer_failed(response_id, request.input, code, message, None, 0, stream))

    def _cancel(self, action: CancelResponse) -> None:
        response_id = action.response_id
        runs = [r for r in self._runs.values() if response_id is None or r.id == response_id]
        for run in runs:
            run.cancel()
        for starting in self._starting if response_id is None else ():
            starting.cancelled = True
        if response_id is not None and not runs:
            missing = ResponseNotFound(
                f"No response {response_id:.80} runs on this connection.", param="response_id"
            )
            self._send(error_event(missing))

    def _send(self, event: Any) -> None:
        self._socket.put([event])

    async def _watch_age(self) -> None:
        """At the maximum lifetime, let answers that cannot be resumed elsewhere end, then close."""
        limits = self._socket.limits
        old = limits.clock() + limits.lifetime
        while True:
            left = old - limits.clock()
            self._expired = left <= 0
            if self._expired and (left + limits.handover <= 0 or not self._must_finish()):
                break
            await asyncio.sleep(min(left if left > 0 else left + limits.handover, limits.tick))
        self._expire()

    def _must_finish(self) -> bool:
        """Whether an answer runs or starts that would be lost with this connection."""
        runs = self._runs.values()
        return bool(self._starting) or any(run.replay is None and not run.background for run in runs)

    def _age_error(self) -> ConnectionLimitReached:
        minutes = round(self._socket.limits.lifetime / 60)
        return ConnectionLimitReached(f"A connection lives at most {minutes} minutes; open another.")

    def _expire(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._send(error_event(self._age_error()))
        for run in tuple(self._runs.values()):
            if not run.background and run.replay is None:
                run.cancel()
        self._spawn(self._close_soon())

    async def _close_soon(self) -> None:
        await asyncio.sleep(0.1)  # the final events are written first
        await self._socket.close("connection lifetime")

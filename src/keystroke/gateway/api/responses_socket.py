"""`/v1/responses` as a WebSocket: frames to actions, answers to frames.

Carries out what the sans-I/O session says, with no task per token. A client that goes away, with or
without a close frame, stops its answers within one step; background ones run on.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from keystroke.errors import Interrupted, KeystrokeError, RateLimited
from keystroke.gateway.access.keys import Caller
from keystroke.gateway.api.answer import Sink
from keystroke.gateway.api.prompts import Turn
from keystroke.gateway.api.response_run import ResponseRun, steer_failed
from keystroke.gateway.api.responses import Responses
from keystroke.gateway.transport.socket import Socket
from keystroke.protocol.faults import ConnectionLimitReached, ResponseNotFound, SlowClient
from keystroke.protocol.requests import ResponseSteer
from keystroke.protocol.session import (
    Action,
    Cancel,
    ConnectionSession,
    Resume,
    Send,
    Start,
    Steer,
    error_event,
)

log = logging.getLogger("keystroke.websocket")


RESTARTS = "this gateway restarts; connect again"

_Turns = list[tuple[str, Turn | None]]  # the responses of a run that ended


class _Starting:
    """A request whose prompt is being made, and whether it was cancelled meanwhile."""

    cancelled = False


class Connection:
    def __init__(self, responses: Responses, caller: Caller, socket: Socket) -> None:
        self._responses = responses
        self._caller = caller
        self._socket = socket
        self._session = ConnectionSession()
        self._runs: dict[str, ResponseRun] = {}
        self._starting: set[_Starting] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sinks: dict[ResponseRun, Sink] = {}  # of runs that can be taken up again
        self._leaving = self._gone = False

    async def serve(self) -> None:
        """Until the client goes or the connection's time is over."""
        loop = asyncio.get_running_loop()
        expiry = loop.call_later(self._socket.limits.lifetime, self._expire)
        try:
            await self._socket.serve(self)
        finally:
            expiry.cancel()
            for task in tuple(self._tasks):
                task.cancel()

    @property
    def busy(self) -> bool:
        """Whether a turn is under way, or about to be."""
        return bool(self._runs or self._starting or self._tasks)

    def leave(self) -> None:
        """Close as for a restart as soon as no turn is under way; idempotent. What the client sends from then
        on it finds unanswered, and sends again to whom it connects next."""
        self._leaving = True
        if not self.busy and not self._gone:
            self._gone = True
            task = asyncio.create_task(self._socket.close(RESTARTS, 1012))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    # What the socket tells

    def take(self, frame: str) -> None:
        if not self._gone:
            self._act(self._session.receive(frame))

    def refuse(self, error: KeystrokeError) -> None:
        self._say([error_event(error)])

    def stalled(self, reason: SlowClient) -> None:
        for run in tuple(self._runs.values()):
            if run.replay is None:
                run.cancel(reason)

    def left(self) -> None:
        """Stop everything that nobody will read. What can be taken up again waits for that, unless the client
        took its leave."""
        for run in tuple(self._runs.values()):
            if run.replay is not None and not (self._socket.goodbye and not run.request.background):
                run.replay.let_go(self._sinks[run])
            elif run.request.background:
                if run.answer is not None:
                    run.answer.work.ticket.resume()
            else:
                run.cancel(Interrupted("The client went away."))

    def pause(self) -> None:
        for run in self._runs.values():
            if run.answer is not None:
                run.answer.work.ticket.pause()

    def resume(self) -> None:
        for run in self._runs.values():
            if run.answer is not None:
                run.answer.work.ticket.resume()

    # In

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Start):
                starting = _Starting()
                self._starting.add(starting)  # now: the next frame may be a cancel
                task = asyncio.create_task(self._start(action, starting))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            elif isinstance(action, Send):
                self._say([action.event])
            elif isinstance(action, Steer):
                self._steer(action.request)
            elif isinstance(action, Resume):
                self._resume(action)
            else:
                self._cancel(action)

    def _resume(self, action: Resume) -> None:
        """A response whose connection broke goes on here."""
        request, turns = action.request, _Turns()
        try:
            replay = self._responses.replays.find(request.response_id, self._caller)
            run = replay.run
            assert isinstance(run, ResponseRun)
            sink = self._sink([run])
            replay.take_up(sink, request.response_id, request.starting_after)
        except KeystrokeError as error:
            self._say([error_event(error, request.stream_id)])
            self._act(self._session.ended(action.stream, None, None))
            return
        if run.over.is_set():
            self._act(self._session.ended(action.stream, *(run.latest or (None, None))))
            return
        run.on_turn, run.on_done = turns.append, lambda: self._done(action.stream, turns, run)
        self._runs[run.id] = run
        self._sinks[run] = sink

    def _sink(self, owner: list[ResponseRun]) -> Sink:
        """Where a run's events go: this socket. `owner` holds the run once there is one."""

        def sink(messages: list[Any]) -> None:
            run = owner[0] if owner else None
            answer = run.answer if run is not None else None
            self._socket.put(messages, answer.work if answer is not None else None)
            if run is None or run.answer is None:
                return
            if run.id not in self._runs and not run.over.is_set():
                self._runs[run.id] = run  # a steered successor
            if self._socket.paused:
                run.answer.work.ticket.pause()

        return sink

    def _done(self, stream: str, turns: _Turns, run: ResponseRun | None) -> None:
        if run is not None:
            self._sinks.pop(run, None)
        response_id, turn = turns[-1] if turns else (None, None)
        for ended, _ in turns:
            self._runs.pop(ended, None)
        self._act(self._session.ended(stream, response_id, turn))
        if self._leaving:
            self.leave()

    async def _start(self, action: Start, starting: _Starting) -> None:
        request, stream = action.request, action.stream
        turns, owner = _Turns(), list[ResponseRun]()
        sink = self._sink(owner)

        try:
            run = await self._responses.create(
                request,
                self._caller,
                sink,
                recall=self._session.recall,
                on_turn=turns.append,
                on_done=lambda: self._done(stream, turns, owner[0] if owner else None),
            )
            owner.append(run)
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
        finally:  # its own: the stream may have begun its next by now
            self._starting.discard(starting)
        if not run.over.is_set():
            self._runs[run.id] = run
            if run.replay is not None:
                self._sinks[run] = sink
        if starting.cancelled or (self._socket.closed and not request.background and run.replay is None):
            run.cancel()
        elif self._socket.closed and run.replay is not None:
            run.replay.let_go(sink)

    def _steer(self, request: ResponseSteer) -> None:
        wanted = request.previous_response_id
        run = self._runs.get(wanted)
        if run is not None and run.id == wanted and run.answer is not None and not run.answer.ended:
            try:
                run.sink(run.steer(request.input))
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
        for starting in self._starting if wanted is None else ():
            starting.cancelled = True
        if wanted is not None and not runs:
            missing = ResponseNotFound(
                f"No response {wanted:.80} runs on this connection.", param="response_id"
            )
            self._say([error_event(missing)])

    # Out

    def _say(self, messages: list[Any]) -> None:
        self._socket.put(messages)

    def _expire(self) -> None:
        minutes = round(self._socket.limits.lifetime / 60)
        over = ConnectionLimitReached(f"A connection lives at most {minutes} minutes; open another.")
        self._say([error_event(over)])
        for run in tuple(self._runs.values()):
            if not run.request.background and run.replay is None:
                run.cancel()
        task = asyncio.create_task(self._close_soon())
        self._tasks.add(task)

    async def _close_soon(self) -> None:
        await asyncio.sleep(0.1)  # let the endings out
        await self._socket.close("connection lifetime")

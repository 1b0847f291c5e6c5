"""Recent events of a run, so that a client whose connection broke can resume it.

Every event is kept in order with its response and number. A client that reconnects names the last event it
has and gets each later one exactly once, then those that follow. There is one reader at a time: a newer one
replaces the older. A run that is not resumed in time is cancelled; events are limited in bytes and time.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any, Generic, Protocol, TypeVar

from keystroke.errors import Interrupted, KeystrokeError
from keystroke.gateway.access.keys import Caller
from keystroke.gateway.api.answer import Sink
from keystroke.protocol.events import Created, TextDelta
from keystroke.protocol.faults import ResponseNotFound

WINDOW = 60.0  # seconds within which a client has to reconnect
BYTES = 16 << 20  # of one run's events; the oldest are dropped first
ALL = 256 << 20  # of all runs' events together
_EVENT = 400  # bytes of an event beside its text


class ResumableRun(Protocol):
    """The run whose events are kept."""

    caller: Caller
    over: asyncio.Event

    def cancel(self, reason: KeystrokeError | None = None) -> None: ...

    def resume(self) -> None: ...


RunT = TypeVar("RunT", bound=ResumableRun)


class Replay(Generic[RunT]):
    """`outlives`: the run continues without a reader (a background response)."""

    def __init__(self, run: RunT, owner: Replays[RunT], sink: Sink, *, outlives: bool) -> None:
        self.run = run
        self.bytes = 0
        self._owner, self._outlives = owner, outlives
        self._events: list[tuple[str, int, Any]] = []  # (response, number, event)
        self._current = ""
        self._cut = False  # the first events were dropped
        self._sink: Sink | None = sink
        self._timer: asyncio.TimerHandle | None = None

    def put(self, messages: list[Any]) -> None:
        """Record messages and pass them to the reader."""
        recorded, size = self._events, _EVENT * len(messages)
        for message in messages:
            kind = type(message)
            if kind is TextDelta:
                size += len(message.delta)
            elif kind is Created:
                self._current = message.response.id
                self._owner.register(self._current, self)
            recorded.append((self._current, message.sequence_number, message))
        self._grow(size)
        if self.bytes > BYTES:
            self._drop_half()
        if self._sink is not None:
            self._sink(messages)

    def resume(self, sink: Sink, response_id: str, after: int) -> None:
        """Send `sink` every event after number `after` of a response, then those that follow. Raises
        ResponseNotFound where they are no longer kept; then nothing changed."""
        last = -1
        for at, (response, number, _) in enumerate(self._events):
            if response == response_id and number <= after:
                last = at
        begins = next((at for at, event in enumerate(self._events) if event[0] == response_id), None)
        if begins is None or (last < 0 and (self._cut or after >= 0)):
            raise ResponseNotFound(
                f"The events of {response_id:.80} after {after} are no longer kept; fetch the response.",
                param="starting_after",
            )
        missed = [message for _, _, message in self._events[last + 1 if last >= 0 else begins :]]
        self._stop_timer()
        self._sink = sink
        if missed:
            sink(missed)
        if self.run.over.is_set():
            self.start_timer()

    def detach(self, sink: Sink) -> None:
        """The reader disconnected. Does nothing where another has replaced it."""
        if self._sink == sink:
            self._sink = None
            self.run.resume()
            if not self._outlives or self.run.over.is_set():
                self.start_timer()

    def close(self) -> None:
        self._stop_timer()
        self._grow(-self.bytes)
        self._events = []

    def start_timer(self) -> None:
        """Wait for a reader: cancel the run without one; drop the events of a run that ended."""
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(WINDOW, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        self._timer = None
        if not self.run.over.is_set():
            self.run.cancel(Interrupted("The client went away and did not come back."))
            self.start_timer()
            return
        self._owner.discard(self)

    def _grow(self, size: int) -> None:
        self.bytes += size
        self._owner.bytes += size

    def _drop_half(self) -> None:
        half = len(self._events) // 2
        gone = sum(_EVENT + len(getattr(message, "delta", "")) for _, _, message in self._events[:half])
        self._events = self._events[half:]
        self._grow(-min(gone, self.bytes))
        self._cut = True


class Replays(Generic[RunT]):
    """The replays of all runs, by response id."""

    def __init__(self) -> None:
        self.bytes = 0
        self._by_id: OrderedDict[str, Replay[RunT]] = OrderedDict()

    def register(self, response_id: str, replay: Replay[RunT]) -> None:
        self._by_id[response_id] = replay
        while self.bytes > ALL:
            over = next((r for r in self._by_id.values() if r.run.over.is_set()), None)
            if over is None:
                return
            self.discard(over)

    def find_run(self, response_id: str, caller: Caller) -> RunT:
        """The run whose events can be resumed. Raises ResponseNotFound, also for one of another caller."""
        replay = self._by_id.get(response_id)
        if replay is None or replay.run.caller.id != caller.id:
            raise ResponseNotFound(
                f"There is no stream of {response_id:.80} to resume; fetch the response.",
                param="response_id",
            )
        return replay.run

    def discard(self, replay: Replay[RunT]) -> None:
        replay.close()
        for name in [name for name, known in self._by_id.items() if known is replay]:
            del self._by_id[name]

"""What a run said, kept for a while, so that a client whose connection broke can take it up again.

Every event is kept in order with the response it belongs to and its number; whoever comes back names the
last one it has and gets each later one exactly once, then what follows as it is made. One reader at a time: a
newer one takes the older one's place. A run that nobody takes up again in time is stopped, and what is kept
is bounded in bytes and time.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any, Protocol

from keystroke.errors import Interrupted, KeystrokeError
from keystroke.gateway.access.keys import Caller
from keystroke.gateway.api.answer import Sink
from keystroke.protocol.events import Created, TextDelta
from keystroke.protocol.faults import ResponseNotFound

WINDOW = 60.0  # seconds for which a client may be away
BYTES = 16 << 20  # of one run's events; older ones go first
ALL = 256 << 20  # of all runs' events together
_EVENT = 400  # bytes that an event takes beside its text


class Resumable(Protocol):
    """What is asked of the run."""

    caller: Caller
    over: asyncio.Event

    def cancel(self, reason: KeystrokeError | None = None) -> None: ...

    def unpause(self) -> None: ...


class Replay:
    """`outlives`: the run goes on without a reader however long (a background one)."""

    def __init__(self, run: Resumable, keep: Replays, *, outlives: bool) -> None:
        self.run = run
        self.bytes = 0
        self._keep, self._outlives = keep, outlives
        self._said: list[tuple[str, int, Any]] = []  # (response, number, event)
        self._current = ""
        self._cut = False  # its first events are gone
        self._sink: Sink | None = None
        self._timer: asyncio.TimerHandle | None = None

    def put(self, messages: list[Any]) -> None:
        """Keep, and hand on to whoever reads."""
        said, size = self._said, _EVENT * len(messages)
        for message in messages:
            kind = type(message)
            if kind is TextDelta:
                size += len(message.delta)
            elif kind is Created:
                self._current = message.response.id
                self._keep.know(self._current, self)
            said.append((self._current, message.sequence_number, message))
        self._grow(size)
        if self.bytes > BYTES:
            self._forget_half()
        if self._sink is not None:
            self._sink(messages)

    def attach(self, sink: Sink) -> None:
        """The first reader, who has heard nothing because nothing was said."""
        self._sink = sink

    def take_up(self, sink: Sink, response_id: str, after: int) -> None:
        """Give `sink` every event behind number `after` of a response, and from now on what follows. Raises
        ResponseNotFound where they are no longer kept; then nothing changed."""
        place = -1
        for at, (response, number, _) in enumerate(self._said):
            if response == response_id and number <= after:
                place = at
        begins = next((at for at, said in enumerate(self._said) if said[0] == response_id), None)
        if begins is None or (place < 0 and (self._cut or after >= 0)):
            raise ResponseNotFound(
                f"The events of {response_id:.80} behind {after} are no longer kept; fetch the response.",
                param="starting_after",
            )
        missed = [message for _, _, message in self._said[place + 1 if place >= 0 else begins :]]
        self._stop_waiting()
        self._sink = sink
        if missed:
            sink(missed)
        if self.run.over.is_set():
            self._wait()

    def let_go(self, sink: Sink) -> None:
        """The reader is gone. Harmless where another has taken its place."""
        if self._sink == sink:
            self._sink = None
            self.run.unpause()
            if not self._outlives or self.run.over.is_set():
                self._wait()

    def ended(self) -> None:
        """The run is over: what it said can be heard again for a while."""
        self._wait()

    def close(self) -> None:
        self._stop_waiting()
        self._grow(-self.bytes)
        self._said = []

    def _wait(self) -> None:
        self._stop_waiting()
        self._timer = asyncio.get_running_loop().call_later(WINDOW, self._overdue)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _overdue(self) -> None:
        self._timer = None
        if not self.run.over.is_set():
            self.run.cancel(Interrupted("The client went away and did not come back."))
            self._wait()
            return
        self._keep.forget(self)

    def _grow(self, size: int) -> None:
        self.bytes += size
        self._keep.bytes += size

    def _forget_half(self) -> None:
        half = len(self._said) // 2
        gone = sum(_EVENT + len(getattr(message, "delta", "")) for _, _, message in self._said[:half])
        self._said = self._said[half:]
        self._grow(-min(gone, self.bytes))
        self._cut = True


class Replays:
    """All that can be taken up again, by the id of each response."""

    def __init__(self) -> None:
        self.bytes = 0
        self._by_id: OrderedDict[str, Replay] = OrderedDict()

    def begin(self, run: Resumable, *, outlives: bool) -> Replay:
        return Replay(run, self, outlives=outlives)

    def know(self, response_id: str, replay: Replay) -> None:
        self._by_id[response_id] = replay
        while self.bytes > ALL:
            over = next((r for r in self._by_id.values() if r.run.over.is_set()), None)
            if over is None:
                return
            self.forget(over)

    def find(self, response_id: str, caller: Caller) -> Replay:
        """Raises ResponseNotFound, also for another caller's."""
        replay = self._by_id.get(response_id)
        if replay is None or replay.run.caller.id != caller.id:
            raise ResponseNotFound(
                f"There is no stream of {response_id:.80} to take up again; fetch the response.",
                param="response_id",
            )
        return replay

    def forget(self, replay: Replay) -> None:
        replay.close()
        for name in [name for name, held in self._by_id.items() if held is replay]:
            del self._by_id[name]

"""One response as a sequence of events, in the order every client accepts.

Sans-I/O: each method records what happened (text, a tool call, the end) and returns the events that say so.
It numbers events, opens and closes items, keeps the response object current, and refuses a second end.
WebSocket, SSE and the plain HTTP body are all built from these events.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence

from msgspec import UNSET, UnsetType

from keystroke.errors import KeystrokeError, ProtocolError
from keystroke.protocol import events
from keystroke.protocol.events import Event
from keystroke.protocol.items import (
    ChosenToken,
    CompactionItem,
    CustomToolCall,
    FunctionCall,
    Message,
    OutputItem,
    OutputText,
    Reasoning,
    ReasoningText,
)
from keystroke.protocol.response import Incomplete, Receipt, Response, ResponseError, ResponseUsage

_ENDINGS: dict[str, Callable[..., Event]] = {
    "completed": events.Completed,
    "incomplete": events.IncompleteEvent,
    "cancelled": events.Cancelled,
    "failed": events.Failed,
}


class ResponseStream:
    """`ended` is set by the terminal event; every later call raises ProtocolError."""

    def __init__(self, response: Response, stream_id: str | None = None) -> None:
        self.id = response.id
        self.response = response
        self.ended = False
        self._stream_id: str | UnsetType = UNSET if stream_id is None else stream_id
        self._sequence = 0
        self._item: OutputItem | None = None
        self._pieces: list[str] = []
        self._logprobs: list[ChosenToken] = []

    def next_number(self) -> int:
        """The next sequence number; steer events use it too."""
        number = self._sequence
        self._sequence += 1
        return number

    # before the first token

    def on_created(self) -> list[Event]:
        self._check()
        return [self._event(events.Created, self._snapshot())]

    def on_queued(self, position: int) -> list[Event]:
        self._check()
        self.response.status = "queued"
        self.response.queue_position = position
        return [self._event(events.Queued, self._snapshot())]

    def on_started(self) -> list[Event]:
        self._check()
        self.response.status = "in_progress"
        self.response.queue_position = UNSET
        return [self._event(events.InProgress, self._snapshot())]

    # output of the model

    def on_text(self, delta: str, logprobs: Sequence[ChosenToken] = ()) -> list[Event]:
        out: list[Event] = []
        item = self._item
        if type(item) is not Message:
            self._check()
            out = self._close()
            item = Message(id=self._id("msg"), status="in_progress", content=[])
            self._open(item, out, OutputText(text=""))
        self._pieces.append(delta)
        chosen = list(logprobs)
        if chosen:
            self._logprobs += chosen
        at = len(self.response.output)
        out.append(events.TextDelta(item.id, at, 0, delta, chosen, self.next_number(), self._stream_id))
        return out

    def on_reasoning(self, delta: str) -> list[Event]:
        out: list[Event] = []
        item = self._item
        if type(item) is not Reasoning:
            self._check()
            out = self._close()
            item = Reasoning(id=self._id("rs"), status="in_progress", content=[])
            self._open(item, out, ReasoningText(text=""))
        self._pieces.append(delta)
        out.append(events.ReasoningDelta(item.id, self._index, 0, delta, self.next_number(), self._stream_id))
        return out

    def begin_call(self, name: str, *, custom: bool, namespace: str | None = None) -> list[Event]:
        """A tool call begins; its arguments or input follow through `on_call_delta`."""
        self._check()
        out = self._close()
        scope: str | UnsetType = UNSET if namespace is None else namespace
        item: FunctionCall | CustomToolCall
        if custom:
            item = CustomToolCall(self._id("ctc"), self._id("call"), name, "", "in_progress", scope)
        else:
            item = FunctionCall(self._id("fc"), self._id("call"), name, "", "in_progress", scope)
        self._open(item, out)
        return out

    def on_call_delta(self, delta: str) -> list[Event]:
        item = self._item
        if not isinstance(item, FunctionCall | CustomToolCall):
            raise ProtocolError("no tool call is open")
        self._pieces.append(delta)
        if isinstance(item, FunctionCall):
            return [events.ArgumentsDelta(item.id, self._index, delta, self.next_number(), self._stream_id)]
        return [events.ToolInputDelta(item.id, self._index, delta, self.next_number(), self._stream_id)]

    def on_call_done(self) -> list[Event]:
        return self._close()

    def add_compaction(self, item: CompactionItem) -> list[Event]:
        """A whole compaction item, before the model's output."""
        self._check()
        at = self._index
        out: list[Event] = [
            events.ItemAdded(item, at, self.next_number(), self._stream_id),
            events.Compacting(item.id, at, self.next_number(), self._stream_id),
            events.ItemDone(item, at, self.next_number(), self._stream_id),
        ]
        self.response.output = [*self.response.output, item]
        return out

    # the end, exactly once

    def end(
        self,
        status: str,
        usage: ResponseUsage | None = None,
        receipt: Receipt | None = None,
        *,
        incomplete: Incomplete | None = None,
        error: KeystrokeError | None = None,
    ) -> list[Event]:
        """End as `completed`, `incomplete` (for this reason), `cancelled` or `failed` (with this error)."""
        self._check()
        out = self._close("completed" if status == "completed" else "incomplete")
        self.ended = True
        response = self.response
        response.status = status  # type: ignore[assignment]
        response.queue_position = UNSET
        response.usage = usage
        response.completed_at = int(time.time()) if status == "completed" else None
        response.incomplete_details = incomplete
        if error is not None:
            response.error = ResponseError(code=error.code, message=error.message)
        if receipt is not None:
            response.receipt = receipt
        return [*out, self._event(_ENDINGS[status], response)]

    # internal

    @property
    def _index(self) -> int:
        return len(self.response.output)

    def _check(self) -> None:
        if self.ended:
            raise ProtocolError(f"response {self.response.id} has already ended")

    def _id(self, kind: str) -> str:
        """Item ids derive from the response's id, so they are unique without new random numbers."""
        return f"{kind}_{self.response.id.removeprefix('resp_')}_{len(self.response.output)}"

    def _event(self, kind: Callable[..., Event], response: Response) -> Event:
        return kind(response=response, sequence_number=self.next_number(), stream_id=self._stream_id)

    def _snapshot(self) -> Response:
        """A copy for an event: events never change, the response object does."""
        return copy.copy(self.response)

    def _open(
        self, item: OutputItem, out: list[Event], part: OutputText | ReasoningText | None = None
    ) -> None:
        self._item = item
        at = self._index
        out.append(events.ItemAdded(copy.copy(item), at, self.next_number(), self._stream_id))
        if part is not None:
            out.append(events.PartAdded(item.id, at, 0, part, self.next_number(), self._stream_id))

    def _close(self, status: str = "completed") -> list[Event]:
        item = self._item
        if item is None:
            return []
        text = "".join(self._pieces)
        out: list[Event] = []
        index = self._index
        if isinstance(item, Message):
            part = OutputText(text=text, logprobs=self._logprobs)
            out.append(
                events.TextDone(item.id, index, 0, text, self._logprobs, self.next_number(), self._stream_id)
            )
            out.append(events.PartDone(item.id, index, 0, part, self.next_number(), self._stream_id))
            item.content = [part]
        elif isinstance(item, Reasoning):
            thought = ReasoningText(text=text)
            out.append(events.ReasoningDone(item.id, index, 0, text, self.next_number(), self._stream_id))
            out.append(events.PartDone(item.id, index, 0, thought, self.next_number(), self._stream_id))
            item.content = [thought]
        elif isinstance(item, FunctionCall):
            item.arguments = text
            out.append(
                events.ArgumentsDone(item.id, index, item.name, text, self.next_number(), self._stream_id)
            )
        elif isinstance(item, CustomToolCall):
            item.input = text
            out.append(events.ToolInputDone(item.id, index, text, self.next_number(), self._stream_id))
        if not isinstance(item, CompactionItem):
            item.status = status
        out.append(events.ItemDone(item, index, self.next_number(), self._stream_id))
        self.response.output = [*self.response.output, item]
        self._item, self._pieces, self._logprobs = None, [], []
        return out

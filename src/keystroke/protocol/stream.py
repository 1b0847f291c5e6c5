"""One response as a sequence of events, in the order every client accepts.

Sans-I/O. It is told what happened (text came, a call began, the end) and gives the events that say so;
it numbers them, opens and closes items, keeps the response object current, and refuses a second end.
WebSocket, SSE, the plain HTTP body and the tests all read from this one place.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from keystroke.errors import KeystrokeError, ProtocolError
from keystroke.protocol import events
from keystroke.protocol.events import Event
from keystroke.protocol.items import (
    ChosenToken,
    CustomToolCall,
    FunctionCall,
    Message,
    OutputText,
    Reasoning,
    ReasoningText,
)
from keystroke.protocol.response import Incomplete, Receipt, Response, ResponseError, Usage


class ResponseStream:
    """`ended` is set by the terminal event; everything told afterwards raises."""

    def __init__(self, response: Response, stream_id: str | None = None) -> None:
        self.response = response
        self.ended = False
        self._lane: str | UnsetType = UNSET if stream_id is None else stream_id
        self._sequence = 0
        self._item: Message | Reasoning | FunctionCall | CustomToolCall | None = None
        self._pieces: list[str] = []
        self._logprobs: list[ChosenToken] = []

    def number(self) -> int:
        """The next sequence number; steer events borrow it."""
        number = self._sequence
        self._sequence += 1
        return number

    # what happened before the first token

    def created(self) -> list[Event]:
        self._check()
        return [
            events.Created(response=self._snapshot(), sequence_number=self.number(), stream_id=self._lane)
        ]

    def queued(self, position: int) -> list[Event]:
        self._check()
        self.response.status = "queued"
        self.response.queue_position = position
        return [events.Queued(response=self._snapshot(), sequence_number=self.number(), stream_id=self._lane)]

    def in_progress(self) -> list[Event]:
        self._check()
        self.response.status = "in_progress"
        self.response.queue_position = UNSET
        return [
            events.InProgress(response=self._snapshot(), sequence_number=self.number(), stream_id=self._lane)
        ]

    # what the model says

    def text(self, delta: str, logprobs: Sequence[ChosenToken] = ()) -> list[Event]:
        out: list[Event] = []
        item = self._item
        if type(item) is not Message:
            self._check()
            out = self._close()
            item = Message(id=self._id("msg"), status="in_progress", content=[])
            self._open(item, out)
            out.append(
                events.PartAdded(item.id, self._index, 0, OutputText(text=""), self.number(), self._lane)
            )
        self._pieces.append(delta)
        chosen = list(logprobs)
        if chosen:
            self._logprobs += chosen
        out.append(
            events.TextDelta(item.id, len(self.response.output), 0, delta, chosen, self.number(), self._lane)
        )
        return out

    def reasoning(self, delta: str) -> list[Event]:
        out: list[Event] = []
        item = self._item
        if type(item) is not Reasoning:
            self._check()
            out = self._close()
            item = Reasoning(id=self._id("rs"), status="in_progress", content=[])
            self._open(item, out)
            out.append(
                events.PartAdded(item.id, self._index, 0, ReasoningText(text=""), self.number(), self._lane)
            )
        self._pieces.append(delta)
        out.append(events.ReasoningDelta(item.id, self._index, 0, delta, self.number(), self._lane))
        return out

    def call(self, name: str, *, custom: bool, namespace: str | None = None) -> list[Event]:
        """A tool call begins; its arguments or input follow through `call_delta`."""
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

    def call_delta(self, delta: str) -> list[Event]:
        item = self._item
        if not isinstance(item, FunctionCall | CustomToolCall):
            raise ProtocolError("no tool call is open")
        self._pieces.append(delta)
        if isinstance(item, FunctionCall):
            return [events.ArgumentsDelta(item.id, self._index, delta, self.number(), self._lane)]
        return [events.ToolInputDelta(item.id, self._index, delta, self.number(), self._lane)]

    def call_done(self) -> list[Event]:
        return self._close()

    # how it ends: exactly once

    def completed(self, usage: Usage, receipt: Receipt | None = None) -> list[Event]:
        out = self._finish("completed", usage, receipt)
        out.append(
            events.Completed(response=self.response, sequence_number=self.number(), stream_id=self._lane)
        )
        return out

    def incomplete(self, reason: Incomplete, usage: Usage, receipt: Receipt | None = None) -> list[Event]:
        self.response.incomplete_details = reason
        out = self._finish("incomplete", usage, receipt, item_status="incomplete")
        out.append(
            events.IncompleteEvent(
                response=self.response, sequence_number=self.number(), stream_id=self._lane
            )
        )
        return out

    def cancelled(self, usage: Usage | None = None, receipt: Receipt | None = None) -> list[Event]:
        out = self._finish("cancelled", usage, receipt, item_status="incomplete")
        out.append(
            events.Cancelled(response=self.response, sequence_number=self.number(), stream_id=self._lane)
        )
        return out

    def failed(
        self, error: KeystrokeError, usage: Usage | None = None, receipt: Receipt | None = None
    ) -> list[Event]:
        self.response.error = ResponseError(code=error.code, message=error.message)
        out = self._finish("failed", usage, receipt, item_status="incomplete")
        out.append(events.Failed(response=self.response, sequence_number=self.number(), stream_id=self._lane))
        return out

    # inside

    @property
    def _index(self) -> int:
        return len(self.response.output)

    def _check(self) -> None:
        if self.ended:
            raise ProtocolError(f"response {self.response.id} has already ended")

    def _id(self, kind: str) -> str:
        """Ids derive from the response's, so they are unique without asking for randomness per item."""
        return f"{kind}_{self.response.id.removeprefix('resp_')}_{len(self.response.output)}"

    def _snapshot(self) -> Response:
        """Events are never changed after they are written, the response object is: give them a copy."""
        return copy.copy(self.response)

    def _open(self, item: Message | Reasoning | FunctionCall | CustomToolCall, out: list[Event]) -> None:
        self._item = item
        out.append(events.ItemAdded(copy.copy(item), self._index, self.number(), self._lane))

    def _close(self, status: str = "completed") -> list[Event]:
        item = self._item
        if item is None:
            return []
        whole = "".join(self._pieces)
        out: list[Event] = []
        index = self._index
        if isinstance(item, Message):
            part = OutputText(text=whole, logprobs=self._logprobs)
            out.append(events.TextDone(item.id, index, 0, whole, self._logprobs, self.number(), self._lane))
            out.append(events.PartDone(item.id, index, 0, part, self.number(), self._lane))
            item.content = [part]
        elif isinstance(item, Reasoning):
            thought = ReasoningText(text=whole)
            out.append(events.ReasoningDone(item.id, index, 0, whole, self.number(), self._lane))
            out.append(events.PartDone(item.id, index, 0, thought, self.number(), self._lane))
            item.content = [thought]
        elif isinstance(item, FunctionCall):
            item.arguments = whole
            out.append(events.ArgumentsDone(item.id, index, item.name, whole, self.number(), self._lane))
        else:
            item.input = whole
            out.append(events.ToolInputDone(item.id, index, whole, self.number(), self._lane))
        item.status = status
        out.append(events.ItemDone(item, index, self.number(), self._lane))
        self.response.output = [*self.response.output, item]
        self._item, self._pieces, self._logprobs = None, [], []
        return out

    def _finish(
        self, status: str, usage: Usage | None, receipt: Receipt | None, *, item_status: str = "completed"
    ) -> list[Event]:
        self._check()
        out = self._close(item_status)
        self.ended = True
        response = self.response
        response.status = status  # type: ignore[assignment]
        response.queue_position = UNSET
        response.usage = usage
        response.completed_at = int(time.time()) if status == "completed" else None
        if receipt is not None:
            response.receipt = receipt
        return out

"""One response as events: the order clients need, and exactly one end."""

from __future__ import annotations

import pytest

from keystroke.errors import ProtocolError, Unavailable
from keystroke.protocol import events
from keystroke.protocol.codec import encode
from keystroke.protocol.events import event_type
from keystroke.protocol.items import CustomToolCall, FunctionCall, Message, Reasoning
from keystroke.protocol.response import Incomplete, Response, ResponseUsage
from keystroke.protocol.stream import ResponseStream

USAGE = ResponseUsage(1, 2, 3)


def stream(stream_id: str | None = None) -> ResponseStream:
    return ResponseStream(Response(id="resp_1", created_at=0, model="m", status="queued"), stream_id)


def test_a_text_answer_has_the_order_that_satisfies_every_client() -> None:
    s = stream()
    said = [*s.on_created(), *s.on_started(), *s.on_text("a"), *s.on_text("b"), *s.end("completed", USAGE)]
    assert [event_type(e) for e in said] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [getattr(e, "sequence_number", -1) for e in said] == list(range(len(said)))
    last = said[-1]
    assert isinstance(last, events.Completed)
    assert last.response.status == "completed"
    message = last.response.output[0]
    assert isinstance(message, Message)
    assert message.content[0].text == "ab"


def test_events_already_given_do_not_change_afterwards() -> None:
    s = stream()
    created = s.on_created()[0]
    s.on_started()
    added = s.on_text("x")[0]
    s.end("completed", USAGE)
    assert isinstance(created, events.Created)
    assert (created.response.status, created.response.output) == ("queued", [])
    assert isinstance(added, events.ItemAdded)
    assert isinstance(added.item, Message)
    assert added.item.status == "in_progress"


def test_reasoning_text_and_calls_become_items_of_their_own() -> None:
    s = stream("lane")
    said = [
        *s.on_reasoning("hm"),
        *s.on_text("t"),
        *s.begin_call("f", custom=False),
        *s.on_call_delta('{"a":1}'),
        *s.on_call_done(),
    ]
    said += [
        *s.begin_call("apply_patch", custom=True),
        *s.on_call_delta("*** Begin"),
        *s.end("completed", USAGE),
    ]
    assert {getattr(e, "stream_id", None) for e in said} == {"lane"}
    kinds = [type(item) for item in s.response.output]
    assert kinds == [Reasoning, Message, FunctionCall, CustomToolCall]
    call = s.response.output[2]
    assert isinstance(call, FunctionCall)
    assert (call.name, call.arguments, call.status) == ("f", '{"a":1}', "completed")
    assert len({item.id for item in s.response.output}) == 4


def test_the_queue_position_is_told_and_gone_once_the_answer_begins() -> None:
    s = stream()
    queued = s.on_queued(3)[0]
    assert isinstance(queued, events.Queued)
    assert queued.response.queue_position == 3
    progress = s.on_started()[0]
    assert isinstance(progress, events.InProgress)
    assert b'"queue_position":3' in encode(queued)
    assert b"queue_position" not in encode(progress)


@pytest.mark.parametrize("ending", ["completed", "incomplete", "cancelled", "failed"])
def test_a_response_ends_once_and_says_nothing_afterwards(ending: str) -> None:
    s = stream()
    s.on_text("x")
    endings = {
        "completed": lambda: s.end("completed", USAGE),
        "incomplete": lambda: s.end("incomplete", USAGE, incomplete=Incomplete(reason="max_output_tokens")),
        "cancelled": lambda: s.end("cancelled", USAGE),
        "failed": lambda: s.end("failed", error=Unavailable("the deep model cannot be reached")),
    }
    said = endings[ending]()
    assert sum(isinstance(e, events.TERMINAL) for e in said) == 1
    assert isinstance(said[-1], events.TERMINAL)
    assert s.response.status == ending
    for again in (*endings.values(), lambda: s.on_text("more"), s.on_created):
        with pytest.raises(ProtocolError):
            again()

"""A connection's rules: FIFO inside a stream, concurrent across streams, bounded, forgiving of bad frames."""

from __future__ import annotations

import json

from keystroke.protocol import events
from keystroke.protocol.requests import ResponseSteer
from keystroke.protocol.session import (
    Action,
    CancelResponse,
    ConnectionSession,
    SendEvent,
    SessionLimits,
    StartResponse,
)


def create(stream_id: str | None = None, **fields: object) -> str:
    body = {"type": "response.create", "input": "x", **fields}
    return json.dumps(body if stream_id is None else {**body, "stream_id": stream_id})


def started(actions: list[Action]) -> list[str]:
    return [a.stream for a in actions if isinstance(a, StartResponse)]


def error_code(actions: list[Action]) -> str:
    (action,) = actions
    assert isinstance(action, SendEvent)
    assert isinstance(action.event, events.ErrorEvent)
    assert action.event.status >= 400
    return action.event.error.code


def test_one_response_at_a_time_inside_a_lane_in_order() -> None:
    s = ConnectionSession()
    assert started(s.handle_frame(create("a", metadata={"n": "1"}))) == ["a"]
    assert started(s.handle_frame(create("a", metadata={"n": "2"}))) == []
    (action,) = s.end_response("a", "resp_1", "turn")
    assert isinstance(action, StartResponse)
    assert action.request.metadata == {"n": "2"}


def test_lanes_run_side_by_side() -> None:
    s = ConnectionSession()
    assert [started(s.handle_frame(create(lane))) for lane in (None, "a", "b")] == [[""], ["a"], ["b"]]


def test_more_than_the_allowed_responses_in_flight_wait_their_turn() -> None:
    s = ConnectionSession(SessionLimits(in_flight=2))
    streams = [started(s.handle_frame(create(lane))) for lane in ("a", "b", "c")]
    assert streams == [["a"], ["b"], []]
    assert started(s.end_response("a", "r", "t")) == ["c"]


def test_background_work_gets_a_lane_of_its_own() -> None:
    s = ConnectionSession()
    (first,) = started(s.handle_frame(create(background=True)))
    assert first.startswith("background_")
    assert started(s.handle_frame(create())) == [""]


def test_limits_answer_with_their_code_and_keep_the_connection() -> None:
    s = ConnectionSession(SessionLimits(streams=1, waiting=1))
    assert error_code(s.handle_frame(create("no spaces"))) == "invalid_stream_id"
    assert error_code(s.handle_frame(create(""))) == "invalid_stream_id"
    s.handle_frame(create("a"))
    assert error_code(s.handle_frame(create("b"))) == "websocket_stream_limit_reached"
    s.handle_frame(create("a"))
    assert error_code(s.handle_frame(create("a"))) == "queue_full"
    assert error_code(s.handle_frame("{")) == "invalid_json"
    assert started(s.end_response("a", "r", "t")) == ["a"]


def test_each_lane_remembers_its_latest_turn_and_a_failure_forgets_it() -> None:
    s = ConnectionSession()
    s.handle_frame(create("a"))
    s.end_response("a", "resp_1", "one")
    assert s.find_turn("resp_1") == "one"
    s.handle_frame(create("a"))
    s.end_response("a", "resp_2", "two")
    assert (s.find_turn("resp_1"), s.find_turn("resp_2")) == (None, "two")
    s.handle_frame(create("a"))
    s.end_response("a", "resp_3", None)
    assert s.find_turn("resp_2") is None


def test_a_request_refused_before_it_became_a_response_leaves_the_memory_alone() -> None:
    s = ConnectionSession()
    s.handle_frame(create())
    s.end_response("", "resp_1", "one")
    s.handle_frame(create())
    s.end_response("", None, None)
    assert s.find_turn("resp_1") == "one"


def test_steer_and_cancel_are_handed_on() -> None:
    s = ConnectionSession()
    (steer,) = s.handle_frame('{"type":"response.steer","previous_response_id":"r","input":"x"}')
    assert isinstance(steer, ResponseSteer)
    assert s.handle_frame('{"type":"response.cancel","response_id":"r"}') == [CancelResponse("r")]
    s.handle_frame(create())
    s.handle_frame(create())
    told, cancel = s.handle_frame('{"type":"response.cancel"}')
    assert isinstance(told, SendEvent)  # the one that waited ends here, and says so
    assert told.event.error.code == "interrupted"  # type: ignore[union-attr]
    assert cancel == CancelResponse(None)
    assert s.waiting == 0

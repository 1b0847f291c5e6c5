"""A connection's rules: FIFO inside a stream, concurrent across streams, bounded, forgiving of bad frames."""

from __future__ import annotations

import json

from keystroke.protocol import events
from keystroke.protocol.session import Action, Cancel, ConnectionSession, Send, SessionLimits, Start, Steer


def create(stream_id: str | None = None, **fields: object) -> str:
    body = {"type": "response.create", "input": "x", **fields}
    return json.dumps(body if stream_id is None else {**body, "stream_id": stream_id})


def started(actions: list[Action]) -> list[str]:
    return [a.stream for a in actions if isinstance(a, Start)]


def error_code(actions: list[Action]) -> str:
    (action,) = actions
    assert isinstance(action, Send)
    assert isinstance(action.event, events.ErrorEvent)
    assert action.event.status >= 400
    return action.event.error.code


def test_one_response_at_a_time_inside_a_lane_in_order() -> None:
    s = ConnectionSession()
    assert started(s.receive(create("a", metadata={"n": "1"}))) == ["a"]
    assert started(s.receive(create("a", metadata={"n": "2"}))) == []
    (action,) = s.ended("a", "resp_1", "turn")
    assert isinstance(action, Start)
    assert action.request.metadata == {"n": "2"}


def test_lanes_run_side_by_side() -> None:
    s = ConnectionSession()
    assert [started(s.receive(create(lane))) for lane in (None, "a", "b")] == [[""], ["a"], ["b"]]


def test_more_than_the_allowed_responses_in_flight_wait_their_turn() -> None:
    s = ConnectionSession(SessionLimits(in_flight=2))
    streams = [started(s.receive(create(lane))) for lane in ("a", "b", "c")]
    assert streams == [["a"], ["b"], []]
    assert started(s.ended("a", "r", "t")) == ["c"]


def test_background_work_gets_a_lane_of_its_own() -> None:
    s = ConnectionSession()
    (first,) = started(s.receive(create(background=True)))
    assert first.startswith("background_")
    assert started(s.receive(create())) == [""]


def test_limits_answer_with_their_code_and_keep_the_connection() -> None:
    s = ConnectionSession(SessionLimits(streams=1, waiting=1))
    assert error_code(s.receive(create("no spaces"))) == "invalid_stream_id"
    assert error_code(s.receive(create(""))) == "invalid_stream_id"
    s.receive(create("a"))
    assert error_code(s.receive(create("b"))) == "websocket_stream_limit_reached"
    s.receive(create("a"))
    assert error_code(s.receive(create("a"))) == "queue_full"
    assert error_code(s.receive("{")) == "invalid_json"
    assert started(s.ended("a", "r", "t")) == ["a"]


def test_each_lane_remembers_its_latest_turn_and_a_failure_forgets_it() -> None:
    s = ConnectionSession()
    s.receive(create("a"))
    s.ended("a", "resp_1", "one")
    assert s.recall("resp_1") == "one"
    s.receive(create("a"))
    s.ended("a", "resp_2", "two")
    assert (s.recall("resp_1"), s.recall("resp_2")) == (None, "two")
    s.receive(create("a"))
    s.ended("a", "resp_3", None)
    assert s.recall("resp_2") is None


def test_a_request_refused_before_it_became_a_response_leaves_the_memory_alone() -> None:
    s = ConnectionSession()
    s.receive(create())
    s.ended("", "resp_1", "one")
    s.receive(create())
    s.ended("", None, None)
    assert s.recall("resp_1") == "one"


def test_steer_and_cancel_are_handed_on() -> None:
    s = ConnectionSession()
    (steer,) = s.receive('{"type":"response.steer","previous_response_id":"r","input":"x"}')
    assert isinstance(steer, Steer)
    assert s.receive('{"type":"response.cancel","response_id":"r"}') == [Cancel("r")]
    s.receive(create())
    s.receive(create())
    told, cancel = s.receive('{"type":"response.cancel"}')
    assert isinstance(told, Send)  # the one that waited ends here, and says so
    assert told.event.error.code == "interrupted"  # type: ignore[union-attr]
    assert cancel == Cancel(None)
    assert s.waiting == 0

"""The codec: what is valid becomes a type, what is not becomes one clear sentence."""

from __future__ import annotations

import json

import pytest

from keystroke.errors import KeystrokeError
from keystroke.protocol import codec, events
from keystroke.protocol.items import ContentPart, Item
from keystroke.protocol.requests import ResponseCreate, ResponseSteer


def test_a_create_event_reads_strings_and_item_lists_and_ignores_what_it_does_not_know() -> None:
    event = codec.decode_client_event(
        json.dumps(
            {
                "type": "response.create",
                "input": [
                    {"role": "user", "content": "a"},
                    {
                        "type": "message",
                        "role": "developer",
                        "content": [{"type": "input_text", "text": "b"}],
                    },
                    {"type": "something_new", "payload": {"x": 1}},
                ],
                "client_metadata": {"k": "v"},
                "stream_id": "s1",
            }
        )
    )
    assert isinstance(event, ResponseCreate)
    assert event.stream_id == "s1"
    assert event.input == [
        Item(role="user", content="a"),
        Item(role="developer", content=[ContentPart(text="b")]),
        Item(type="something_new"),
    ]


def test_a_steer_event_needs_its_target() -> None:
    steer = codec.decode_client_event(b'{"type":"response.steer","previous_response_id":"r","input":"x"}')
    assert steer == ResponseSteer(previous_response_id="r", input="x")


@pytest.mark.parametrize(
    ("frame", "code", "param"),
    [
        ("{", "invalid_json", None),
        (b"\xff\xfe", "invalid_json", None),
        ("null", "invalid_input", None),
        ("[]", "invalid_input", None),
        ("{}", "unknown_event", "type"),
        ('{"type":"response.audio"}', "unknown_event", "type"),
        ('{"type":"response.create","temperature":9}', "invalid_input", "temperature"),
        ('{"type":"response.create","max_output_tokens":0}', "invalid_input", "max_output_tokens"),
        ('{"type":"response.create","input":[{"role":7}]}', "invalid_input", "input[0].role"),
        ('{"type":"response.create","stop":[""]}', "invalid_input", "stop[0]"),
        ('{"type":"response.create","service_tier":""}', "invalid_input", "service_tier"),
        ('{"type":"response.steer","input":"x"}', "invalid_input", "previous_response_id"),
    ],
)
def test_bad_frames_become_typed_errors_that_name_the_field(
    frame: str | bytes, code: str, param: str | None
) -> None:
    with pytest.raises(KeystrokeError) as caught:
        codec.decode_client_event(frame)
    error = caught.value
    assert (error.code, error.param, error.status) == (code, param, 400)
    assert error.message.endswith(".")
    assert "$" not in error.message


def test_deep_nesting_is_refused_not_crashed_on() -> None:
    with pytest.raises(KeystrokeError):
        codec.decode_client_event('{"type":"response.create","tool_choice":' + "[" * 200_000)


def test_every_event_survives_the_wire() -> None:
    delta = events.TextDelta("msg", 0, 0, "é\n", [], 4, "lane")
    assert codec.decode_server_event(codec.encode(delta)) == delta
    name, data, end, _ = codec.encode_sse(delta).split(b"\n")
    assert name == b"event: response.output_text.delta"
    assert json.loads(data.removeprefix(b"data: "))["delta"] == "é\n"
    assert end == b""


def test_the_lane_is_written_only_where_the_request_named_one() -> None:
    assert "stream_id" not in json.loads(codec.encode(events.TextDelta("m", 0, 0, "x", [], 0)))

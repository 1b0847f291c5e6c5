"""JSON codec of the protocol: bytes to typed requests, typed events to bytes.

There is one encoder, and one decoder per type. A body that does not fit its type raises an error whose one
sentence names the field; msgspec's wording of paths never reaches a user.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from keystroke.errors import InputError, KeystrokeError
from keystroke.protocol.events import Event, event_type
from keystroke.protocol.faults import InvalidJson, UnknownEvent
from keystroke.protocol.live_messages import LiveEvent, LiveRequest
from keystroke.protocol.requests import ClientEvent
from keystroke.protocol.tasks import TaskEvent

T = TypeVar("T")

_encoder = msgspec.json.Encoder()

# Event types that a socket accepts, for the error about an unknown one.
_READS = {
    "event": "response.create, response.steer, response.cancel and response.resume",
    "live event": "buffer.open, buffer.change, buffer.close, complete, next_edit.ask, feedback, cancel, "
    "problems.ask, refactor.ask and edit.ask",
}
_PATH = re.compile(r" - at `(key in )?\$\.?(?P<path>[^`]*)`$")

encode = _encoder.encode


def encode_sse(event: Event) -> bytes:
    """The event as one server-sent event, `event:` and `data:` lines."""
    return b"event: %b\ndata: %b\n\n" % (event_type(event).encode(), _encoder.encode(event))


def encode_numbered(event: TaskEvent) -> bytes:
    """A task's event as one server-sent event whose id is its number, so that a browser can resume."""
    kind = event_type(event).encode()
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (event.sequence_number, kind, _encoder.encode(event))


def encode_data(body: Any) -> bytes:
    """A body as a server-sent event without a name, as chat and completion clients read it."""
    return b"data: %b\n\n" % _encoder.encode(body)


def encode_line(body: Any) -> bytes:
    """A body as a line of JSON."""
    return _encoder.encode(body) + b"\n"


def encode_comment(body: Any) -> bytes:
    """A body as a comment between server-sent events, which ordinary clients ignore."""
    return b": %b\n\n" % _encoder.encode(body)


SSE_DONE = b"data: [DONE]\n\n"


def _decode(decoder: msgspec.json.Decoder[T], data: bytes | str, what: str) -> T:
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise _explain(error, what) from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InvalidJson(f"The {what} is not valid JSON ({error}); send one JSON object.") from None
    except RecursionError:
        raise InvalidJson(f"The {what} is nested too deeply; flatten it.") from None


def _explain(error: msgspec.ValidationError, what: str) -> KeystrokeError:
    text = str(error)
    match = _PATH.search(text)
    path = match["path"] if match else ""
    rule = text[: match.start()] if match else text
    if path == "type" and what in _READS:
        return UnknownEvent(f"{rule}: the server reads {_READS[what]}.", param="type")
    missing = re.search(r"missing required field `([^`]+)`", rule)
    if missing:
        field = f"{path}.{missing[1]}" if path else missing[1]
        if field == "type" and what in _READS:
            example = _READS[what].partition(",")[0]
            return UnknownEvent(f"An event needs a `type`, for example {example}.", param="type")
        return InputError(f"{field} is missing from the {what}.", param=field)
    rule = rule.replace("`", "").lower()
    return InputError(f"{path or 'The ' + what}: {rule}.", param=path or None)


def _decoder(kind: Any, what: str) -> Callable[[bytes | str], Any]:
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(kind)
    return lambda data: _decode(decoder, data, what)


# Each raises ProtocolError for an event this version does not know.
decode_client_event: Callable[[bytes | str], ClientEvent] = _decoder(ClientEvent, "event")
decode_server_event: Callable[[bytes | str], Event] = _decoder(Event, "event")
decode_live_request: Callable[[bytes | str], LiveRequest] = _decoder(LiveRequest, "live event")
decode_live_event: Callable[[bytes | str], LiveEvent] = _decoder(LiveEvent, "live event")
decode_task_event: Callable[[bytes | str], TaskEvent] = _decoder(TaskEvent, "event")


def body_decoder(kind: type) -> Callable[[bytes | str], Any]:
    """A decoder of HTTP bodies. It raises InvalidJson, or InputError that names the field."""
    return _decoder(kind, "request body")

"""The one place where raw JSON exists: bytes to typed requests, typed events to bytes.

One encoder and one decoder per request type, made when the module is imported. A body that does not
fit its type becomes one sentence naming the field; the decoder's own wording of paths never reaches a user.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from keystroke.errors import InputError, KeystrokeError
from keystroke.protocol.events import Event, event_type
from keystroke.protocol.faults import InvalidJson, UnknownEvent
from keystroke.protocol.live_messages import LiveEvent, LiveRequest
from keystroke.protocol.requests import (
    ChatRequest,
    ClientEvent,
    CompletionRequest,
    CreateRequest,
    InfillRequest,
)
from keystroke.protocol.status import LoadRequest
from keystroke.protocol.tasks import (
    TaskAnswer,
    TaskApply,
    TaskCreate,
    TaskEvent,
    TaskResume,
    TaskSteer,
)

T = TypeVar("T")

_encoder = msgspec.json.Encoder()
_CLIENT_EVENTS: msgspec.json.Decoder[ClientEvent] = msgspec.json.Decoder(ClientEvent)
_SERVER_EVENTS: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
_LIVE_REQUESTS: msgspec.json.Decoder[LiveRequest] = msgspec.json.Decoder(LiveRequest)
_LIVE_EVENTS: msgspec.json.Decoder[LiveEvent] = msgspec.json.Decoder(LiveEvent)
_CREATE = msgspec.json.Decoder(CreateRequest)
_CHAT = msgspec.json.Decoder(ChatRequest)
_COMPLETION = msgspec.json.Decoder(CompletionRequest)
_INFILL = msgspec.json.Decoder(InfillRequest)
_LOAD = msgspec.json.Decoder(LoadRequest)
_TASKS: dict[type, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind) for kind in (TaskCreate, TaskSteer, TaskAnswer, TaskApply, TaskResume)
}
_TASK_EVENTS: msgspec.json.Decoder[TaskEvent] = msgspec.json.Decoder(TaskEvent)

# What a socket reads, for the sentence about an event that it does not.
_READS = {
    "event": "response.create, response.steer, response.cancel and response.resume",
    "live event": "buffer.open, buffer.change, buffer.close, complete, next_edit.ask, feedback, cancel, "
    "problems.ask, refactor.ask and edit.ask",
}
_PATH = re.compile(r" - at `(key in )?\$\.?(?P<path>[^`]*)`$")

encode = _encoder.encode


def encode_text(event: Any) -> str:
    """The event as the text of one WebSocket frame."""
    return _encoder.encode(event).decode()


def encode_sse(event: Event) -> bytes:
    """The event as one server-sent event, `event:` and `data:` lines."""
    return b"event: %b\ndata: %b\n\n" % (event_type(event).encode(), _encoder.encode(event))


def encode_numbered(event: TaskEvent) -> bytes:
    """A task's event as one server-sent event whose id is its number, so that a browser can come back."""
    kind = event_type(event).encode()
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (event.sequence_number, kind, _encoder.encode(event))


def encode_data(body: Any) -> bytes:
    """A body as a nameless server-sent event, the form chat and completion clients read."""
    return b"data: %b\n\n" % _encoder.encode(body)


def encode_comment(body: Any) -> bytes:
    """A body as a comment between server-sent events: only those who look for it see it."""
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


def decode_client_event(data: bytes | str) -> ClientEvent:
    return _decode(_CLIENT_EVENTS, data, "event")


def decode_server_event(data: bytes | str) -> Event:
    """What a client of ours reads; raises ProtocolError on an event this version does not know."""
    return _decode(_SERVER_EVENTS, data, "event")


def decode_live_request(data: bytes | str) -> LiveRequest:
    return _decode(_LIVE_REQUESTS, data, "live event")


def decode_live_event(data: bytes | str) -> LiveEvent:
    """What a live client reads; raises ProtocolError on an event this version does not know."""
    return _decode(_LIVE_EVENTS, data, "live event")


def decode_create(data: bytes) -> CreateRequest:
    return _decode(_CREATE, data, "request body")


def decode_chat(data: bytes) -> ChatRequest:
    return _decode(_CHAT, data, "request body")


def decode_completion(data: bytes) -> CompletionRequest:
    return _decode(_COMPLETION, data, "request body")


def decode_load(data: bytes) -> LoadRequest:
    return _decode(_LOAD, data, "request body")


def decode_infill(data: bytes) -> InfillRequest:
    return _decode(_INFILL, data, "request body")


def decode_task(data: bytes, kind: type[T]) -> T:
    """The body of a request about a task."""
    decoder: msgspec.json.Decoder[T] = _TASKS[kind]
    return _decode(decoder, data, "request body")


def decode_task_event(data: bytes | str) -> TaskEvent:
    """What a client that watches a task reads; ProtocolError on an event this version does not know."""
    return _decode(_TASK_EVENTS, data, "event")

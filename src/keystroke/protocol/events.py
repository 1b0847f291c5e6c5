"""The server's events on a response stream, one tagged struct per event.

An event never changes after it is created. `stream_id` is present exactly when the request named a stream.
Every response ends with exactly one event of TERMINAL.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from keystroke.protocol.items import ChosenToken, Item, OutputItem, OutputText, ReasoningText
from keystroke.protocol.response import ErrorDetail, Receipt, Response

StreamId = str | UnsetType


class ResponseEvent(Struct, tag_field="type", kw_only=True):
    """Events that carry the whole response object."""

    response: Response
    sequence_number: int
    stream_id: StreamId = UNSET


class Created(ResponseEvent, tag="response.created"):
    pass


class Queued(ResponseEvent, tag="response.queued"):
    pass


class InProgress(ResponseEvent, tag="response.in_progress"):
    pass


class Completed(ResponseEvent, tag="response.completed"):
    pass


class IncompleteEvent(ResponseEvent, tag="response.incomplete"):
    pass


class Failed(ResponseEvent, tag="response.failed"):
    pass


class Cancelled(ResponseEvent, tag="response.cancelled"):
    pass


class ItemEvent(Struct, tag_field="type"):
    item: OutputItem
    output_index: int
    sequence_number: int
    stream_id: StreamId = UNSET


class ItemAdded(ItemEvent, tag="response.output_item.added"):
    pass


class ItemDone(ItemEvent, tag="response.output_item.done"):
    pass


class ContentEvent(Struct, tag_field="type"):
    item_id: str
    output_index: int
    content_index: int


class PartEvent(ContentEvent):
    part: OutputText | ReasoningText
    sequence_number: int
    stream_id: StreamId = UNSET


class PartAdded(PartEvent, tag="response.content_part.added"):
    pass


class PartDone(PartEvent, tag="response.content_part.done"):
    pass


class TextDelta(ContentEvent, tag="response.output_text.delta"):
    delta: str
    logprobs: list[ChosenToken]
    sequence_number: int
    stream_id: StreamId = UNSET


class TextDone(ContentEvent, tag="response.output_text.done"):
    text: str
    logprobs: list[ChosenToken]
    sequence_number: int
    stream_id: StreamId = UNSET


class ReasoningDelta(ContentEvent, tag="response.reasoning_text.delta"):
    delta: str
    sequence_number: int
    stream_id: StreamId = UNSET


class ReasoningDone(ContentEvent, tag="response.reasoning_text.done"):
    text: str
    sequence_number: int
    stream_id: StreamId = UNSET


class CallDelta(Struct, tag_field="type"):
    item_id: str
    output_index: int
    delta: str
    sequence_number: int
    stream_id: StreamId = UNSET


class ArgumentsDelta(CallDelta, tag="response.function_call_arguments.delta"):
    pass


class ArgumentsDone(Struct, tag_field="type", tag="response.function_call_arguments.done"):
    item_id: str
    output_index: int
    name: str
    arguments: str
    sequence_number: int
    stream_id: StreamId = UNSET


class ToolInputDelta(CallDelta, tag="response.custom_tool_call_input.delta"):
    pass


class ToolInputDone(Struct, tag_field="type", tag="response.custom_tool_call_input.done"):
    item_id: str
    output_index: int
    input: str
    sequence_number: int
    stream_id: StreamId = UNSET


class Compacting(Struct, tag_field="type", tag="response.compaction.compacting"):
    """Older items were replaced by the compaction item of this id."""

    item_id: str
    output_index: int
    sequence_number: int
    stream_id: StreamId = UNSET


class SteerRef(Struct, frozen=True):
    id: str
    previous_response_id: str


class SteerReturned(Struct, frozen=True, omit_defaults=True):
    """Steering input that was not used, returned to the client."""

    previous_response_id: str
    input: str | list[Item]
    id: str | None = None


class RequiredInput(Struct, frozen=True, omit_defaults=True):
    type: str
    call_id: str
    name: str | None = None


class SteerAccepted(Struct, tag_field="type", tag="response.steer.accepted"):
    steer: SteerRef
    sequence_number: int
    stream_id: StreamId = UNSET


class SteerPending(Struct, tag_field="type", tag="response.steer.pending"):
    steer: SteerRef
    required_input: list[RequiredInput]
    sequence_number: int
    reason: str = "waiting_for_required_input"
    stream_id: StreamId = UNSET


class SteerError(Struct, frozen=True):
    code: str
    message: str
    type: str = "invalid_request_error"


class SteerFailed(Struct, tag_field="type", tag="response.steer.failed"):
    steer: SteerReturned
    error: SteerError
    sequence_number: int
    stream_id: StreamId = UNSET


class TimingMetrics(Struct, frozen=True):
    """Where the time of a response went, by the names that Codex reads. Milliseconds."""

    responses_duration_excl_engine_and_client_tool_time_ms: float
    engine_service_total_ms: float
    engine_iapi_ttft_total_ms: float
    engine_service_ttft_total_ms: float
    engine_iapi_tbt_across_engine_calls_ms: float
    engine_service_tbt_across_engine_calls_ms: float


class WebSocketTiming(Struct, tag_field="type", tag="responsesapi.websocket_timing"):
    """Precedes the end of a response on connections that asked for it with a header; it is no event of the
    response, so it has no number."""

    timing_metrics: TimingMetrics
    stream_id: StreamId = UNSET


def timing_metrics(receipt: Receipt) -> TimingMetrics:
    engine = receipt.prefill_ms + receipt.decode_ms
    return TimingMetrics(
        round(max(0.0, receipt.total_ms - engine), 3),
        round(engine, 3),
        receipt.first_token_ms,
        receipt.prefill_ms,
        receipt.token_p50_ms,
        receipt.token_p50_ms,
    )


class ErrorEvent(Struct, tag_field="type", tag="error"):
    """A request that never became a response, or a frame that could not be read."""

    status: int
    error: ErrorDetail
    stream_id: StreamId = UNSET
    headers: dict[str, str] | UnsetType = UNSET


Event = (
    Created | Queued | InProgress | Completed | IncompleteEvent | Failed | Cancelled | ItemAdded |
    ItemDone | PartAdded | PartDone | TextDelta | TextDone | ReasoningDelta | ReasoningDone |
    ArgumentsDelta | ArgumentsDone | ToolInputDelta | ToolInputDone | Compacting | SteerAccepted |
    SteerPending | SteerFailed | ErrorEvent
)  # fmt: skip

TERMINAL = (Completed, IncompleteEvent, Failed, Cancelled)


def event_type(event: Any) -> str:
    """The wire name of an event."""
    return str(type(event).__struct_config__.tag)

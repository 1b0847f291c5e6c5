"""The wire of Anthropic's Messages API: requests, the message, the events of its stream, and errors.

Input is decoded leniently, because clients differ and send newer block types; output is strict, one tagged
struct per kind.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from keystroke.errors import ContextOverflow, Interrupted, KeystrokeError
from keystroke.protocol.requests import Name, StopString, Temperature, Tokens, TopK, TopP
from keystroke.protocol.response import Compacted, Receipt, Routing, Shortened

# Requests


class MessagesBlock(Struct, frozen=True):
    """One block of content that a client sends. `type` decides which fields matter."""

    type: str = "text"
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: str | list[MessagesBlock] | dict[str, Any] | None = None
    is_error: bool | None = None
    source: dict[str, Any] | None = None
    title: str | None = None
    thinking: str | None = None
    cache_control: dict[str, Any] | None = None


class MessagesInput(Struct, frozen=True):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[MessagesBlock]


class MessagesTool(Struct, frozen=True):
    """A tool on offer. Tools with a `type` other than `custom` run at the original and are left out."""

    name: Annotated[str, Meta(max_length=256)]
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None


class MessagesToolChoice(Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessagesThinking(Struct, frozen=True):
    type: str
    budget_tokens: int | None = None
    display: str | None = None


class MessagesOutputFormat(Struct, frozen=True):
    type: str
    schema: dict[str, Any] | None = None


class MessagesOutput(Struct, frozen=True):
    effort: str | None = None
    format: MessagesOutputFormat | None = None


class MessagesPrompt(Struct, kw_only=True):
    """The body of `POST /v1/messages/count_tokens`, and what the request for a message shares with it."""

    messages: Annotated[list[MessagesInput], Meta(min_length=1)]
    model: Name = "auto"
    system: str | list[MessagesBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: MessagesThinking | None = None
    output_config: MessagesOutput | None = None
    output_format: MessagesOutputFormat | None = None
    cache_control: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None


class MessagesRequest(MessagesPrompt, kw_only=True):
    """The body of `POST /v1/messages`."""

    max_tokens: Tokens | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=16)] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    service_tier: str | None = None
    metadata: dict[str, Any] | None = None
    container: Any = None
    thread: Any = None


# The message


class TextBlock(Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


MessagesOutputBlock = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessagesUsage(Struct, frozen=True):
    """Tokens; the prompt's are `input_tokens` plus those read from the cache."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    service_tier: str = "standard"


class MessagesReply(Struct):
    """A message of the model. `receipt`, `routing` and `shortened` are extensions, as in other APIs."""

    id: str
    model: str
    content: list[MessagesOutputBlock]
    usage: MessagesUsage
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    receipt: Receipt | UnsetType = UNSET
    routing: Routing | UnsetType = UNSET
    shortened: Shortened | UnsetType = UNSET
    compacted: Compacted | UnsetType = UNSET
    notes: list[str] | UnsetType = UNSET  # request fields that were ignored, and why


class MessagesTokenCount(Struct, frozen=True):
    input_tokens: int


# Events of a stream


class MessageStart(Struct, tag_field="type", tag="message_start"):
    message: MessagesReply


class BlockStart(Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: MessagesOutputBlock


class BlockTextDelta(Struct, tag_field="type", tag="text_delta"):
    text: str


class BlockThinkingDelta(Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class BlockSignatureDelta(Struct, tag_field="type", tag="signature_delta"):
    signature: str


class BlockInputDelta(Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockDelta(Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: BlockTextDelta | BlockThinkingDelta | BlockSignatureDelta | BlockInputDelta


class BlockStop(Struct, tag_field="type", tag="content_block_stop"):
    index: int


class MessageEnding(Struct, frozen=True):
    stop_reason: StopReason
    stop_sequence: str | None = None


class MessageDelta(Struct, tag_field="type", tag="message_delta"):
    delta: MessageEnding
    usage: MessagesUsage
    receipt: Receipt | UnsetType = UNSET
    compacted: Compacted | UnsetType = UNSET
    notes: list[str] | UnsetType = UNSET


class MessageStop(Struct, tag_field="type", tag="message_stop"):
    pass


class MessagesPing(Struct, tag_field="type", tag="ping"):
    pass


# Errors


class MessagesErrorDetail(Struct, frozen=True):
    type: str
    message: str
    code: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET


class MessagesError(Struct, tag_field="type", tag="error"):
    """The body of an error, and the event that ends a stream which failed."""

    error: MessagesErrorDetail
    request_id: str | None = None


MessagesEvent = (
    MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | MessagesPing |
    MessagesError
)  # fmt: skip

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def messages_error(error: KeystrokeError, request_id: str | None = None) -> MessagesError:
    """The error as Anthropic's clients read it. `code` and `param` are extensions."""
    kind = _ERROR_TYPES.get(error.status, "api_error")
    if isinstance(error, Interrupted):
        kind = "timeout_error"
    # Clients compact the conversation when they read these words.
    text = f"prompt is too long: {error.message}" if isinstance(error, ContextOverflow) else error.message
    return MessagesError(MessagesErrorDetail(kind, text, error.code, error.param), request_id)

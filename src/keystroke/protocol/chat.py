"""Response bodies of the chat, completion and infill endpoints."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from keystroke.protocol.items import ChosenToken
from keystroke.protocol.response import Compacted, Receipt, Routing, Shortened


class PromptTokenDetails(Struct, frozen=True):
    cached_tokens: int = 0


class CompletionTokenDetails(Struct, frozen=True):
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class ChatUsage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokenDetails = PromptTokenDetails()
    completion_tokens_details: CompletionTokenDetails = CompletionTokenDetails()


class FunctionPiece(Struct, frozen=True, omit_defaults=True):
    name: str | None = None
    arguments: str = ""


class ToolCall(Struct, frozen=True):
    id: str
    function: FunctionPiece
    type: str = "function"


class ToolCallPiece(Struct, frozen=True, omit_defaults=True):
    index: int
    function: FunctionPiece
    id: str | None = None
    type: str | None = None


class ChatLogprobs(Struct, frozen=True):
    content: list[ChosenToken]


class AssistantMessage(Struct, frozen=True):
    content: str | None
    role: str = "assistant"
    refusal: str | None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatDelta(Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallPiece] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    message: AssistantMessage
    finish_reason: str
    index: int = 0
    logprobs: ChatLogprobs | None = None


class ChunkChoice(Struct, frozen=True):
    delta: ChatDelta
    finish_reason: str | None = None
    index: int = 0
    logprobs: ChatLogprobs | None = None


class ChatCompletion(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: ChatUsage
    object: Literal["chat.completion"] = "chat.completion"
    service_tier: str = "default"
    receipt: Receipt | UnsetType = UNSET
    routing: Routing | UnsetType = UNSET
    shortened: Shortened | UnsetType = UNSET
    compacted: Compacted | UnsetType = UNSET
    notes: list[str] | UnsetType = UNSET  # request fields that were ignored, and why


class ChatChunk(Struct):
    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: ChatUsage | UnsetType = UNSET
    shortened: Shortened | UnsetType = UNSET  # these three in the first of an answer
    compacted: Compacted | UnsetType = UNSET
    notes: list[str] | UnsetType = UNSET


class TextLogprobs(Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(Struct, frozen=True):
    text: str
    finish_reason: str | None = None
    index: int = 0
    logprobs: TextLogprobs | None = None


class TextCompletion(Struct):
    id: str
    created: int
    model: str
    choices: list[TextChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: ChatUsage | UnsetType = UNSET
    receipt: Receipt | UnsetType = UNSET
    routing: Routing | UnsetType = UNSET


class Timings(Struct, frozen=True):
    """llama.cpp's timing block: editors show it in the status line."""

    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float


class Infill(Struct):
    content: str
    model: str
    stop: bool
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    truncated: bool
    timings: Timings
    stop_type: str = "none"
    generation_settings: dict[str, int] = {}

"""The wire of Ollama's API: requests, the lines of its streams, and descriptions of models.

Durations are nanoseconds and times RFC 3339, as Ollama writes them.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from keystroke.protocol.items import ChosenToken
from keystroke.protocol.requests import Logprobs, Name, Seed, Stop, Temperature, TopK, TopP
from keystroke.protocol.response import Compacted, Routing, Shortened

# Requests


class OllamaFunctionCall(Struct, frozen=True):
    name: str
    arguments: dict[str, Any] = {}


class OllamaToolCall(Struct, frozen=True):
    function: OllamaFunctionCall
    id: str | None = None


class OllamaMessage(Struct, frozen=True):
    role: Annotated[str, Meta(max_length=32)]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaFunction(Struct, frozen=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class OllamaTool(Struct, frozen=True):
    function: OllamaFunction
    type: str = "function"


class OllamaOptions(Struct, frozen=True):
    """Options that change an answer here; the others of Ollama are ignored."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    seed: Seed | None = None
    num_predict: Annotated[int, Meta(ge=-2, le=10_000_000)] | None = None
    stop: Stop | None = None
    # Noted in the reply where they are set: they would change the answer.
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repeat_penalty: float | None = None
    mirostat: int | None = None
    min_p: float | None = None
    tfs_z: float | None = None
    typical_p: float | None = None


class OllamaGenerationFields(Struct, kw_only=True):
    """Fields that chat and generate share. A reply is a stream unless `stream` is false."""

    model: Name = "auto"
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    think: bool | str | None = None
    keep_alive: float | str | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None


class OllamaChatRequest(OllamaGenerationFields, kw_only=True):
    """The body of `POST /api/chat`. Without messages the model is loaded."""

    messages: list[OllamaMessage] | None = None
    tools: list[OllamaTool] | None = None


class OllamaGenerateRequest(OllamaGenerationFields, kw_only=True):
    """The body of `POST /api/generate`. Without a prompt the model is loaded."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    template: str | None = None
    context: list[int] | None = None
    images: list[Any] | None = None


class OllamaModelRequest(Struct, kw_only=True):
    """The body of requests that name a model: show, pull. `name` is the older field."""

    model: Name | None = None
    name: Name | None = None
    verbose: bool | None = None
    stream: bool | None = None


# Replies


class OllamaTimings(Struct, kw_only=True):
    """What the last line of an answer adds."""

    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    prompt_cached_count: int | UnsetType = UNSET  # ours: of the prompt's tokens, those that were reused
    routing: Routing | UnsetType = UNSET
    shortened: Shortened | UnsetType = UNSET
    compacted: Compacted | UnsetType = UNSET
    notes: list[str] | UnsetType = UNSET  # options that were ignored


class OllamaAnswerMessage(Struct, frozen=True):
    content: str = ""
    role: str = "assistant"
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaToolCall] | UnsetType = UNSET


class OllamaChatReply(OllamaTimings, kw_only=True):
    """One line of a chat stream, or the whole answer."""

    model: str
    created_at: str
    message: OllamaAnswerMessage
    done: bool = False
    logprobs: list[ChosenToken] | UnsetType = UNSET


class OllamaGenerateReply(OllamaTimings, kw_only=True):
    """One line of a generate stream, or the whole answer."""

    model: str
    created_at: str
    response: str
    done: bool = False
    thinking: str | UnsetType = UNSET
    logprobs: list[ChosenToken] | UnsetType = UNSET


class OllamaDetails(Struct, frozen=True):
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    parent_model: str = ""


class OllamaModel(Struct, frozen=True, kw_only=True):
    """A model in the list of models, or of loaded ones."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    modified_at: str | UnsetType = UNSET
    expires_at: str | UnsetType = UNSET
    size_vram: int | UnsetType = UNSET
    context_length: int | UnsetType = UNSET


class OllamaModels(Struct, frozen=True):
    models: list[OllamaModel]


class OllamaShown(Struct, frozen=True, kw_only=True):
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
    license: str = ""


class OllamaVersion(Struct, frozen=True):
    version: str
    keystroke: str


class OllamaStatus(Struct, frozen=True):
    status: str


class OllamaError(Struct, frozen=True):
    error: str

"""Requests: the bodies of responses, chat, completions and infill, and the WebSocket's client events.

Bounds that do not depend on a model are part of the type, so the codec, the JSON Schema and the OpenAPI
document state each rule once. Unknown fields are ignored, because clients may be newer than servers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from keystroke.protocol.items import CacheTtl, ContentPart, Item, Tool

Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=0, le=1_000_000)]
Tokens = Annotated[int, Meta(ge=1, le=10_000_000)]
Logprobs = Annotated[int, Meta(ge=0, le=20)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Name = Annotated[str, Meta(max_length=256)]
StopString = Annotated[str, Meta(min_length=1, max_length=256)]
Stop = StopString | Annotated[list[StopString], Meta(max_length=16)]
# auto, default, priority, fast, ultrafast and flex are known; a tier of a newer client counts as default.
TierName = Annotated[str, Meta(min_length=1, max_length=64)]
PriorityName = Literal["ghost", "next_edit", "edit", "audit", "chat", "background"]


class Prediction(Struct, frozen=True):
    """Output the client expects. It becomes the draft, so the parts that are right cost almost nothing."""

    content: str | list[ContentPart]
    type: str = "content"


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ContextManagement(Struct, frozen=True):
    """`compaction`: where the input has more tokens than the threshold, older turns become a summary."""

    type: Literal["compaction"]
    compact_threshold: Tokens | None = None


class PromptCacheOptions(Struct, frozen=True, omit_defaults=True):
    """`explicit`: only prefixes that a `prompt_cache_breakpoint` marks are protected from eviction, for the
    time `ttl` (`30m`, `12h`). `prewarm`: the prompt is read into the cache, and nothing is generated."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: CacheTtl | None = None
    prewarm: bool | None = None
    comparison_response_id: Name | None = None


class ReasoningOptions(Struct, frozen=True, omit_defaults=True):
    """How much a model reasons, and what of it is returned. Efforts of newer clients are accepted."""

    effort: Annotated[str, Meta(min_length=1, max_length=32)] | None = None
    summary: Annotated[str, Meta(max_length=32)] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: Annotated[str, Meta(max_length=32)] | None = None
    generate_summary: Annotated[str, Meta(max_length=32)] | None = None


class SamplingFields(Struct, kw_only=True):
    """Fields of every request that generates text."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    stream: bool | None = None
    buffer: Name | None = None


class GenerationFields(SamplingFields, kw_only=True):
    """Fields that responses, chat and completions share. `top_k`, `seed`, `stop`, `structured_outputs` (as in
    vLLM), `priority`, `drafts` and `buffer` are extensions where the API of a request does not have them."""

    model: Name = "auto"
    service_tier: TierName | None = None
    prediction: Prediction | None = None
    structured_outputs: dict[str, Any] | None = None
    user: str | None = None
    priority: PriorityName | None = None
    lane: PriorityName | None = None  # the older name of `priority`
    drafts: bool | None = None  # False: decode without drafts; the text is the same


class ConstraintFields(GenerationFields, kw_only=True):
    """Fields that chat and completions share: limits, and constraints as llama.cpp and vLLM name them."""

    max_tokens: Tokens | None = None
    n: Annotated[int, Meta(ge=1, le=8)] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class CreateRequest(GenerationFields, kw_only=True):
    """The body of `POST /v1/responses`."""

    input: str | list[Item] | None = None
    instructions: str | None = None
    previous_response_id: Name | None = None
    tools: list[Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    top_logprobs: Logprobs | None = None
    max_output_tokens: Tokens | None = None
    max_tool_calls: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    include: list[str] | None = None
    store: bool | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    metadata: dict[str, str] | None = None
    moderation: Any = None
    reasoning: ReasoningOptions | None = None
    text: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    context_management: list[ContextManagement] | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=1024)] | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Any = None
    safety_identifier: Name | None = None
    stream_options: StreamOptions | None = None
    access_programs: Any = None
    image: Any = None
    # "continue": the response goes on for a while after its connection breaks and can be resumed.
    on_disconnect: Literal["cancel", "continue"] | None = None


class ResponseCreate(CreateRequest, tag_field="type", tag="response.create", kw_only=True):
    """`response.create` on the socket: the same body, plus warm-up and streams."""

    generate: bool | None = None
    stream_id: str | None = None


class ResponseSteer(Struct, tag_field="type", tag="response.steer", kw_only=True):
    previous_response_id: Name
    input: str | list[Item]


class ResponseCancel(Struct, tag_field="type", tag="response.cancel", kw_only=True):
    """Our extension: stop one response, or without an id every response of this connection."""

    response_id: Name | None = None


class ResponseResume(Struct, tag_field="type", tag="response.resume", kw_only=True):
    """Our extension: resume a response whose connection broke, after the event of this number (-1: from the
    first). `stream_id` is the one it was requested on."""

    response_id: Name
    starting_after: Annotated[int, Meta(ge=-1)] = -1
    stream_id: str | None = None


ClientEvent = ResponseCreate | ResponseSteer | ResponseCancel | ResponseResume


class ToolCallFunction(Struct, frozen=True):
    name: str
    arguments: str = ""


class ChatToolCall(Struct, frozen=True):
    function: ToolCallFunction
    id: str | None = None
    type: str = "function"


class ChatMessage(Struct, frozen=True):
    role: Annotated[str, Meta(max_length=32)]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ChatToolCall] | None = None
    tool_call_id: str | None = None


class ChatToolFunction(Struct, frozen=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatCustomTool(Struct, frozen=True):
    name: str
    description: str | None = None
    format: dict[str, Any] | None = None


class ChatTool(Struct, frozen=True):
    type: str = "function"
    function: ChatToolFunction | None = None
    custom: ChatCustomTool | None = None


class ChatRequest(ConstraintFields, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    tools: list[ChatTool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    top_logprobs: Logprobs | None = None
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    functions: list[ChatToolFunction] | None = None
    function_call: Any = None
    reasoning_effort: Annotated[str, Meta(min_length=1, max_length=32)] | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=1024)] | None = None
    verbosity: Annotated[str, Meta(max_length=32)] | None = None
    modalities: list[Literal["text"]] | None = None
    audio: Any = None
    web_search_options: Any = None
    moderation: Any = None
    metadata: Any = None
    store: bool | None = None
    safety_identifier: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None


class CompletionRequest(ConstraintFields, kw_only=True):
    """The body of `POST /v1/completions`. With `suffix` the model fills in the middle."""

    prompt: str | Annotated[list[str], Meta(min_length=1, max_length=1)] = ""
    suffix: str | None = None
    logprobs: Logprobs | None = None
    best_of: Annotated[int, Meta(ge=1, le=1)] | None = None
    echo: bool | None = None
    # The prompt is the text around a cursor, cut to this many tokens; a half word before it is healed.
    context: Annotated[int, Meta(ge=16, le=1 << 20)] | None = None
    lines: Annotated[int, Meta(ge=0, le=10_000)] | None = None  # stop after so many; 0: after a block
    literal: bool | None = None  # what looks like a control token in the prompt is text

    @property
    def text(self) -> str:
        """The prompt, which some clients send as a list of one."""
        return self.prompt if isinstance(self.prompt, str) else "".join(self.prompt)


class InfillExtra(Struct, frozen=True):
    text: str
    filename: str = ""


class InfillRequest(SamplingFields, kw_only=True):
    """The body of `POST /infill`, as llama.vim and llama.vscode send it."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[InfillExtra] | None = None
    prompt: str = ""
    model: Name | None = None
    n_predict: Annotated[int, Meta(ge=-1, le=1_000_000)] | None = None
    n_indent: Annotated[int, Meta(ge=0, le=1000)] | None = None
    t_max_prompt_ms: Annotated[float, Meta(ge=0)] | None = None
    t_max_predict_ms: Annotated[float, Meta(ge=0)] | None = None
    cache_prompt: bool | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)

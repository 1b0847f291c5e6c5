"""The response object with its usage, receipt, routing and error.

Field names and nesting are those of the OpenAI API; `receipt`, `routing`, `shortened` and `queue_position`
are extensions that other clients ignore.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType, field

from keystroke.protocol.items import OutputItem, Tool

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ErrorDetail(Struct, frozen=True):
    type: str
    code: str
    message: str
    param: str | None = None


class ErrorBody(Struct, frozen=True):
    """The body of every HTTP error."""

    error: ErrorDetail


class InputTokenDetails(Struct, frozen=True):
    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputTokenDetails(Struct, frozen=True):
    reasoning_tokens: int = 0


class ResponseUsage(Struct, frozen=True):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputTokenDetails = InputTokenDetails()
    output_tokens_details: OutputTokenDetails = OutputTokenDetails()


class Receipt(Struct, frozen=True):
    """What a response cost and where its time went. Milliseconds unless the name says otherwise."""

    model: str
    service_tier: str
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    network_ms: float
    first_token_ms: float
    total_ms: float
    input_tokens: int
    reused_tokens: int
    computed_tokens: int
    output_tokens: int
    steps: int
    drafted_tokens: int
    accepted_tokens: int
    token_p50_ms: float
    token_p99_ms: float
    preemptions: int
    cost: float
    currency: str = "USD"
    priority: str = ""  # receipts stored before it had this name have none

    @property
    def prompt_ms(self) -> float:
        """From the start to the first token: the step that gives it computes the last rows of the prompt, or
        all of a short one, which `prefill_ms` does not hold."""
        return max(self.prefill_ms, round(self.first_token_ms - self.queue_ms, 3))


class Routing(Struct, frozen=True):
    """Which model answered and why."""

    requested: str
    model: str
    role: str
    reason: str


class Shortened(Struct, frozen=True):
    """Parts of the request that a small model was not shown: names of tools and of system text blocks."""

    tools: list[str] = []
    blocks: list[str] = []


class Compacted(Struct, frozen=True):
    """How the conversation was made to fit: so many of its items were left out of the prompt, with a summary
    in their place or without one (`truncation`). `earlier`: the summary of an earlier turn was used again;
    `request`: by `/v1/responses/compact`."""

    reason: Literal["threshold", "context", "truncation", "earlier", "request"]
    dropped_items: int
    kept_items: int
    summary: str = ""
    tokens_before: int = 0
    tokens_after: int = 0


class Incomplete(Struct, frozen=True):
    reason: Literal["max_output_tokens", "steered", "content_filter", "grammar", "server_restarted"]


class ResponseError(Struct, frozen=True):
    code: str
    message: str


class CompactedConversation(Struct):
    """The body of `POST /v1/responses/compact`: the user's messages and one compaction item, to be sent as
    the input of a later request."""

    id: str
    created_at: int
    output: list[dict[str, Any]]
    usage: ResponseUsage
    compacted: Compacted
    object: Literal["response.compaction"] = "response.compaction"


class InputTokens(Struct):
    """The body of `POST /v1/responses/input_tokens`."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class Response(Struct):
    id: str
    created_at: int
    model: str
    status: Status
    output: list[OutputItem] = []
    object: Literal["response"] = "response"
    background: bool = False
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    max_tool_calls: int | None = None
    reasoning: dict[str, Any] | None = None
    service_tier: str = "default"
    store: bool = True
    temperature: float = 0.0
    text: dict[str, Any] = field(default_factory=lambda: {"format": {"type": "text"}})
    tool_choice: Any = "auto"
    tools: list[Tool] = []
    top_logprobs: int = 0
    top_p: float = 1.0
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
    queue_position: int | UnsetType = UNSET
    receipt: Receipt | UnsetType = UNSET
    routing: Routing | UnsetType = UNSET
    shortened: Shortened | UnsetType = UNSET
    compacted: Compacted | UnsetType = UNSET
    notes: list[str] | UnsetType = UNSET  # request fields that were ignored, and why

"""Items of a conversation: those a client sends and those a response returns.

Input is decoded leniently (one struct with optional fields; unknown fields and item types are ignored),
because clients differ. Output is strict: one tagged struct per kind.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

# How long a marked prefix is protected from eviction: a number of seconds, minutes or hours, such as `30m`.
CacheTtl = Annotated[str, Meta(pattern=r"^[0-9]{1,4}[smh]$")]


class CacheBreakpoint(Struct, omit_defaults=True, frozen=True):
    """The prompt up to the end of the part that has it is protected in the prompt cache."""

    mode: str = "explicit"
    ttl: CacheTtl | None = None


class ContentPart(Struct, omit_defaults=True, frozen=True):
    """A piece of content. Only text is used, whether the part is input, output or a refusal."""

    type: str = "input_text"
    text: str | None = None
    refusal: str | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class Item(Struct, omit_defaults=True, frozen=True):
    """One input item. `type` decides which fields matter; a bare `{role, content}` is a message."""

    type: str = "message"
    id: str | None = None
    role: str | None = None
    content: str | list[ContentPart] | None = None
    status: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[ContentPart] | dict[str, Any] | None = None
    phase: str | None = None
    encrypted_content: str | None = None  # of `reasoning` and `compaction` items
    tools: list[Tool] | None = None  # of `additional_tools` items

    @property
    def is_from_user(self) -> bool:
        return self.type == "message" and (self.role or "user") == "user"


class Tool(Struct, omit_defaults=True, frozen=True):
    """A tool on offer. `function` and `custom` are offered to the model; `namespace` holds more tools;
    types the server does not run (`web_search`, ...) are accepted and left out of the prompt."""

    type: str = "function"
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None
    tools: list[Tool] | None = None


class TokenChoice(Struct, frozen=True):
    """A token the model could have chosen, with its log probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenChoice]


class OutputText(Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[ChosenToken] = []


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    text: str


class Message(Struct, tag_field="type", tag="message"):
    id: str
    status: str
    content: list[OutputText]
    role: str = "assistant"


class Reasoning(Struct, tag_field="type", tag="reasoning"):
    id: str
    status: str
    content: list[ReasoningText]
    summary: list[Any] = []


class FunctionCall(Struct, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: str
    namespace: str | UnsetType = UNSET


class CustomToolCall(Struct, tag_field="type", tag="custom_tool_call"):
    id: str
    call_id: str
    name: str
    input: str
    status: str
    namespace: str | UnsetType = UNSET


class CompactionItem(Struct, tag_field="type", tag="compaction"):
    """Older items as a summary. `encrypted_content` holds all that a later request needs in their place;
    `summary` (an extension) is the text that the model is shown."""

    id: str
    encrypted_content: str
    summary: str = ""


OutputItem = Message | Reasoning | FunctionCall | CustomToolCall | CompactionItem


def content_text(content: str | list[ContentPart] | None) -> str:
    """The plain text of a content field, parts joined."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(part.text or part.refusal or "" for part in content)


def as_input(item: OutputItem) -> Item:
    """The item as a client would send it back in a later turn."""
    if isinstance(item, Message):
        text = "".join(part.text for part in item.content)
        return Item(role="assistant", content=[ContentPart(type="output_text", text=text)])
    if isinstance(item, Reasoning):
        return Item(
            type="reasoning", content=[ContentPart(type="reasoning_text", text=p.text) for p in item.content]
        )
    if isinstance(item, FunctionCall):
        return Item(type="function_call", call_id=item.call_id, name=item.name, arguments=item.arguments)
    if isinstance(item, CompactionItem):
        return Item(type="compaction", id=item.id, encrypted_content=item.encrypted_content)
    return Item(type="custom_tool_call", call_id=item.call_id, name=item.name, input=item.input)

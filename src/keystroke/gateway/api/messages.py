"""Anthropic's Messages API: a translation onto the chat request, and its messages.

Requests become a `ChatRequest`, so that limits, routing, tools, caching and receipts are those of every other
API. Blocks that a model of text cannot read are refused by name; in the result of a tool, which the user did
not choose, they become a note in the text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.responses import Response as HttpResponse

from keystroke.assist.tool_calls.tools import OfferedTool, decode_arguments
from keystroke.errors import InputError
from keystroke.gateway.api.endpoints import ApiRequest, Endpoints
from keystroke.gateway.api.serializers import TextSerializer
from keystroke.gateway.transport.http import MESSAGES, PING_INTERVAL, json_response, new_request_id
from keystroke.gateway.work.registry import AUTO, ROLES, ModelRegistry
from keystroke.gateway.work.work import WorkOutcome
from keystroke.protocol import messages as wire
from keystroke.protocol.items import CacheBreakpoint, ChosenToken, ContentPart
from keystroke.protocol.requests import (
    ChatMessage,
    ChatRequest,
    ChatTool,
    ChatToolCall,
    ChatToolFunction,
    ToolCallFunction,
)
from keystroke.protocol.response import Receipt

# Claude Code begins its system text with a line that differs in each session: it would spoil the prefix.
_BILLING = "x-anthropic-billing-header:"
_REMINDER = "<system-reminder>"  # a block of Claude Code's, not of its user
_NOT_READ = "the models here read text only; leave it out"
_TEXT = {"type": "string"}
_NUMBER = {"type": "integer"}
# Tools that the client runs and whose schema the original knows, by the beginning of their type.
_CLIENT_TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "bash_": (
        "Run a command in the shell.",
        {"type": "object", "properties": {"command": _TEXT, "restart": {"type": "boolean"}}},
    ),
    "text_editor_": (
        "View, create and edit files.",
        {
            "type": "object",
            "properties": {
                "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert"]},
                "path": _TEXT,
                "file_text": _TEXT,
                "old_str": _TEXT,
                "new_str": _TEXT,
                "insert_line": _NUMBER,
                "insert_text": _TEXT,
                "view_range": {"type": "array", "items": _NUMBER},
            },
            "required": ["command", "path"],
        },
    ),
}


async def create_message(api: Endpoints, call: ApiRequest[wire.MessagesRequest]) -> HttpResponse:
    request = call.body
    chat = chat_request(request, api.service.registry)
    thinking, notes = request.thinking, _notes_on_tools(request.tools)
    shown = thinking is not None and thinking.type not in ("disabled", "between_tools")
    hidden = thinking is not None and thinking.display == "omitted"
    serializer = partial(MessagesSerializer, thinking=shown, hidden=hidden, notes=notes)
    start = partial(api.texts.chat, serializer=serializer)
    response = await api.answer_text(call.with_body(chat), start, MESSAGES, progress=PING_INTERVAL)
    response.headers["request-id"] = new_request_id()
    return response


async def count_message_tokens(api: Endpoints, call: ApiRequest[wire.MessagesPrompt]) -> HttpResponse:
    chat = chat_request(call.body, api.service.registry)
    count = await api.texts.count_chat(chat, call.caller)
    return json_response(wire.MessagesTokenCount(count), headers={"request-id": new_request_id()})


# Requests


def chat_request(request: wire.MessagesPrompt, registry: ModelRegistry) -> ChatRequest:
    """The equivalent chat request. Raises InputError for what cannot be translated, naming it."""
    if request.mcp_servers:
        raise InputError(
            "mcp_servers are not called from here; let the client connect to them and offer their tools.",
            param="mcp_servers",
        )
    chat = ChatRequest(
        model=resolve_model_name(request.model, registry),
        messages=_messages(request),
        tools=[tool for one in request.tools or () if (tool := _tool(one)) is not None] or None,
        response_format=_format(request),
        reasoning_effort=_effort(request),
    )
    choice = request.tool_choice
    if choice is not None and chat.tools:
        chat.tool_choice = _tool_choice(choice)
        chat.parallel_tool_calls = not choice.disable_parallel_tool_use
    if isinstance(request, wire.MessagesRequest):
        if request.container is not None:
            raise InputError("container is not known here: nothing runs on this server.", param="container")
        if request.thread is not None:
            raise InputError("thread is not known here; send the whole conversation.", param="thread")
        chat.max_tokens = request.max_tokens
        chat.stop = request.stop_sequences or None
        chat.stream = request.stream
        chat.temperature, chat.top_p, chat.top_k = request.temperature, request.top_p, request.top_k
        chat.service_tier = "default" if request.service_tier == "standard_only" else request.service_tier
    return chat


def resolve_model_name(model: str, registry: ModelRegistry) -> str:
    """The model that a request means. Programs that cannot be told another name send Anthropic's: those mean
    `fast` for the smallest ones, else `auto`."""
    name = model.removesuffix("[1m]")
    if name in (AUTO, *ROLES, *registry.entries, *registry.offers) or not name.startswith("claude"):
        return name
    fast = any(candidate.role == "fast" for candidate in registry.router.candidates)
    return "fast" if fast and "haiku" in name else AUTO


def _messages(request: wire.MessagesPrompt) -> list[ChatMessage]:
    """System text before the first answer goes to the head, where every template accepts it, and what the
    user asked stays last: Claude Code sends pages about its environment after the question."""
    messages = list(_iterate_messages(request))
    answered = next((at for at, one in enumerate(messages) if one.role == "assistant"), len(messages))
    head = sorted(messages[:answered], key=lambda one: one.role != "system")
    return [*head, *messages[answered:]]


def _iterate_messages(request: wire.MessagesPrompt) -> Iterator[ChatMessage]:
    system = _parts(request.system, "system")
    system = [part for part in system if not (part.text or "").startswith(_BILLING)]
    if system:
        yield ChatMessage("system", [*_separate_paragraphs(system)])
    for index, message in enumerate(request.messages):
        param = f"messages[{index}].content"
        if isinstance(message.content, str):
            yield ChatMessage(message.role, message.content)
        elif message.role == "assistant":
            yield _assistant_message(message.content, param)
        else:
            yield from _user_messages(message.role, message.content, param)


def _assistant_message(blocks: Sequence[wire.MessagesBlock], param: str) -> ChatMessage:
    """One message with its text and calls; thinking is not read again."""
    calls = [
        ChatToolCall(ToolCallFunction(b.name or "", msgspec.json.encode(b.input or {}).decode()), b.id)
        for b in blocks
        if b.type == "tool_use"
    ]
    parts = _parts([block for block in blocks if block.type != "tool_use"], param)
    return ChatMessage("assistant", parts or None, tool_calls=calls or None)


def _user_messages(role: str, blocks: Sequence[wire.MessagesBlock], param: str) -> Iterator[ChatMessage]:
    """Results of tools, each a message of its own, and the text between and after them."""
    waiting: list[wire.MessagesBlock] = []
    for block in blocks:
        if block.type == "text" and (block.text or "").lstrip().startswith(_REMINDER):
            yield ChatMessage("system", block.text)
            continue
        if block.type != "tool_result":
            waiting.append(block)
            continue
        if waiting and (parts := _parts(waiting, param)):
            yield ChatMessage(role, parts)
        waiting = []
        text = _result_text(block.content)
        if block.is_error and not text.lstrip().lower().startswith("error"):
            text = f"Error: {text}"
        mark = _breakpoint(block)
        content = text if mark is None else [ContentPart(text=text, prompt_cache_breakpoint=mark)]
        yield ChatMessage("tool", content, tool_call_id=block.tool_use_id)
    if waiting and (parts := _parts(waiting, param)):
        yield ChatMessage(role, parts)


def _parts(content: str | Sequence[wire.MessagesBlock] | None, param: str) -> list[ContentPart]:
    """Blocks as parts of text. Raises InputError for images and files."""
    if content is None or isinstance(content, str):
        return [ContentPart(text=content)] if content else []
    parts: list[ContentPart] = []
    for index, block in enumerate(content):
        text = _block_text(block)
        if text is None:
            where = f"{param}[{index}]"
            raise InputError(f"{where} is a block of type {block.type:.40}, but {_NOT_READ}.", param=where)
        if text:
            parts.append(ContentPart(text=text, prompt_cache_breakpoint=_breakpoint(block)))
    return parts


def _separate_paragraphs(parts: Sequence[ContentPart]) -> Iterator[ContentPart]:
    """Blocks of system text are paragraphs; parts are joined without anything between them."""
    for index, part in enumerate(parts):
        yield part if index + 1 == len(parts) else msgspec.structs.replace(part, text=f"{part.text}\n\n")


def _breakpoint(block: wire.MessagesBlock) -> CacheBreakpoint | None:
    """`cache_control` marks the end of a prefix that is kept."""
    if block.cache_control is None:
        return None
    ttl = block.cache_control.get("ttl", "5m")
    return CacheBreakpoint(ttl=ttl if ttl in ("5m", "1h") else "5m")


def _block_text(block: wire.MessagesBlock) -> str | None:
    """The text of a block, empty for those that no prompt contains; None for one that cannot be read."""
    if block.type == "text":
        return block.text or ""
    if block.type in ("document", "search_result"):
        text = _source_text(block)
        return None if text is None else f"{block.title}\n{text}" if block.title else text
    if block.type in ("image", "container_upload"):
        return None
    return ""  # thinking, and blocks of tools that the original runs itself


def _source_text(block: wire.MessagesBlock) -> str | None:
    source = block.source or {}
    if block.type == "search_result" or source.get("type") == "content":
        inner = block.content if block.type == "search_result" else source.get("content")
        if isinstance(inner, str):
            return inner
        try:
            blocks = msgspec.convert(inner or [], list[wire.MessagesBlock], from_attributes=True)
        except msgspec.ValidationError:
            return None
        return "\n".join(block.text or "" for block in blocks)
    data = source.get("data")
    return data if source.get("type") == "text" and isinstance(data, str) else None


def _result_text(content: Any) -> str:
    """What a tool returned; what cannot be read is named, because the user did not choose it."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, dict):
        return msgspec.json.encode(content).decode()
    texts: list[str] = []
    for block in content:
        text = _block_text(block)
        texts.append(f"[{block.type} left out: the model reads text only]" if text is None else text)
    return "\n".join(text for text in texts if text)


def _tool(tool: wire.MessagesTool) -> ChatTool | None:
    """None for tools that the original runs itself."""
    if tool.type not in (None, "custom"):
        for prefix, (description, schema) in _CLIENT_TOOLS.items():
            if tool.type.startswith(prefix):
                return ChatTool(function=ChatToolFunction(tool.name, description, schema))
        return None
    schema = tool.input_schema or {"type": "object", "properties": {}}
    return ChatTool(function=ChatToolFunction(tool.name, tool.description, schema, tool.strict))


def _notes_on_tools(tools: Sequence[wire.MessagesTool] | None) -> tuple[str, ...]:
    return tuple(
        f"tools: {tool.name:.60} ({tool.type:.60}) runs at the original only and was left out"
        for tool in tools or ()
        if _tool(tool) is None
    )


def _tool_choice(choice: wire.MessagesToolChoice) -> Any:
    if choice.type == "tool":
        if not choice.name:
            raise InputError("tool_choice.name must be the name of a tool.", param="tool_choice.name")
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _wants_reasoning(request: wire.MessagesPrompt) -> bool:
    return request.thinking is not None and request.thinking.type != "disabled"


def _effort(request: wire.MessagesPrompt) -> str:
    """The reasoning effort: none unless `thinking` asks for reasoning. Anthropic's `high` is its default,
    which Claude Code sends with every request."""
    if not _wants_reasoning(request):
        return "none"
    effort = request.output_config.effort if request.output_config is not None else None
    return {"low": "low", "medium": "low", "xhigh": "high", "max": "high"}.get(effort or "", "medium")


def _format(request: wire.MessagesPrompt) -> dict[str, Any] | None:
    output = request.output_config
    form = request.output_format or (output.format if output is not None else None)
    if form is None:
        return None
    if form.type != "json_schema" or form.schema is None:
        raise InputError(
            "output_config.format must be a json_schema with its schema.", param="output_config.format"
        )
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.schema, "strict": True}}


# Messages


class MessagesSerializer(TextSerializer):
    """The events of a message. `thinking`: reasoning is sent; `hidden`: only its signature. `notes`: what of
    the request was ignored."""

    def __init__(
        self,
        identity: str,
        *rest: Any,
        thinking: bool,
        hidden: bool = False,
        notes: tuple[str, ...] = (),
        **named: Any,
    ) -> None:
        super().__init__(f"msg_{identity.rpartition('_')[2]}", *rest, **named)
        self._thinking, self._hidden = thinking, hidden
        self.notes += notes
        self._blocks: list[wire.MessagesOutputBlock] = []
        self._open = False  # the last block may still grow
        self._called = False
        self._pieces: list[str] = []  # of the block that grows

    def on_created(self) -> list[Any]:
        usage = wire.MessagesUsage(self.input_tokens, 0)
        message = wire.MessagesReply(self.id, self.model, [], usage, shortened=self._shortened)
        return [wire.MessageStart(message)]

    def on_text(self, delta: str, logprobs: Sequence[ChosenToken]) -> list[Any]:
        if not delta:
            return []
        return self._grow(wire.TextBlock, lambda: wire.TextBlock(""), delta, wire.BlockTextDelta(delta))

    def on_reasoning(self, delta: str) -> list[Any]:
        if not self._thinking or not delta:
            return []
        shown = "" if self._hidden else delta
        return self._grow(
            wire.ThinkingBlock, lambda: wire.ThinkingBlock("", ""), shown, wire.BlockThinkingDelta(shown)
        )

    def on_call(self, tool: OfferedTool) -> list[Any]:
        identity = f"toolu_{self.id.removeprefix('msg_')}_{len(self._blocks)}"
        return self._begin(wire.ToolUseBlock(identity, tool.name, {}))

    def on_call_delta(self, delta: str) -> list[Any]:
        self._pieces.append(delta)
        return [wire.BlockDelta(len(self._blocks) - 1, wire.BlockInputDelta(delta))]

    def on_call_done(self) -> list[Any]:
        self._called = True
        return self._close()

    def on_end(self, outcome: WorkOutcome) -> list[Any]:
        unfinished = self._open and isinstance(self._blocks[-1], wire.ToolUseBlock)
        events = self._close()
        usage, receipt = messages_usage(outcome.receipt, self.marked_tokens), outcome.receipt
        reason: wire.StopReason = "end_turn"
        if outcome.finish in ("length", "grammar"):
            reason = "max_tokens"
        elif self._called:
            reason = "tool_use"
        elif outcome.stop_string is not None:
            reason = "stop_sequence"
        stopped = outcome.stop_string if reason == "stop_sequence" else None
        notes = self.notes or UNSET
        self.body = wire.MessagesReply(
            self.id,
            self.model,
            self._blocks[:-1] if unfinished else self._blocks,
            usage,
            stop_reason=reason,
            stop_sequence=stopped,
            receipt=receipt,
            routing=self.routing,
            shortened=self._shortened,
            compacted=self.compacted,
            notes=notes,
        )
        if outcome.error is not None:
            return [*events, wire.messages_error(outcome.error)]
        how = wire.MessageEnding(reason, stopped)
        ending = wire.MessageDelta(how, usage, receipt, self.compacted, notes)
        return [*events, ending, wire.MessageStop()]

    def _grow(self, kind: type, make: Callable[[], Any], text: str, delta: Any) -> list[Any]:
        events = [] if self._open and isinstance(self._blocks[-1], kind) else self._begin(make())
        self._pieces.append(text)
        return [*events, wire.BlockDelta(len(self._blocks) - 1, delta)] if text else events

    def _begin(self, block: wire.MessagesOutputBlock) -> list[Any]:
        events = self._close()
        self._blocks.append(block)
        self._open = True
        return [*events, wire.BlockStart(len(self._blocks) - 1, msgspec.structs.replace(block))]

    def _close(self) -> list[Any]:
        if not self._open:
            return []
        self._open = False
        text, self._pieces = "".join(self._pieces), []
        at, block = len(self._blocks) - 1, self._blocks[-1]
        events: list[Any] = []
        if isinstance(block, wire.TextBlock):
            block.text = text
        elif isinstance(block, wire.ThinkingBlock):
            block.thinking = text
            # Clients require one and send it back; it is not read here.
            block.signature = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
            events.append(wire.BlockDelta(at, wire.BlockSignatureDelta(block.signature)))
        else:
            block.input = decode_arguments(text)
        return [*events, wire.BlockStop(at)]


def messages_usage(receipt: Receipt, marked: int = 0) -> wire.MessagesUsage:
    """`marked`: tokens up to the last `cache_control`; those of them that were read now were written to the
    cache."""
    written = max(0, min(marked, receipt.input_tokens) - receipt.reused_tokens)
    return wire.MessagesUsage(
        input_tokens=receipt.input_tokens - receipt.reused_tokens - written,
        output_tokens=receipt.output_tokens,
        cache_creation_input_tokens=written,
        cache_read_input_tokens=receipt.reused_tokens,
        service_tier="priority" if receipt.service_tier in ("priority", "ultrafast") else "standard",
    )

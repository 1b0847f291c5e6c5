"""Conversations as tokens.

The only place where items become template messages. A continued conversation keeps the exact tokens in the KV
cache and appends those of the new items; the template is rendered only for the join, on a conversation of two
placeholder messages. Where a template does not allow that, the whole conversation is rendered again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from msgspec import UNSET, UnsetType

from keystroke.assist.edit.foreign_text import REMINDER
from keystroke.assist.tool_calls.forms import CALL
from keystroke.assist.tool_calls.patches import calls_from_patch
from keystroke.assist.tool_calls.seen import strip_line_numbers
from keystroke.assist.tool_calls.tools import Toolset
from keystroke.assist.tool_calls.usable import may_read, reads_files
from keystroke.engine.model import Model
from keystroke.engine.templates import ChatTemplate, reasoning_variables
from keystroke.errors import InputError, ModelDamaged
from keystroke.gateway.api.tool_history import last_user_text
from keystroke.protocol.compaction import COMPACTIONS
from keystroke.protocol.faults import NoSuitableModel
from keystroke.protocol.items import ContentPart, Item, Tool, content_text
from keystroke.protocol.response import Shortened

Message = dict[str, Any]

_MARK = "⟦here⟧"  # placeholder for the assistant's last message
_NEXT_MESSAGE = "⟦said⟧"  # placeholder for the next user message
_STUB: tuple[Message, ...] = ({"role": "user", "content": "."}, {"role": "assistant", "content": _MARK})
_READ = frozenset(
    {
        "message",
        "function_call",
        "custom_tool_call",
        "function_call_output",
        "custom_tool_call_output",
        "additional_tools",
        *COMPACTIONS,
    }
)
# Codex describes its skills and its sandbox: half of a small model's prompt, and useless to it.
_SPARED = re.compile(r"<(skills_instructions|permissions instructions)>.*?</\1>\s*", re.DOTALL)
_LONGEST_TASK = 600  # characters of a request that is repeated to a small model
_IMAGES = ("input_image", "image_url", "input_file", "file", "input_audio")


@dataclass(slots=True)
class ConversationTurn:
    """What a later turn needs of this one. `tokens` are prompt and answer as in the KV cache; None without a
    local engine."""

    response_id: str
    model: str
    items: list[Item]
    instructions: str | None = None
    tools: list[Tool] | None = None
    effort: str | None = None  # of reasoning: a template may state it at the beginning of the prompt
    tokens: Sequence[int] | None = None
    steers: list[Item] = field(default_factory=list)  # accepted steering input for the next turn


def items_of(content: str | Sequence[Item] | None) -> list[Item]:
    """Request input as items. Raises InputError for images and files; drops items that no prompt contains
    (such as reasoning)."""
    if content is None:
        return []
    if isinstance(content, str):
        return [Item(role="user", content=content)]
    for index, item in enumerate(content):
        refuse_images(item.content, f"input[{index}]")
    return [item for item in content if item.type in _READ]


def refuse_images(content: str | list[ContentPart] | None, where: str) -> None:
    for part in content if isinstance(content, list) else ():
        if part.type in _IMAGES:
            raise InputError(
                f"{where} holds {part.type}, but the models here read text only; leave it out.", param=where
            )


def text_length(items: Sequence[Item]) -> int:
    """The number of characters in items."""
    total = 0
    for item in items:
        content = item.content
        total += len(content) if isinstance(content, str) else sum(len(p.text or "") for p in content or ())
        total += len(item.arguments or "") + len(item.input or "")
        total += len(item.output) if isinstance(item.output, str) else 0
    return total


def collect_tools(tools: list[Tool] | None, items: Sequence[Item]) -> list[Tool] | None:
    """The tools of a request and those that its conversation gives as `additional_tools` items."""
    more = [tool for item in items if item.type == "additional_tools" for tool in item.tools or ()]
    return [*(tools or ()), *more] if more else tools


def affinity(instructions: str | None, items: Sequence[Item]) -> str:
    """Identifies a conversation by its content up to the first user message, with which every later turn
    begins. Turns with the same affinity share a prefix on one engine."""
    digest = hashlib.sha256(_both_ends(instructions or "").encode("utf-8", "surrogatepass"))
    for item in items:
        text = _both_ends(content_text(item.content))
        digest.update(f"\0{item.role}\0{text}".encode("utf-8", "surrogatepass"))
        if item.is_from_user:
            break
    return digest.hexdigest()[:32]


def _both_ends(text: str) -> str:
    """Both ends of a long text: enough to identify it without hashing all of it at every turn."""
    return text if len(text) <= 8192 else f"{text[:4096]}\0{len(text)}\0{text[-4096:]}"


def messages_of(
    instructions: str | None,
    items: Sequence[Item],
    before: Sequence[Item] | None = None,
    *,
    toolset: Toolset = Toolset(),  # noqa: B008 - immutable
    words: str = "",
    apart: bool = False,
) -> list[Message]:
    """Items as template messages. System text is collected in one message at the head, where every template
    accepts it, with `words` last; `apart`: as separate messages, so that a warm-up's prompt is a prefix of
    every later turn. `before` are the items these continue: then there is no head, and its calls name their
    outputs. Calls are written for the tools as the model was shown them."""
    system = [instructions] if instructions else []
    messages: list[Message] = []
    names = {i.call_id or "": i.name or "tool" for i in (before or ())[-64:] if i.type.endswith("_call")}
    task = last_user_text(before or ())
    for item in items:
        kind = item.type
        if kind == "compaction":
            kind, item = "message", Item(role="developer", content=item.content)
        if kind == "message":
            role, text = item.role or "user", content_text(item.content)
            if toolset.short and role != "assistant":
                text = _SPARED.sub("", text)
            if role in ("system", "developer"):
                if messages or before is not None:
                    messages.append({"role": "user", "content": text})
                else:
                    system.append(text)
            elif role == "assistant":
                _assistant(messages)["content"] += text
            else:
                messages.append({"role": "user", "content": text})
                task = text
        elif kind in ("function_call", "custom_tool_call"):
            calls = _calls(item, toolset)
            names[item.call_id or ""] = calls[0][0]
            message = _assistant(messages)
            for name, arguments in calls:
                call = {"name": name, "arguments": arguments}
                message.setdefault("tool_calls", []).append(
                    {"id": item.call_id or "", "type": "function", "function": call}
                )
        elif kind in ("function_call_output", "custom_tool_call_output"):
            name = names.get(item.call_id or "", item.name or "tool")
            messages.append(
                {
                    "role": "tool",
                    "content": _tool_output(_output_text(item.output), name, task, toolset),
                    "tool_call_id": item.call_id or "",
                    "name": name,
                }
            )
    if words and before is None:
        system.append(words)
    parts = system if apart else ["\n\n".join(system)] if system else []
    return [*({"role": "system", "content": part} for part in parts), *messages]


def _tool_output(output: str, name: str, task: str, toolset: Toolset) -> str:
    """A tool's result as the model sees it. For a small model line numbers are removed, which it would copy,
    and the task is repeated after what it read, because it copies a file unchanged when the task is far
    above; not after what it wrote, or it would do the task again."""
    shown = toolset.find(name)
    if not toolset.short or shown is None or not may_read(shown):
        return output
    if reads_files(shown):
        output = strip_line_numbers(output)
    return f"{output}\n\n{REMINDER} {task.strip()}" if 0 < len(task) <= _LONGEST_TASK else output


def describe_shortening(items: Sequence[Item], toolset: Toolset) -> Shortened | UnsetType:
    """The tools and the blocks of text that a small model is not shown."""
    if not toolset.short:
        return UNSET
    found = [m[1] for i in items if i.type == "message" for m in _SPARED.finditer(content_text(i.content))]
    return Shortened(list(toolset.left_out), list(dict.fromkeys(found)))


def _calls(item: Item, toolset: Toolset) -> list[tuple[str, Any]]:
    """An earlier call as the model would write it: a patch as the edit tools it was shown."""
    name = item.name or "tool"
    if item.type == "function_call":
        return [(name, _arguments(item.arguments))]
    if any(shown.is_edit and shown.tool.name == name for shown in toolset.shown):
        edits = calls_from_patch(item.input or "")
        if edits is not None:
            return list(edits)
    return [(name, {"input": item.input or ""})]


def _assistant(messages: list[Message]) -> Message:
    """The assistant message being collected: one for the text and calls of a turn."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _arguments(text: str | None) -> Any:
    """Templates expect an object; anything else stays text."""
    try:
        value = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _output_text(output: str | list[ContentPart] | dict[str, Any] | None) -> str:
    if isinstance(output, dict):
        return msgspec.json.encode(output).decode()
    return content_text(output)


def render_conversation(
    model: Model,
    messages: list[Message],
    specs: list[dict[str, Any]],
    *,
    generate: bool = True,
    effort: str | None = None,
) -> list[int]:
    """The tokens of a whole conversation. `effort`: of reasoning. Raises NoSuitableModel where there
    is no template."""
    template = model.chat
    if template is None:
        raise NoSuitableModel(
            f"{model.name} only completes code and has no chat template; use another model, such as that of "
            "`keystroke models add coder`, or use /v1/completions or /infill.",
            param="model",
        )
    if not messages:
        raise InputError("input is empty; send at least one message.", param="input")
    if specs and not _knows_tools(template.source):
        messages, specs = _with_tool_words(messages, specs), []
    variables = reasoning_variables(template.source, effort)
    return template.tokens(
        model.tokenizer, messages, tools=specs or None, add_generation_prompt=generate, **variables
    )


_later_system: WeakKeyDictionary[ChatTemplate, bool] = WeakKeyDictionary()


def keeps_later_system(model: Model) -> bool:
    """Whether the model's template renders a second system message after the first and the tools without
    changing what precedes it. Renders the template once; may block."""
    chat = model.chat
    if chat is None:
        return False
    if chat not in _later_system:
        _later_system[chat] = _probe_later_system(chat)
    return _later_system[chat]


def _probe_later_system(chat: ChatTemplate) -> bool:
    first, second = {"role": "system", "content": _MARK}, {"role": "system", "content": _NEXT_MESSAGE}
    spec = {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": spec}] if _knows_tools(chat.source) else None
    try:
        alone = chat.render([first], tools=tools, add_generation_prompt=False)
        both = chat.render([first, second, {"role": "user", "content": "."}], tools=tools)
    except (InputError, ModelDamaged):
        return False
    return _MARK in alone and both.startswith(alone) and both.count(_NEXT_MESSAGE, len(alone)) == 1


def continue_tokens(
    model: Model, cached: Sequence[int], new: list[Message], *, effort: str | None = None
) -> list[int] | None:
    """The cached tokens followed by the new messages; None where the template cannot be joined this way."""
    joint = join_tokens(model, new, effort)
    if joint is None:
        return None
    tokens = list(cached)
    if tokens and tokens[-1] in model.engine.info.eos:
        tokens.pop()  # the join closes the answer itself
    return [*tokens, *joint]


def join_tokens(model: Model, new: list[Message], effort: str | None = None) -> list[int] | None:
    """Tokens that close the assistant's message, add `new`, and open its next turn; None where the template
    does not allow it. `effort`: of reasoning, the same as in the prompt before."""
    if model.chat is None:
        return None
    variables = reasoning_variables(model.chat.source, effort)
    if len(new) == 1 and new[0]["role"] == "user":
        quick = _quick_join(model, new[0]["content"], variables)
        if quick is not None:
            return quick
    return _render_join(model, new, variables)


@dataclass(frozen=True, slots=True)
class _Frame:
    """What a template puts around a user message that follows an answer, cut at the nearest special tokens:
    no token spans those, so only `head + message + tail` is encoded again."""

    before: list[int]
    head: str
    tail: str
    after: list[int]


_frames: WeakKeyDictionary[ChatTemplate, dict[str, _Frame | None]] = WeakKeyDictionary()  # by variables


def _quick_join(model: Model, text: str, variables: Mapping[str, Any]) -> list[int] | None:
    """The join of one plain user message without rendering the template; None for text that a template may
    treat specially."""
    chat, pattern = model.chat, model.tokenizer.special_pattern
    assert chat is not None
    frames, key = _frames.setdefault(chat, {}), repr(variables)
    if key not in frames:
        frames[key] = _frame(model, chat, variables)
    frame = frames[key]
    if frame is None or pattern is None or not text or text != text.strip() or "<" in text:
        return None
    if pattern.search(text):
        return None
    return [*frame.before, *model.tokenizer.encode(frame.head + text + frame.tail), *frame.after]


def _frame(model: Model, chat: ChatTemplate, variables: Mapping[str, Any]) -> _Frame | None:
    pattern, encode = model.tokenizer.special_pattern, model.tokenizer.encode
    try:
        text = chat.render([*_STUB, {"role": "user", "content": _NEXT_MESSAGE}], **variables)
    except InputError:
        return None
    if pattern is None or text.count(_MARK) != 1 or text.count(_NEXT_MESSAGE) != 1:
        return None
    before, _, after = text.partition(_MARK)[2].partition(_NEXT_MESSAGE)
    ends = [match.end() for match in pattern.finditer(before)]
    if not ends:
        return None
    first = pattern.search(after)
    begin = len(after) if first is None else first.start()
    return _Frame(
        encode(before[: ends[-1]], special=True),
        before[ends[-1] :],
        after[:begin],
        encode(after[begin:], special=True),
    )


def _render_join(model: Model, new: list[Message], variables: Mapping[str, Any]) -> list[int] | None:
    assert model.chat is not None
    try:
        tokens = model.chat.tokens(model.tokenizer, [*_STUB, *new], **variables)
    except InputError:
        return None
    mark = model.tokenizer.encode(_MARK)
    size = len(mark)
    found = [
        at for at in range(len(tokens) - size + 1) if tokens[at] == mark[0] and tokens[at : at + size] == mark
    ]
    return tokens[found[0] + size :] if len(found) == 1 else None


def _knows_tools(source: str) -> bool:
    return "tools" in source


def _with_tool_words(messages: list[Message], specs: list[dict[str, Any]]) -> list[Message]:
    """For templates without tools: describe the tools and how to call them in the system message."""
    listed = "\n".join(msgspec.json.encode(spec["function"]).decode() for spec in specs)
    words = (
        "You can call these tools, one JSON description a line:\n"
        f"{listed}\n"
        f"To call one, write {CALL} then a JSON object with `name` and `arguments`, then </tool_call>."
    )
    rest = [_without_tool_fields(m) for m in messages]
    if rest and rest[0]["role"] == "system":
        return [{"role": "system", "content": f"{rest[0]['content']}\n\n{words}"}, *rest[1:]]
    return [{"role": "system", "content": words}, *rest]


def _without_tool_fields(message: Message) -> Message:
    """A message without tool fields, which such a template would drop."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    calls_text = "".join(
        f"{CALL}\n{msgspec.json.encode(c['function']).decode()}\n</tool_call>\n" for c in calls
    )
    return {"role": "assistant", "content": message["content"] + calls_text}

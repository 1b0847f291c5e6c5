"""The tools of a request, as the client offers them and as a model is shown them.

A small model is shown fewer tools with shorter descriptions. Every call of a shown tool is a valid call of an
offered one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from keystroke.assist.tool_calls.patches import EDITS, patch_from_call

PATHS = ("path", "filePath", "file_path", "file")  # parameters that name a file
CONTENTS = ("content", "contents", "file_text")  # that give the whole text of one
REPLACED = (("old_string", "new_string"), ("oldString", "newString"), ("old_str", "new_str"))

MOST_SHOWN = 6  # tools that a small model is shown
_FEW = 3  # up to this many tools are always shown
_LONGEST = 160  # characters of a short description
_WORK = frozenset(  # words of tools that work on files and run commands
    re.findall(
        r"\w+",
        "exec execute shell bash command cmd terminal run patch edit write replace create delete file "
        "read view cat open list ls glob grep search find",
    )
)
_ODD = frozenset(("stdin", "image", "web", "goal", "agent", "agents", "plan", "todo", "skill", "browser"))
_OLD = re.compile(r"old(_?(str|string|text|lines|code))?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool the client offers. A custom tool takes one text, `input`, optionally with a grammar."""

    name: str
    custom: bool = False
    namespace: str | None = None
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False
    grammar: tuple[str, str] | None = None  # its syntax (lark, regex) and text

    @property
    def is_patch(self) -> bool:
        """Whether its input is a patch in the format of Codex's apply_patch."""
        return self.custom and "*** Begin Patch" in (self.grammar or ("", self.description))[1]


@dataclass(frozen=True, slots=True)
class ShownTool:
    """A function that the model may call; its calls become calls of `tool`."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    tool: OfferedTool
    grounded: frozenset[str] = frozenset()  # parameters that must quote lines the model has seen

    @property
    def spec(self) -> dict[str, Any]:
        """As chat templates read it."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": self.parameters},
        }

    @property
    def properties(self) -> Mapping[str, Any]:
        """The schemas of the declared parameters; empty where the tool's schema does not list them."""
        declared = self.parameters.get("properties")
        return declared if isinstance(declared, Mapping) else {}

    @property
    def is_edit(self) -> bool:
        """Whether its calls are turned into patches."""
        return self.tool.is_patch and self.name != self.tool.name

    def payload(self, arguments: Any) -> str | None:
        """The payload that the client receives for these arguments; None where they are invalid."""
        if self.is_edit:
            return patch_from_call(self.name, arguments)
        if self.tool.custom:
            text = arguments.get("input") if isinstance(arguments, dict) else arguments
            return text if isinstance(text, str) else None
        return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()


@dataclass(frozen=True, slots=True)
class Toolset:
    """The tools of one request that a model is shown."""

    shown: tuple[ShownTool, ...] = ()
    left_out: tuple[str, ...] = ()  # offered, but not shown
    short: bool = False

    def __bool__(self) -> bool:
        return bool(self.shown)

    def find(self, name: str) -> ShownTool | None:
        return next((s for s in self.shown if s.name == name), None)

    @property
    def specs(self) -> list[dict[str, Any]]:
        return [s.spec for s in self.shown]


def whole_toolset(offered: Sequence[OfferedTool]) -> Toolset:
    """Every tool as it was offered; a custom one as a function of one text."""
    return Toolset(tuple(_show_whole(tool) for tool in offered))


def short_toolset(offered: Sequence[OfferedTool], asked: str = "") -> Toolset:
    """For a small model: few tools, one sentence each, required parameters only. Patches are shown as
    functions that replace lines, create and delete files. A tool named in `asked` is kept."""
    shown: list[ShownTool] = []
    left_out: list[str] = []
    for tool in offered:
        if len(offered) > _FEW and not _is_useful(tool.name, asked):
            left_out.append(tool.name)
        elif tool.is_patch:
            shown += [_show_edit(name, tool) for name in EDITS]
        else:
            shown.append(_show_short(tool))
    if not shown:
        return whole_toolset(offered)
    kept = shown[:MOST_SHOWN]
    left_out += [s.name for s in shown[MOST_SHOWN:]]
    return Toolset(tuple(kept), tuple(left_out), short=True)


def _show_whole(tool: OfferedTool) -> ShownTool:
    if not tool.custom:
        return ShownTool(tool.name, tool.description, tool.parameters or _NOTHING, tool)
    description = tool.description
    if tool.grammar is not None:
        description = f"{description}\n`input` follows this grammar:\n{tool.grammar[1]}"
    return ShownTool(tool.name, description, _INPUT, tool)


def _show_short(tool: OfferedTool) -> ShownTool:
    if tool.custom:
        return ShownTool(tool.name, _first_sentence(tool.description), _INPUT, tool)
    parameters = tool.parameters or _NOTHING
    properties, required = parameters.get("properties"), parameters.get("required")
    if isinstance(properties, Mapping) and isinstance(required, list) and required:
        needed = {name: _shorten(properties.get(name, {})) for name in required if isinstance(name, str)}
        rest = {
            k: v for k, v in parameters.items() if k not in ("properties", "required", "$schema", "title")
        }
        parameters = {**rest, "properties": needed, "required": list(needed), "additionalProperties": False}
    grounded = frozenset(n for n in parameters.get("properties", ()) if _OLD.fullmatch(n))
    return ShownTool(tool.name, _first_sentence(tool.description), parameters, tool, grounded)


def _show_edit(name: str, tool: OfferedTool) -> ShownTool:
    description, properties = EDITS[name]
    parameters = {
        "type": "object",
        "properties": {key: {"type": "string", "description": text} for key, text in properties.items()},
        "required": list(properties),
        "additionalProperties": False,
    }
    return ShownTool(name, description, parameters, tool, frozenset({"old"} & set(properties)))


def _is_useful(name: str, asked: str) -> bool:
    words = name_words(name)
    return bool(words & _WORK and not words & _ODD) or name in asked


def name_words(name: str) -> set[str]:
    """The words of a tool's name, in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}


def _first_sentence(text: str) -> str:
    first = re.split(r"(?<=[.!?])\s|\n", text.strip(), maxsplit=1)[0]
    return first if len(first) <= _LONGEST else first[: _LONGEST - 1].rstrip() + "…"


def _shorten(schema: Any) -> Any:
    if not isinstance(schema, Mapping) or not isinstance(schema.get("description"), str):
        return schema
    return {**schema, "description": _first_sentence(schema["description"])}


_NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
_INPUT: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def decode_arguments(payload: str) -> dict[str, Any]:
    """The arguments of a call; empty where they are no JSON object, as a remote server's may not be."""
    try:
        value = msgspec.json.decode(payload)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}

"""Parses complete calls in any common form: JSON objects, lists of them, XML-like functions.

All calls are returned, or none. Where a grammar constrains the model's calls (`constrained`), a call in
another form counts only if the grammar would have allowed it: its arguments match the schema, its input the
tool's own grammar.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from keystroke.assist.tool_calls.segments import ToolCallSegment
from keystroke.assist.tool_calls.tools import ShownTool, Toolset
from keystroke.engine.grammar.validate import schema_violation

_FUNCTION = re.compile(
    r'<(?:function=([^>\s]+)|invoke name="([^"]+)")\s*>(.*?)</(?:function|invoke)>', re.DOTALL
)
_PATIENCE = 0.25  # seconds; the caller may serve others at the same time
_PARAMETER = re.compile(r'<parameter(?:=([^>]+)| name="([^"]+)")\s*>(.*?)</parameter>', re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Proof:
    """The properties that a call must be proved to have."""

    schema: bool  # its arguments are those that a grammar would have allowed
    read: bool  # a grammar guarantees that quoted lines were read


def parse_whole_calls(
    toolset: Toolset, body: str, *, constrained: bool, read: bool = False
) -> list[ToolCallSegment]:
    """The calls that `body` consists of, else an empty list. `read`: a grammar guarantees that quoted lines
    were read."""
    proof = _Proof(constrained, read)
    try:
        calls = [_parse_function(toolset, match, proof) for match in _FUNCTION.finditer(body)]
        if not calls:
            data: Any = msgspec.json.decode(body.strip())
            calls = [
                _parse_object(toolset, one, proof) for one in (data if isinstance(data, list) else [data])
            ]
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return []
    return [call for call in calls if call is not None] if calls and all(calls) else []


def _parse_object(toolset: Toolset, data: Any, proof: _Proof) -> ToolCallSegment | None:
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return None
    arguments = data.get("arguments", data.get("parameters", {}))
    shown = toolset.find(data["name"])
    if not isinstance(arguments, str) or shown is None or shown.tool.custom:
        return _make_segment(shown, arguments, proof)
    if proof.schema:  # arguments within a text, as some servers send them
        return _make_segment(shown, msgspec.json.decode(arguments), proof)
    return ToolCallSegment(shown.tool, arguments)


def _parse_function(toolset: Toolset, match: re.Match[str], proof: _Proof) -> ToolCallSegment | None:
    shown = toolset.find(match[1] or match[2])
    body = match[3].strip()
    if body.startswith("{"):
        return _make_segment(shown, msgspec.json.decode(body), proof)
    arguments = {p[1] or p[2]: p[3].strip("\n") for p in _PARAMETER.finditer(body)}
    return _make_segment(shown, _convert_types(arguments, shown) if shown is not None else {}, proof)


def _make_segment(shown: ShownTool | None, arguments: Any, proof: _Proof) -> ToolCallSegment | None:
    payload = None if shown is None else shown.payload(arguments)
    if shown is None or payload is None:
        return None
    proved = not proof.schema or _is_proved(shown, arguments, payload, proof.read)
    return ToolCallSegment(shown.tool, payload) if proved else None


def _is_proved(shown: ShownTool, arguments: Any, payload: str, read: bool) -> bool:
    if shown.grounded and not read:  # only the grammar checks quoted lines
        return False
    tool = shown.tool
    if tool.custom and not shown.is_edit:
        return tool.grammar is None or _matches_grammar(tool.grammar, payload)
    return schema_violation(shown.parameters, arguments) is None


def _matches_grammar(grammar: tuple[str, str], text: str) -> bool:
    from keystroke.engine.grammar.compiler import matches_grammar  # here: it takes a while to import
    from keystroke.engine.grammar.constraint import lark, regex

    syntax, written = grammar
    language = lark(written) if syntax == "lark" else regex(written)
    return matches_grammar(language, text, timeout=_PATIENCE)


def _convert_types(arguments: dict[str, str], shown: ShownTool) -> dict[str, Any]:
    """Convert the text values of an XML call to the types of the schema."""
    typed: dict[str, Any] = {}
    for name, text in arguments.items():
        schema = shown.properties.get(name)
        typed[name] = text
        if isinstance(schema, dict) and schema.get("type") not in (None, "string"):
            with contextlib.suppress(msgspec.DecodeError, RecursionError):
                typed[name] = msgspec.json.decode(text)
    return typed

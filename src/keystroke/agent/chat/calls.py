"""Parses tool calls in the text of a local model, and builds the grammar that constrains such text.

Understands `<tool_call>` marks (Qwen, Hermes) and an answer that is one JSON object, fenced or not. A
malformed call is distinguished from plain text, so that the model can be told what is wrong with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keystroke.agent.tools import ToolInvocation
from keystroke.engine.grammar.constraint import Constraint, lark

# An answer is a call or a few, or text that cannot be mistaken for one, or text followed by calls.
_GRAMMAR = r"""
start: body | calls | talk calls?
calls: call ("\n" call){{0,3}}
talk: /[^<{{`\s][^<`]{{0,1500}}/
call: "<tool_call>\n" body "\n</tool_call>"
body: %json {schema}
"""
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_MARKED = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
_HEAD = re.compile(r'(?:<tool_call>|\A)\s*\{\s*"name":\s*"([^"\\]+)",\s*"arguments":\s*(?=\{)')
_FENCED = re.compile(r"\A\s*(?:```(?:json)?\s*\n)?(\{.*\})\s*(?:```)?\s*\Z", re.DOTALL)

_DECODER = json.JSONDecoder(strict=False)


@dataclass(frozen=True, slots=True)
class ParsedCalls:
    """`problem` says why something that looks like a call is malformed."""

    text: str
    calls: tuple[ToolInvocation, ...] = ()
    problem: str = ""


def call_grammar(tools: Sequence[Mapping[str, Any]]) -> Constraint:
    """The grammar of answers to a request with `tools`. Raises GrammarError for a tool whose parameters
    cannot be enforced."""
    shapes = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                "arguments": tool["function"]["parameters"],
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    schema = json.dumps({"anyOf": shapes, "x-guidance": _STYLE})
    return lark(_GRAMMAR.format(schema=schema), origin="tools")


def parse_calls(text: str) -> ParsedCalls:
    """The calls of an answer, and its remaining text."""
    bodies = _MARKED.findall(text)
    rest = _MARKED.sub("", text).strip()
    if not bodies and (found := _FENCED.match(text)) and '"name"' in text:
        bodies, rest = [found[1]], ""
    calls = []
    for body in bodies:
        call = _parse_call(body)
        if isinstance(call, str):
            return ParsedCalls(text, problem=call)
        calls.append(call)
    return ParsedCalls(rest, tuple(calls))


def complete_calls(text: str) -> tuple[ToolInvocation, ...]:
    """The calls of an unfinished answer whose arguments are complete, as `parse_calls` will return them."""
    calls = []
    for head in _HEAD.finditer(text):
        try:
            arguments, _ = _DECODER.raw_decode(text, head.end())
        except (ValueError, RecursionError):
            break
        calls.append(ToolInvocation(head[1], json.dumps(arguments)))
    return tuple(calls)


def _parse_call(body: str) -> ToolInvocation | str:
    try:
        value: Any = json.loads(body, strict=False)
    except (ValueError, RecursionError) as error:
        return f"a call must be one JSON object with name and arguments; this one is not JSON: {error}"
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return "a call must be one JSON object with name and arguments"
    arguments = value.get("arguments", value.get("parameters", {}))
    return ToolInvocation(value["name"], arguments if isinstance(arguments, str) else json.dumps(arguments))

"""Calls of tools in the text that a model on this machine writes.

Text in, calls and text out; nothing is run. `call_grammar` is the language of such answers, so that a
model can be held to it while it writes. Knows `<tool_call>` marks (Qwen, Hermes) and a JSON object
that is the whole answer, fenced or not. What is almost a call is told apart from talk, so that the model can
be told what is wrong with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keystroke.agent.tools import Call
from keystroke.engine.grammar.constraint import Constraint, lark

# An answer is a call, or words that cannot be mistaken for one, or words and then a call.
_GRAMMAR = r"""
start: body | call | talk call?
talk: /[^<{{`\s][^<`]{{0,1500}}/
call: "<tool_call>\n" body "\n</tool_call>"
body: %json {schema}
"""
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_MARKED = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
_FENCED = re.compile(r"\A\s*(?:```(?:json)?\s*\n)?(\{.*\})\s*(?:```)?\s*\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Read:
    """`problem` says why something that looks like a call is none."""

    text: str
    calls: tuple[Call, ...] = ()
    problem: str = ""


def call_grammar(tools: Sequence[Mapping[str, Any]]) -> Constraint:
    """What a model that was offered `tools` may answer. Raises GrammarError for a tool whose parameters
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


def read_calls(text: str) -> Read:
    """The calls of an answer, and what is left of it as text."""
    bodies = _MARKED.findall(text)
    rest = _MARKED.sub("", text).strip()
    if not bodies and (found := _FENCED.match(text)) and '"name"' in text:
        bodies, rest = [found[1]], ""
    calls = []
    for body in bodies:
        call = _call(body)
        if isinstance(call, str):
            return Read(text, problem=call)
        calls.append(call)
    return Read(rest, tuple(calls))


def _call(body: str) -> Call | str:
    try:
        said: Any = json.loads(body, strict=False)
    except (ValueError, RecursionError) as error:
        return f"a call must be one JSON object with name and arguments; this one is not JSON: {error}"
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        return "a call must be one JSON object with name and arguments"
    arguments = said.get("arguments", said.get("parameters", {}))
    return Call(said["name"], arguments if isinstance(arguments, str) else json.dumps(arguments))

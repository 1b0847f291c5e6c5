"""Calls of tools in the text that a model on this machine writes.

Law: text in, calls and text out; nothing is run. Knows `<tool_call>` marks (Qwen, Hermes) and a JSON object
that is the whole answer, fenced or not. What is almost a call is told apart from talk, so that the model can
be told what is wrong with it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from keystroke.agent.tools import Call

_MARKED = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
_FENCED = re.compile(r"\A\s*(?:```(?:json)?\s*\n)?(\{.*\})\s*(?:```)?\s*\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Read:
    """`problem` says why something that looks like a call is none."""

    text: str
    calls: tuple[Call, ...] = ()
    problem: str = ""


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

"""What a conversation says of the tools a small model may use next: what it was asked, what it has read, and
what has just led nowhere.

Law: reads items, changes none. A line counts as read where a tool's result or a fenced block of the user's
shows it; an instruction is no line of a file. A model of one or two billion parameters repeats itself: a call
made twice in vain, or an edit that failed, is not open to it in the next turn, so that it reads, does
something else, or says that it is done.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from keystroke.assist.tool_calls.tools import Toolset
from keystroke.protocol.items import Item, text_of

_CALLS = ("function_call", "custom_tool_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_FENCED = re.compile(r"^```[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_REPORT = re.compile(
    r"\A(?:[A-Z][\w ]*:[^\n]*\n|Process [^\n]*\n)*Output:\n"
)  # what Codex puts before a result
_FAILED = re.compile(r"\b(fail|error|not found|no such|could not|cannot|invalid)", re.IGNORECASE)


def asked(items: Sequence[Item]) -> str:
    """What the user said last."""
    return next((text_of(i.content) for i in reversed(items) if i.type == "message" and i.role == "user"), "")


def texts_read(items: Sequence[Item], toolset: Toolset) -> list[str]:
    """What a model has read of files."""
    edits = {shown.tool.name for shown in toolset.shown if shown.is_edit}
    of_edits = {i.call_id for i in items if i.type in _CALLS and i.name in edits}
    texts: list[str] = []
    for item in items:
        if item.type in _OUTPUTS and item.call_id not in of_edits:
            texts.append(_REPORT.sub("", _output(item)))
        elif item.type == "message" and item.role == "user":
            texts += _FENCED.findall(text_of(item.content))
    return texts


def spent_tools(items: Sequence[Item], toolset: Toolset) -> frozenset[str]:
    """The tools, by the names they were offered under, that the next turn does without."""
    calls: list[Item] = []
    last = ""
    for item in items:
        if item.type == "message" and item.role == "user":
            calls.clear()
        elif item.type in _CALLS:
            calls.append(item)
        elif item.type in _OUTPUTS:
            last = _output(item)
    if not calls:
        return frozenset()
    name = calls[-1].name or ""
    quoting = {shown.tool.name for shown in toolset.shown if shown.is_edit or shown.grounded}
    twice = len(calls) > 1 and _said(calls[-1]) == _said(calls[-2])
    in_vain = name in quoting and _FAILED.search(last) is not None
    return frozenset({name}) if twice or in_vain else frozenset()


def _said(call: Item) -> tuple[Any, ...]:
    return call.type, call.name, call.arguments, call.input


def _output(item: Item) -> str:
    return (
        item.output
        if isinstance(item.output, str)
        else text_of(item.output if isinstance(item.output, list) else None)
    )

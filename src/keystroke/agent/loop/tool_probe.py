"""Tests whether a model calls tools well enough for the tool loop, with two tiny tasks.

A model's size does not predict it. A model that fails gets regions to rewrite, as a small one does. The
result is cached for the process, by the model's name.
"""

from __future__ import annotations

import json
from typing import Any

from keystroke.agent.chat.model import AnswerOptions, ChatModel
from keystroke.agent.chat.steering import Message
from keystroke.agent.tools.edit import EditTool
from keystroke.agent.tools.read import ReadTool
from keystroke.engine.base import Interrupt
from keystroke.engine.generation import GenerationParams
from keystroke.errors import Interrupted, KeystrokeError

_MOST_TOKENS = 200
_SYSTEM = "You do a programming task in a project by calling tools."
_FILE = "def area(width, height):\n    return width + height\n"
_known: dict[str, bool] = {}


def calls_tools(model: ChatModel, interrupt: Interrupt) -> bool:
    """Whether the model reads a file when it has to, and edits one that it has read. Raises Interrupted."""
    if model.name not in _known:
        try:
            _known[model.name] = _can_read(model, interrupt) and _can_edit(model, interrupt)
        except Interrupted:
            raise
        except KeystrokeError:
            return True  # the task itself reports what is wrong with the model
    return _known[model.name]


def _can_read(model: ChatModel, interrupt: Interrupt) -> bool:
    call = _first_call(model, interrupt, [{"role": "user", "content": "Read the file area.py."}])
    return call is not None and call[0] == ReadTool.name and call[1].get("path") == "area.py"


def _can_edit(model: ChatModel, interrupt: Interrupt) -> bool:
    request = f"area.py is:\n{_FILE}\nEdit it: area must multiply instead of adding."
    call = _first_call(model, interrupt, [{"role": "user", "content": request}])
    if call is None or call[0] != EditTool.name:
        return False
    old, new = str(call[1].get("old", "")), str(call[1].get("new", ""))
    return "width + height" in old and "width * height" in new


def _first_call(
    model: ChatModel, interrupt: Interrupt, messages: list[Message]
) -> tuple[str, dict[str, Any]] | None:
    tools = [_specification(ReadTool), _specification(EditTool)]
    options = AnswerOptions(GenerationParams(_MOST_TOKENS), tools=tools, interrupt=interrupt)
    reply = model.reply([{"role": "system", "content": _SYSTEM}, *messages], options)
    if not reply.calls:
        return None
    try:
        arguments = json.loads(reply.calls[0].arguments)
    except ValueError:
        return None
    return (reply.calls[0].name, arguments) if isinstance(arguments, dict) else None


def _specification(tool: type[ReadTool | EditTool]) -> dict[str, Any]:
    return tool.specification(tool.__new__(tool))

"""A scripted model that does two of the tasks with whatever tools a client offers.

It reads the tools from the prompt as a model does, and answers one step at a time: read the file, change it,
say so. Without tools it answers with the whole file, as aider asks. It shows that a client and the server
understand each other; it says nothing of a model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.client_rows.tasks import TASKS
from keystroke.engine.echo import END_OF_TURN, EOS, SPECIAL, EchoEngine
from keystroke.engine.model import Model
from keystroke.engine.templates import ChatTemplate
from keystroke.engine.tokenizer.byte_tokens import ByteTokenizer

_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]\n{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
_FOLDER = re.compile(r"(?:working (?:in the )?directory|cwd)\W{1,4}(/[^\s`<\"]+)", re.IGNORECASE)
_PATHS = ("filepath", "path", "filename", "targetfile")


@dataclass(frozen=True)
class ScriptedEdit:
    """What solves a task: `old` becomes `new` in a file; without `old` the file is created."""

    path: str
    new: str
    old: str = ""


EDITS = {
    "greeting": ScriptedEdit("hello.py", "print('hello')", "print('hi')"),
    "note": ScriptedEdit("notes.txt", "buy milk"),
}
_PROMPTS = {task.prompt: EDITS[task.name] for task in TASKS if task.name in EDITS}


def scripted_coder() -> Model:
    engine = EchoEngine(answer, context_length=4_000_000, cache_bytes=1 << 26)
    tokenizer = ByteTokenizer(SPECIAL, eos=EOS, vocab_size=320)
    assert END_OF_TURN in engine.info.eos
    return Model(name="scripted", engine=engine, tokenizer=tokenizer, chat=ChatTemplate(_TEMPLATE))


def answer(prompt: str) -> str:
    """The next step of the task that the prompt asks for."""
    found = next((one for one in _PROMPTS if one in prompt), None)
    if found is None:
        return "A small task"
    edit, rest = _PROMPTS[found], prompt.rsplit(found, 1)[1]
    tools = offered(prompt)
    if not tools:
        return f"{edit.path}\n```\n{edit.new}\n```\n" if "file listing" in prompt else "A small task"
    folder = _FOLDER.search(prompt)
    path = f"{folder[1].rstrip('.,')}/{edit.path}" if folder else edit.path
    steps = [call for call in (_read(tools, path, edit), _change(tools, path, edit)) if call is not None]
    done = rest.count("[tool]\n")
    if done >= len(steps):
        return f"{edit.path} is done."
    name, arguments = steps[done]
    # Decoding is held to the schema, and so to the order of its properties.
    arguments = {key: arguments[key] for key in tools[name] if key in arguments}
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def offered(prompt: str) -> dict[str, dict[str, Any]]:
    """The parameters of each tool, from the lines of JSON that describe them."""
    found: dict[str, dict[str, Any]] = {}
    for line in prompt.splitlines():
        if line.startswith("{") and '"parameters"' in line:
            try:
                tool = json.loads(line)
            except ValueError:
                continue
            found[tool["name"]] = tool["parameters"].get("properties") or {}
    return found


def _read(
    tools: Mapping[str, dict[str, Any]], path: str, edit: ScriptedEdit
) -> tuple[str, dict[str, str]] | None:
    """Clients refuse to change a file that was not read; a patch needs no reading."""
    if not edit.old or "apply_patch" in tools:
        return None
    for name, parameters in tools.items():
        place = _named(parameters, *_PATHS)
        if place and re.fullmatch(r"(read|view)(_?file)?", name, re.IGNORECASE):
            return name, {place: path}
    return None


def _change(
    tools: Mapping[str, dict[str, Any]], path: str, edit: ScriptedEdit
) -> tuple[str, dict[str, str]] | None:
    if "apply_patch" in tools:
        lines = f"Update File: {edit.path}\n@@\n-{edit.old}\n" if edit.old else f"Add File: {edit.path}\n"
        return "apply_patch", {"input": f"*** Begin Patch\n*** {lines}+{edit.new}\n*** End Patch\n"}
    for name, parameters in tools.items():
        place = _named(parameters, *_PATHS)
        old, new = _named(parameters, "oldstring", "oldstr"), _named(parameters, "newstring", "newstr")
        if edit.old and place and old and new:
            return name, {place: path, old: edit.old, new: edit.new}
        content = _named(parameters, "content", "filetext", "text")
        if not edit.old and place and content and not old:
            return name, {place: path, content: edit.new + "\n"}
    for name, parameters in tools.items():
        if command := _named(parameters, "command", "cmd"):
            return name, {command: f"printf '%s\\n' \"{edit.new}\" > {edit.path}"}
    return None


def _named(parameters: Mapping[str, Any], *names: str) -> str | None:
    """The parameter that has one of these names, however it is spelt."""
    return next((p for p in parameters if p.lower().replace("_", "") in names), None)

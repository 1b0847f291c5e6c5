"""A small agent over one of the vendors' Python packages: it runs the tools that the model calls.

python -m bench.client_rows.packages anthropic http://127.0.0.1:8012 FOLDER "the task"
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TEXT = {"type": "string"}
_TURNS = 12
TOOLS: dict[str, tuple[str, tuple[str, ...]]] = {
    "read_file": ("Read a file.", ("path",)),
    "edit_file": ("Replace a text in a file.", ("path", "old_string", "new_string")),
    "write_file": ("Write a whole file.", ("path", "content")),
}


def run_tool(folder: Path, name: str, arguments: dict[str, Any]) -> str:
    file = folder / str(arguments["path"])
    if name == "write_file":
        file.write_text(str(arguments["content"]))
        return "written"
    text = file.read_text()
    if name == "read_file":
        return text
    if str(arguments["old_string"]) not in text:
        return "Error: old_string is not in the file."
    file.write_text(text.replace(str(arguments["old_string"]), str(arguments["new_string"]), 1))
    return "edited"


def schema(parameters: tuple[str, ...]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": dict.fromkeys(parameters, _TEXT),
        "required": list(parameters),
        "additionalProperties": False,
    }


def with_openai(url: str, folder: Path, prompt: str) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="local", max_retries=0)
    tools: Any = [
        {"type": "function", "name": name, "description": text, "parameters": schema(fields), "strict": True}
        for name, (text, fields) in TOOLS.items()
    ]
    given: Any = [{"role": "user", "content": prompt}]
    previous: str | None = None
    for _ in range(_TURNS):
        more: Any = {} if previous is None else {"previous_response_id": previous}
        with client.responses.stream(model="fast", input=given, tools=tools, **more) as stream:
            response = stream.get_final_response()
        calls = [item for item in response.output if item.type == "function_call"]
        print(response.output_text)
        if not calls:
            return
        previous = response.id
        given = [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": run_tool(folder, call.name, json.loads(call.arguments)),
            }
            for call in calls
        ]


def with_anthropic(url: str, folder: Path, prompt: str) -> None:
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key="local", max_retries=0)
    tools: Any = [
        {"name": name, "description": text, "input_schema": schema(fields)}
        for name, (text, fields) in TOOLS.items()
    ]
    system: Any = [{"type": "text", "text": "You edit files.", "cache_control": {"type": "ephemeral"}}]
    messages: list[Any] = [{"role": "user", "content": prompt}]
    for _ in range(_TURNS):
        with client.messages.stream(
            model="fast", max_tokens=2000, system=system, tools=tools, messages=messages
        ) as stream:
            message = stream.get_final_message()
        print("".join(block.text for block in message.content if block.type == "text"))
        calls: list[Any] = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            return
        results = [
            {"type": "tool_result", "tool_use_id": c.id, "content": run_tool(folder, c.name, dict(c.input))}
            for c in calls
        ]
        messages += [
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": results},
        ]


def with_ollama(url: str, folder: Path, prompt: str) -> None:
    from ollama import Client

    client = Client(host=url)
    tools: Any = [
        {"type": "function", "function": {"name": name, "description": text, "parameters": schema(fields)}}
        for name, (text, fields) in TOOLS.items()
    ]
    messages: list[Any] = [{"role": "user", "content": prompt}]
    for _ in range(_TURNS):
        text = ""
        calls: list[Any] = []
        for part in client.chat("fast", messages, tools=tools, stream=True):
            text += part.message.content or ""
            calls += part.message.tool_calls or ()
        print(text)
        if not calls:
            return
        messages.append({"role": "assistant", "content": text, "tool_calls": calls})
        for call in calls:
            name, arguments = call.function.name, dict(call.function.arguments)
            messages.append({"role": "tool", "tool_name": name, "content": run_tool(folder, name, arguments)})


AGENTS: dict[str, Callable[[str, Path, str], None]] = {
    "openai": with_openai,
    "anthropic": with_anthropic,
    "ollama": with_ollama,
}

if __name__ == "__main__":
    AGENTS[sys.argv[1]](sys.argv[2], Path(sys.argv[3]), sys.argv[4])

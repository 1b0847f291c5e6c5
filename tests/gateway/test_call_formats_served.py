"""Calls and reasoning of models with other formats, as clients of both APIs receive them."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_support import scripted_model, serving

from keystroke.assist.tool_calls.forms import GLM, HARMONY, NAMED, QWEN, CallForm
from keystroke.engine.model import Model
from keystroke.engine.templates import ChatTemplate

sys.path.insert(0, str(Path(__file__).parents[1] / "assist/tool_calls"))
from test_call_formats import said, thought, written

LINES = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if tools %}tools{% endif %}"
TEMPLATES = {
    "qwen": "{% if false %}<tool_call><function=f><parameter=p>{% endif %}",
    "glm": "{% if false %}<tool_call><arg_key>{% endif %}",
    "mistral-named": "{% if false %}[TOOL_CALLS]f[ARGS]{% endif %}",
    "harmony": "{% if false %}<|channel|><|message|>{% endif %}",
}
ARGUMENTS = {"path": "a.py", "content": 'x = "</parameter>"\nprint(x)\n'}
TEXT = {"subject": "a", "body": 'x = "</parameter>"\nprint(x)\n'}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
    "required": ["path", "content"],
    "additionalProperties": False,
}
FORMS = pytest.mark.parametrize("form", [QWEN, GLM, NAMED, HARMONY], ids=lambda form: form.name)


def served(form: CallForm) -> Model:
    """A model that thinks, then calls write_file or, where it is greeted, answers."""

    def script(prompt: str) -> str:
        if "greet" in prompt:
            return thought(form, "A greeting.") + said(form, "Hello.").removesuffix("<|return|>")
        lead = thought(form, "A file.") if form is HARMONY else ""
        call = ("describe", TEXT) if "describe" in prompt else ("write_file", ARGUMENTS)
        return lead + written(form, *call).removesuffix("<|call|>")

    model = scripted_model(script)
    return dataclasses.replace(model, chat=ChatTemplate(TEMPLATES[form.name] + LINES, foreign=True))


@FORMS
def test_responses_carry_calls_and_reasoning(form: CallForm) -> None:
    tool = {"type": "function", "name": "write_file", "parameters": SCHEMA}
    with serving(served(form)) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        answer = http.post("/v1/responses", json={"input": "write it", "tools": [tool]}).json()
        (call,) = [item for item in answer["output"] if item["type"] == "function_call"]
        assert (call["name"], json.loads(call["arguments"])) == ("write_file", ARGUMENTS)
        assert answer["status"] == "completed"
        answer = http.post("/v1/responses", json={"input": "greet"}).json()
        texts = [part["text"] for i in answer["output"] if i["type"] == "message" for part in i["content"]]
        assert "".join(texts).strip() == "Hello."
        assert any(item["type"] == "reasoning" for item in answer["output"])
        cut = {"input": "write it", "tools": [tool], "max_output_tokens": 60 if form is not HARMONY else 130}
        answer = http.post("/v1/responses", json=cut).json()
        assert (answer["status"], answer["incomplete_details"]["reason"]) == (
            "incomplete",
            "max_output_tokens",
        )


@FORMS
def test_chat_streams_calls_and_reasoning(form: CallForm) -> None:
    # Not a tool that writes files: the content of those is checked before it is sent.
    schema = {**SCHEMA, "properties": {name: {"type": "string"} for name in TEXT}, "required": list(TEXT)}
    tool = {"type": "function", "function": {"name": "describe", "parameters": schema}}

    def stream(http: httpx.Client, **request: Any) -> list[dict[str, Any]]:
        body = {"messages": [{"role": "user", "content": request.pop("asked")}], "stream": True, **request}
        lines = http.post("/v1/chat/completions", json=body).text.splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        return [choice["delta"] for event in events for choice in event["choices"]]

    with serving(served(form)) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        deltas = stream(http, asked="describe it", tools=[tool])
        calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
        assert calls[0]["function"]["name"] == "describe"
        pieces = [call["function"].get("arguments") or "" for call in calls]
        assert json.loads("".join(pieces)) == TEXT
        assert len(pieces) > 2, "arguments are streamed"
        deltas = stream(http, asked="greet")
        assert "".join(delta.get("content") or "" for delta in deltas).strip() == "Hello."
        assert "".join(delta.get("reasoning_content") or "" for delta in deltas).strip() == "A greeting."

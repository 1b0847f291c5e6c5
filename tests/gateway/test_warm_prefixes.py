"""What a warm-up announced is the beginning of every turn after it, where the template allows."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from gateway_support import RunningServer, echo, scripted_model, serving
from test_resume import socket

from keystroke.engine.model import Model
from keystroke.engine.prefix import common_prefix
from keystroke.engine.templates import ChatTemplate
from keystroke.gateway.api import prompts
from keystroke.protocol.items import Item

# The first system text stands with the tools, as in Qwen's templates; later ones stand alone.
TOGETHER = (
    "{% if tools %}[system]\n{{ messages[0].content if messages[0].role == 'system' else '' }}"
    "# Tools{% for t in tools %}\n{{ t | tojson }}{% endfor %}<end>\n"
    "{% elif messages[0].role == 'system' %}[system]\n{{ messages[0].content }}<end>\n{% endif %}"
    "{% for m in messages %}{% if not (loop.first and m.role == 'system') %}"
    "[{{ m.role }}]\n{{ m.content }}<end>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
STRICT = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('one system text only') }}{% endif %}[{{ m.role }}]\n{{ m.content }}<end>\n{% endfor %}{% if add_generation_prompt %}[assistant]\n{% endif %}"  # noqa: E501
FIRST, SECOND = (
    Item(role="developer", content="You edit code. " * 9),
    Item(role="developer", content="Be kind."),
)
USER = Item(role="user", content="hi")
SPECS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def spoken(template: str) -> Model:
    return dataclasses.replace(scripted_model(echo), chat=ChatTemplate(template))


def test_a_warm_up_is_the_beginning_of_a_turn_with_more_developer_messages() -> None:
    model = spoken(TOGETHER)
    assert prompts.keeps_later_system(model)
    for specs in ([], SPECS):
        warm = prompts.render_conversation(
            model, prompts.messages_of(None, [FIRST], apart=True), specs, generate=False
        )
        messages = prompts.messages_of(None, [FIRST, SECOND, USER], words="Answer in JSON.", apart=True)
        turn = prompts.render_conversation(model, messages, specs)
        assert common_prefix(warm, turn) == len(warm)
        text = bytes(t for t in turn if t < 256).decode()
        places = [text.index(part) for part in ("You edit", "Be kind.", "Answer in JSON.", "[user]\nhi")]
        assert places == sorted(places)


def test_a_template_with_one_place_for_system_text_gets_it_gathered() -> None:
    model = spoken(STRICT)
    assert not prompts.keeps_later_system(model)
    messages = prompts.messages_of("Base.", [FIRST, SECOND, USER], words="In JSON.")
    assert [m["role"] for m in messages] == ["system", "user"]
    prompts.render_conversation(model, messages, [])


@pytest.mark.parametrize("foreign", [False, True])
async def test_a_turn_reuses_all_that_its_warm_up_read(foreign: bool) -> None:
    model = dataclasses.replace(scripted_model(echo), chat=ChatTemplate(TOGETHER, foreign=foreign))
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    first = {"role": "developer", "content": "You edit code. " * 9}
    with serving(model) as server:
        warm = await turn(server, generate=False, input=[first], tools=tools)
        said = [first, {"role": "developer", "content": "Be kind."}, {"role": "user", "content": "hi"}]
        answer = await turn(server, input=said, tools=tools)
    assert answer["receipt"]["reused_tokens"] >= warm["usage"]["input_tokens"] - 1


async def turn(server: RunningServer, **fields: Any) -> dict[str, Any]:
    import json

    async with socket(server) as wire:
        await wire.send(json.dumps({"type": "response.create", **fields}))
        while True:
            event = json.loads(await wire.recv())
            if event["type"] == "response.completed":
                server.settled()
                response: dict[str, Any] = event["response"]
                return response
            assert event["type"] != "error", event

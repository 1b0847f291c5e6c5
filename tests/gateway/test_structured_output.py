"""Answers of the form that was asked for, whichever field asked: formats, tools, other servers' fields."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import gateway_support
import httpx
import openai
import pytest
from gateway_support import RunningServer, last_user, scripted_model, serving

from keystroke.config import AssistSettings, NamedModel, Settings
from keystroke.gateway.api.answer_form import AnswerForm, offered_tools, text_format, tool_choice
from keystroke.gateway.work.registry import ModelRegistry, remote_entry
from keystroke.protocol.items import Tool
from keystroke.protocol.requests import CreateRequest

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "n"],
    "additionalProperties": False,
}
FUNCTION = {"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "format": {
        "type": "grammar",
        "syntax": "lark",
        "definition": 'start: "*** Begin" LF ("+" /[a-z ]{1,5}/ LF)+ "*** End"\n%import common.LF',
    },
}


def script(prompt: str) -> str:
    """Says what the user told it to: mostly nothing that fits a form."""
    return last_user(prompt).split("\n")[0].removesuffix("<end>")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(scripted_model(script, context_length=4000)) as running:
        yield running


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
    assert server.settled()


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chat(http: httpx.Client, said: str = "hello there", **fields: Any) -> Any:
    return post(http, "/v1/chat/completions", messages=[{"role": "user", "content": said}], **fields)


def said(body: Any) -> str:
    return str(body["choices"][0]["message"]["content"])


def meets(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"name", "n"} and isinstance(value["name"], str) and value["n"] <= 99


@pytest.mark.parametrize("strict", [True, False])
def test_text_format_holds_a_response_to_its_schema(http: httpx.Client, strict: bool) -> None:
    wanted = {"type": "json_schema", "name": "person", "schema": SCHEMA, "strict": strict}
    body = post(http, "/v1/responses", input="no json here", text={"format": wanted}, max_output_tokens=200)
    assert body["status"] == "completed"
    assert meets(body["output"][0]["content"][0]["text"])
    assert body["text"]["format"] == wanted


FIELDS: dict[str, tuple[dict[str, Any], Any]] = {
    "response_format": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        meets,
    ),
    "response_format of llama.cpp": (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        meets,
    ),
    "json_schema": ({"json_schema": SCHEMA}, meets),
    "guided_json": ({"guided_json": SCHEMA}, meets),
    "guided_json as text": ({"guided_json": json.dumps(SCHEMA)}, meets),
    "structured_outputs": ({"structured_outputs": {"json": SCHEMA}}, meets),
    "guided_regex": ({"guided_regex": "[ab]{3}-[0-9]"}, lambda t: len(t) == 5 and t[3] == "-"),
    "guided_choice": ({"guided_choice": ["yes", "no"]}, lambda t: t in ("yes", "no")),
    "structured_outputs.choice": ({"structured_outputs": {"choice": ["a", "b"]}}, lambda t: t in ("a", "b")),
    "guided_grammar": ({"guided_grammar": 'root ::= "x" [0-9]'}, lambda t: t[0] == "x" and t[1].isdigit()),
    "grammar": ({"grammar": 'root ::= ("ab" | "cd") "!"'}, lambda t: t in ("ab!", "cd!")),
    "grammar in Lark": ({"grammar": 'start: "ab" | "cd"'}, lambda t: t in ("ab", "cd")),
}


@pytest.mark.parametrize("field", FIELDS)
def test_every_servers_own_field_holds_a_chat_answer(http: httpx.Client, field: str) -> None:
    fields, fits = FIELDS[field]
    body = chat(http, max_tokens=200, **fields)
    assert body["choices"][0]["finish_reason"] == "stop"
    assert fits(said(body))


def test_completions_and_infill_take_grammars_too(http: httpx.Client) -> None:
    body = post(http, "/v1/completions", prompt="x = ", max_tokens=50, guided_choice=["left", "right"])
    assert body["choices"][0]["text"] in ("left", "right")
    body = post(http, "/infill", input_prefix="x = ", input_suffix="\n", grammar='root ::= "1" | "2"')
    assert body["content"] in ("1", "2")


def test_any_object_will_do_where_that_is_asked(http: httpx.Client) -> None:
    body = chat(http, '{"a": [1, {"b": null}]}', response_format={"type": "json_object"}, max_tokens=100)
    assert json.loads(said(body)) == {"a": [1, {"b": None}]}


def test_an_answer_cut_by_the_token_limit_says_that_it_is_incomplete(http: httpx.Client) -> None:
    wanted = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    body = post(http, "/v1/responses", input="x", text={"format": wanted}, max_output_tokens=6)
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    cut = chat(http, response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}}, max_tokens=6)
    assert cut["choices"][0]["finish_reason"] == "length"


# Tools


def events(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    with http.stream("POST", "/v1/responses", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        return [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]


def test_a_required_call_streams_its_arguments(http: httpx.Client) -> None:
    seen = events(http, input="I will not", tools=[FUNCTION], tool_choice="required", max_output_tokens=300)
    deltas = [e["delta"] for e in seen if e["type"] == "response.function_call_arguments.delta"]
    assert len(deltas) > 3
    done = next(e for e in seen if e["type"] == "response.function_call_arguments.done")
    assert done["arguments"] == "".join(deltas)
    assert meets(done["arguments"])
    assert seen[-1]["type"] == "response.completed"
    assert seen[-1]["response"]["output"][0]["name"] == "f"


def test_a_custom_tool_is_held_to_its_grammar_and_streams_its_input(http: httpx.Client) -> None:
    choice = {"type": "custom", "name": "apply_patch"}
    seen = events(http, input="no", tools=[FUNCTION, PATCH], tool_choice=choice, max_output_tokens=120)
    deltas = [e["delta"] for e in seen if e["type"] == "response.custom_tool_call_input.delta"]
    written = seen[-1]["response"]["output"][0]["input"]
    assert written == "".join(deltas)
    assert written.startswith("*** Begin\n+")
    if seen[-1]["type"] == "response.completed":
        assert written.endswith("\n*** End")


def test_a_model_is_free_to_answer_and_a_call_it_begins_is_valid(http: httpx.Client) -> None:
    body = post(http, "/v1/responses", input="just words", tools=[FUNCTION, PATCH])
    assert [item["type"] for item in body["output"]] == ["message"]
    begun = (
        'Well: <tool_call>{"name": "f", "arguments": {"name": "this is far too long", "n": 1000}}</tool_call>'
    )
    body = post(http, "/v1/responses", input=begun, tools=[FUNCTION], max_output_tokens=300)
    text, call = body["output"][:2]
    assert text["content"][0]["text"] == "Well: "
    assert call["type"] == "function_call"
    assert meets(call["arguments"])


def test_tool_choice_none_offers_nothing(http: httpx.Client) -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    body = post(http, "/v1/responses", input=call, tools=[FUNCTION], tool_choice="none")
    assert body["output"][0]["content"][0]["text"] == call


def test_one_call_where_parallel_ones_are_refused(http: httpx.Client) -> None:
    one = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    tools = [{"type": "function", "name": "g", "parameters": {"type": "object", "properties": {}}}]
    both = post(http, "/v1/responses", input=one + one, tools=tools)
    assert [item["type"] for item in both["output"]] == ["function_call", "function_call"]
    single = post(http, "/v1/responses", input=one + one, tools=tools, parallel_tool_calls=False)
    assert [item["type"] for item in single["output"]] == ["function_call"]


def test_the_openai_sdk_reads_parsed_answers_and_streamed_calls(server: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x")
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}]
    stream = client.chat.completions.create(
        model="fast",
        messages=[{"role": "user", "content": "no"}],
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        stream=True,
    )
    pieces: list[str] = []
    names: list[str] = []
    for chunk in stream:
        for call in chunk.choices[0].delta.tool_calls or ():
            assert call.function is not None
            names += [call.function.name] if call.function.name else []
            pieces += [call.function.arguments] if call.function.arguments else []
    assert names == ["f"]
    assert len(pieces) > 3
    assert meets("".join(pieces))


# What is refused, and where

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no schema": ("/v1/responses", {"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    "an unknown format": ("/v1/responses", {"text": {"format": {"type": "yaml"}}}, "text.format.type"),
    "a schema nothing meets": (
        "/v1/responses",
        {"text": {"format": {"type": "json_schema", "schema": {"type": "string", "enum": []}}}},
        "text.format.schema",
    ),
    "a keyword that cannot be enforced": (
        "/v1/chat/completions",
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"properties": {"a": {"not": {}}}}, "strict": True},
            }
        },
        "response_format.json_schema.schema",
    ),
    "a broken pattern": ("/v1/chat/completions", {"guided_regex": "(a"}, "guided_regex"),
    "a broken grammar": ("/v1/chat/completions", {"grammar": "root ::= ("}, "grammar"),
    "two at once": ("/v1/chat/completions", {"guided_regex": "a", "guided_choice": ["b"]}, "response_format"),
    "an unknown one": (
        "/v1/chat/completions",
        {"structured_outputs": {"structural_tag": "x"}},
        "structured_outputs.structural_tag",
    ),
    "a strict tool": (
        "/v1/responses",
        {"tools": [{"type": "function", "name": "t", "strict": True, "parameters": {"not": {}}}]},
        "tools[0].parameters",
    ),
    "a tool's grammar": (
        "/v1/responses",
        {"tools": [{**PATCH, "format": {"type": "grammar", "syntax": "lark", "definition": "start: ("}}]},
        "tools",
    ),
    "another tool": ("/v1/responses", {"tools": [FUNCTION], "tool_choice": {"name": "g"}}, "tool_choice"),
    "a choice that is none": ("/v1/responses", {"tools": [FUNCTION], "tool_choice": 7}, "tool_choice"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_met_is_refused_with_the_place_it_stands(http: httpx.Client, case: str) -> None:
    path, fields, param = REFUSED[case]
    body = {"input": "x"} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "x"}]}
    answer = http.post(path, json={**body, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert "Traceback" not in answer.text


def test_a_tool_whose_schema_cannot_be_enforced_is_still_offered(http: httpx.Client) -> None:
    odd = {
        "type": "function",
        "name": "t",
        "parameters": {"type": "object", "properties": {"a": {"pattern": "(", "type": "string"}}},
    }
    call = '<tool_call>{"name": "t", "arguments": {"a": "b"}}</tool_call>'
    body = post(http, "/v1/responses", input=call, tools=[odd])
    assert body["output"][0]["arguments"] == '{"a": "b"}'


# Values


def test_both_apis_say_what_a_small_model_was_not_shown() -> None:
    tools = [
        {"name": name, "parameters": SCHEMA} for name in ("run_command", "read_file", "edit", "web_goal")
    ]
    short = AssistSettings(tool_declarations="short")
    with (
        serving(scripted_model(script, context_length=4000), assist=short) as running,
        httpx.Client(base_url=running.url, timeout=60) as http,
    ):
        flat = [{"type": "function", **tool} for tool in tools]
        nested = [{"type": "function", "function": tool} for tool in tools]
        said = [{"role": "user", "content": "hello"}]
        response = post(http, "/v1/responses", input="hello", tools=flat)
        whole = post(http, "/v1/chat/completions", messages=said, tools=nested)
        body = {"messages": said, "tools": nested, "stream": True}
        with http.stream("POST", "/v1/chat/completions", json=body) as stream:
            lines = [line[6:] for line in stream.iter_lines() if line.startswith("data: {")]
        chunks = [json.loads(line) for line in lines]
        plain = post(http, "/v1/chat/completions", messages=said)
    wanted = {"tools": ["web_goal"], "blocks": []}
    assert [response["shortened"], whole["shortened"], chunks[0]["shortened"]] == [wanted] * 3
    assert not any("shortened" in chunk for chunk in chunks[1:])
    assert "shortened" not in plain


def test_tools_are_offered_flat_with_all_that_holds_them() -> None:
    tools = [
        Tool(name="f", parameters={"type": "object"}, strict=True),
        Tool(type="custom", name="apply_patch", format={"syntax": "lark", "definition": "start: PATCH"}),
        Tool(type="custom", name="nested", format={"grammar": {"syntax": "regex", "definition": "a+"}}),
        Tool(type="web_search"),
        Tool(type="namespace", name="db", tools=[Tool(name="query")]),
    ]
    offered = offered_tools(tools)
    assert [tool.name for tool in offered] == ["f", "apply_patch", "nested", "query"]
    assert [tool.grammar for tool in offered] == [None, ("lark", "start: PATCH"), ("regex", "a+"), None]
    assert offered[3].namespace == "db"
    assert offered[0].strict


def test_choices_of_tools_are_read_in_every_spelling() -> None:
    offered = offered_tools([Tool(name="f"), Tool(name="g")])
    assert tool_choice("auto", offered).mode == "auto"
    assert tool_choice("any", offered).mode == "required"
    for named in ({"type": "function", "name": "f"}, {"type": "function", "function": {"name": "f"}}):
        assert tool_choice(named, offered).only == frozenset({"f"})
    some = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}
    assert tool_choice(some, offered) == tool_choice({"type": "function", "name": "g"}, offered)
    assert tool_choice({"type": "web_search"}, offered).mode == "auto"


def test_another_server_is_told_what_was_asked_and_its_answer_is_checked() -> None:
    wanted = text_format({"type": "json_schema", "schema": SCHEMA}, "text.format", CreateRequest())
    form = AnswerForm(text=wanted)
    assert form.remote["response_format"]["json_schema"]["schema"] == SCHEMA
    assert form.check('{"name": "x", "n": 3}') is None
    for text in ("no", '{"name": "x"}', '{"name": "x", "n": 1000}', '{"name": 1, "n": 2}'):
        error = form.check(text)
        assert error is not None
        assert "text.format.schema" in str(error)


async def test_a_remote_model_that_ignores_a_format_fails_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def behind_script(prompt: str) -> str:
        told.append(prompt)
        return '{"name": "x", "n": 5}' if "good" in prompt else "no json"

    with serving(scripted_model(behind_script, name="echo")) as behind:
        table = NamedModel(engine="remote", base_url=f"{behind.url}/v1", model="echo", role="fast")
        far = ModelRegistry([remote_entry("far", table, Settings())])
        monkeypatch.setattr(gateway_support, "ModelRegistry", lambda _entries: far)
        with serving(scripted_model()) as front, httpx.Client(base_url=front.url, timeout=60) as client:
            wanted = {"type": "json_schema", "schema": SCHEMA}
            body = post(client, "/v1/responses", input="good", text={"format": wanted})
            assert body["output"][0]["content"][0]["text"] == '{"name": "x", "n": 5}'
            # The server behind holds its model to the schema, as it was told to.
            body = post(client, "/v1/responses", input="bad", text={"format": wanted}, max_output_tokens=300)
            assert meets(body["output"][0]["content"][0]["text"])

"""What Codex and other current clients of the Responses API send beside the conversation itself: cache marks,
notes, turn state, timings, tools as items, sub-agents on one connection."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
import websockets
from gateway_support import RunningServer, last_user, scripted_model, serving

from keystroke.engine.prefix import PrefixCache


def script(prompt: str) -> str:
    if "[tools]" in prompt:
        return "tools"
    return f"You said: {last_user(prompt)[:40]}"


@pytest.fixture(scope="module")
def server() -> Any:
    with serving(scripted_model(script)) as running:
        yield running


def ask(server: RunningServer, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    answer = httpx.post(f"{server.url}/v1/responses", json=fields, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def part(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "input_text", "text": text, **more}


# Notes


def test_reasoning_is_ignored_with_a_note_where_the_model_does_not_reason(server: RunningServer) -> None:
    body = ask(
        server, input="x", reasoning={"effort": "high", "summary": "auto"}, text={"verbosity": "low"}
    ).json()
    assert body["reasoning"] == {"effort": "high", "summary": "auto"}
    assert [note.split()[0] for note in body["notes"]] == [
        "reasoning.summary",
        "text.verbosity",
        "reasoning.effort",
    ]
    assert "notes" not in ask(server, input="x").json()


def test_encrypted_reasoning_of_earlier_turns_is_accepted(server: RunningServer) -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"}
    items = [{"role": "user", "content": "a"}, thought, {"role": "user", "content": "b"}]
    body = ask(server, input=items, include=["reasoning.encrypted_content"], store=False).json()
    assert body["output"][0]["content"][0]["text"] == "You said: b<end>".removesuffix("<end>")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("conversation", "conv_1"),
        ("prompt", {"id": "pmpt_1"}),
        ("truncation", "sometimes"),
        ("max_tool_calls", 0),
        ("context_management", [{"type": "clear_tools"}]),
        ("prompt_cache_options", {"ttl": "soon"}),
    ],
)
def test_what_is_not_supported_is_refused_by_name(server: RunningServer, field: str, value: Any) -> None:
    answer = httpx.post(f"{server.url}/v1/responses", json={"input": "x", field: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(field)


def test_what_is_stored_with_a_response_is_echoed(server: RunningServer) -> None:
    given: dict[str, Any] = {
        "metadata": {"a": "b"},
        "safety_identifier": "user-1",
        "max_tool_calls": 3,
        "parallel_tool_calls": False,
        "prompt_cache_key": "k",
        "truncation": "auto",
    }
    body = ask(server, input="x", **given).json()
    assert {name: body[name] for name in given} == given


def test_calls_after_the_last_that_is_allowed_are_left_out() -> None:
    def calls(_prompt: str) -> str:
        return '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n' * 3

    tools = [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}]
    with serving(scripted_model(calls)) as server:
        body = ask(server, input="x", tools=tools, max_tool_calls=2).json()
        whole = ask(server, input="x", tools=tools).json()
    assert [item["type"] for item in body["output"]] == ["function_call"] * 2
    assert len(whole["output"]) == 3


# The prompt cache


def test_usage_says_what_was_read_from_the_cache_and_what_was_written(server: RunningServer) -> None:
    text = "Some rules. " * 40
    first = ask(server, input=text).json()["usage"]
    again = ask(server, input=text).json()["usage"]
    for usage in (first, again):
        details = usage["input_tokens_details"]
        assert details["cached_tokens"] + details["cache_write_tokens"] == usage["input_tokens"]
    assert again["input_tokens_details"]["cached_tokens"] > first["input_tokens_details"]["cached_tokens"]


def test_a_marked_prefix_stays_while_others_are_evicted() -> None:
    """A cache of about six conversations; twenty others come between two uses of the marked one."""
    rules = "These are the rules. " * 20

    def reused(**mark: Any) -> int:
        with serving(scripted_model(script, cache_bytes=4096)) as server:
            body = [{"role": "user", "content": [part(rules, **mark), part("one")]}]
            ask(server, input=body, store=False)
            for other in range(20):
                ask(server, input=f"{other} " * 200, store=False)
            body = [{"role": "user", "content": [part(rules), part("two")]}]
            usage = ask(server, input=body, store=False).json()["usage"]
        cached: int = usage["input_tokens_details"]["cached_tokens"]
        return cached

    assert reused() < 50
    assert reused(prompt_cache_breakpoint={"mode": "explicit"}) >= len(rules)


def test_a_protected_prefix_goes_last_and_only_while_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("keystroke.engine.prefix.time.monotonic", lambda: now)
    cache: PrefixCache[None] = PrefixCache(3)
    cache.protect([1, 2], 60.0)
    cache.put([1, 2, 3], None, 1)
    for first in range(10, 20):
        cache.put([first], None, 1)
    assert cache.find([1, 2, 9])[1] == 2
    for first in range(30, 32):
        cache.put([first], None, 1)  # the entry is the oldest again
    now = 61.0
    for first in range(40, 43):
        cache.put([first], None, 1)
    assert cache.find([1, 2, 9])[1] == 0


def test_nothing_is_generated_for_a_prewarm(server: RunningServer) -> None:
    text = "Long rules to be read ahead. " * 30
    warm = ask(server, input=text, prompt_cache_options={"prewarm": True}).json()
    assert warm["status"] == "completed"
    assert warm["output"] == []
    assert server.settled()
    body = ask(server, input="go", previous_response_id=warm["id"]).json()
    assert body["usage"]["input_tokens_details"]["cached_tokens"] > len(text)


# Codex


def test_the_turn_state_is_returned_and_chooses_the_engine(server: RunningServer) -> None:
    first = ask(server, input="x")
    state = first.headers["x-codex-turn-state"]
    again = ask(server, {"x-codex-turn-state": state}, input="something else")
    assert again.headers["x-codex-turn-state"] == state
    keyed = ask(server, input="x", prompt_cache_key="session-1")
    assert keyed.headers["x-codex-turn-state"] == "session-1"
    strange = ask(server, {"x-codex-turn-state": "a b\tc" * 60}, input="x")
    assert strange.headers["x-codex-turn-state"] == state


@pytest.mark.parametrize("key", ["日本", "a\r\nx-other: 1", "two words", "k" * 1024])
def test_a_cache_key_that_no_header_can_carry_still_names_the_turn(server: RunningServer, key: str) -> None:
    keyed = ask(server, input="x", prompt_cache_key=key)
    assert keyed.json()["prompt_cache_key"] == key
    state = keyed.headers["x-codex-turn-state"]
    assert ask(server, {"x-codex-turn-state": state}, input="y").headers["x-codex-turn-state"] == state
    assert ask(server, input="z", prompt_cache_key=key).headers["x-codex-turn-state"] == state


def test_the_list_of_models_has_an_etag(server: RunningServer) -> None:
    listed = httpx.get(f"{server.url}/v1/models")
    etag = listed.headers["etag"]
    assert httpx.get(f"{server.url}/v1/models", headers={"if-none-match": etag}).status_code == 304
    assert httpx.get(f"{server.url}/v1/models", headers={"if-none-match": '"x"'}).status_code == 200
    assert ask(server, input="x").headers["x-models-etag"] == etag.strip('"')


async def frames(server: RunningServer, sent: list[dict[str, Any]], **headers: str) -> list[dict[str, Any]]:
    """All events until every request has ended."""
    events: list[dict[str, Any]] = []
    async with websockets.connect(server.ws, additional_headers=headers) as socket:
        assert socket.response is not None
        assert "x-models-etag" in socket.response.headers
        for event in sent:
            await socket.send(json.dumps({"type": "response.create", **event}))
        while sum(e["type"] == "response.completed" for e in events) < len(sent):
            events.append(json.loads(await socket.recv()))
            assert events[-1]["type"] != "error", events[-1]
    return events


def test_timings_precede_the_end_where_they_are_asked_for(server: RunningServer) -> None:
    wanted = {"x-responsesapi-include-timing-metrics": "true"}
    kinds = [e["type"] for e in asyncio.run(frames(server, [{"input": "x"}], **wanted))]
    assert kinds[-2:] == ["responsesapi.websocket_timing", "response.completed"]
    plain = [e["type"] for e in asyncio.run(frames(server, [{"input": "x"}]))]
    assert "responsesapi.websocket_timing" not in plain


def test_tools_given_as_an_item_are_offered(server: RunningServer) -> None:
    """As Codex sends them since 0.147: no `tools`, an item instead; later turns need not repeat it."""
    tool = {"type": "function", "name": "read_file", "parameters": {"type": "object", "properties": {}}}
    item = {
        "type": "additional_tools",
        "role": "developer",
        "tools": [{"type": "namespace", "name": "fs", "tools": [tool]}],
    }
    first = ask(
        server,
        input=[item, {"role": "user", "content": "go"}],
        tools=[],
        tool_choice={"type": "function", "name": "read_file"},
    ).json()
    call = first["output"][0]
    assert (call["type"], call["name"], call["namespace"]) == ("function_call", "read_file", "fs")
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "text"}
    second = ask(
        server,
        input=[output],
        previous_response_id=first["id"],
        tool_choice={"type": "function", "name": "read_file"},
    ).json()
    assert second["output"][0]["name"] == "read_file"


def test_sub_agents_of_one_connection_are_forked_from_their_shared_prefix() -> None:
    """Several streams continue one response at once: what it holds is not read again for any of them."""
    rules = "Shared instructions of all agents. " * 60
    with serving(scripted_model(script, step_cost=0.0005)) as server:

        async def run() -> list[dict[str, Any]]:
            async with websockets.connect(server.ws) as socket:

                async def send(**event: Any) -> None:
                    await socket.send(json.dumps({"type": "response.create", "store": False, **event}))

                async def ends(count: int) -> list[dict[str, Any]]:
                    found: list[dict[str, Any]] = []
                    while len(found) < count:
                        event = json.loads(await socket.recv())
                        assert event["type"] != "error", event
                        assert event["type"] not in ("response.incomplete", "response.failed"), event
                        if event["type"] == "response.completed":
                            found.append(event)
                    return found

                await send(input=rules, stream_id="main")
                (first,) = await ends(1)
                for agent in range(6):
                    await send(
                        input=f"You are agent {agent}.",
                        previous_response_id=first["response"]["id"],
                        stream_id=f"agent-{agent}",
                    )
                return await ends(6)

        before = server.engines["echo"].prefilled
        ended = asyncio.run(run())
        read = server.engines["echo"].prefilled - before
        assert server.settled()
    assert {e["stream_id"] for e in ended} == {f"agent-{n}" for n in range(6)}
    for event in ended:
        assert event["response"]["usage"]["input_tokens_details"]["cached_tokens"] > len(rules)
    assert read < 2 * len(rules), "the shared prefix was read once"

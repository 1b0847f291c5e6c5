"""Conversations that outgrow the context: summaries in place of older turns, and nothing lost on the way."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from itertools import pairwise
from typing import Any

import httpx
import msgspec
import openai
import pytest
import websockets
from gateway_support import RunningServer, last_user, scripted_model, serving

from keystroke.gateway.api.compaction import (
    choose_cut,
    compacted_items,
    shorten_outputs,
    user_messages,
)
from keystroke.protocol.compaction import CompactedWindow, expand_compaction, pack_window, unpack_window
from keystroke.protocol.items import Item

CONTEXT = 8192
FACT = re.compile(r"the password of the build server is (\w+)")


def remembering(prompt: str) -> str:
    """A model that knows what its prompt contains, and nothing else."""
    found = FACT.search(prompt)
    known = f"the password of the build server is {found[1]}" if found else "nothing is known"
    asked = last_user(prompt)
    if "Write a summary" in asked:
        return f"Facts: {known}."
    return known if "what is the password" in asked else f"Done. {'x' * 200}"


def ask(server: RunningServer, **fields: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/v1/responses", json=fields, timeout=60)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def text_of(response: dict[str, Any]) -> str:
    return "".join(
        part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"]
    )


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def work(turn: int) -> str:
    return f"Step {turn}: " + " ".join(f"change{turn}_{word}" for word in range(40))


FIRST = "Remember that the password of the build server is swordfish."
LAST = "Now tell me: what is the password?"


def test_sixty_turns_over_a_short_context_keep_what_the_first_one_said() -> None:
    """One connection, as Codex holds it: only new input is sent."""

    async def run(server: RunningServer) -> list[dict[str, Any]]:
        responses = []
        async with websockets.connect(server.ws) as socket:
            previous = None
            for turn in range(60):
                text = FIRST if turn == 0 else LAST if turn == 59 else work(turn)
                frame = {"type": "response.create", "input": [user(text)], "store": False}
                await socket.send(msgspec.json.encode({**frame, "previous_response_id": previous}).decode())
                while True:
                    event = msgspec.json.decode(await socket.recv())
                    assert event["type"] not in ("error", "response.failed", "response.incomplete"), event
                    if event["type"] == "response.completed":
                        break
                previous = event["response"]["id"]
                responses.append(event["response"])
        return responses

    with serving(scripted_model(remembering, context_length=CONTEXT)) as server:
        responses = asyncio.run(run(server))
        assert server.settled()
    made = [r["compacted"] for r in responses if "compacted" in r]
    assert len(made) >= 5
    assert all(r["usage"]["input_tokens"] < CONTEXT for r in responses)
    assert all(one["dropped_items"] > 0 and one["tokens_after"] < one["tokens_before"] for one in made)
    assert "swordfish" in text_of(responses[-1])
    # A turn after a compaction continues from the compacted prompt: nothing is read twice.
    after = [b for a, b in pairwise(responses) if "compacted" in a]
    plain = [r for r in after if "compacted" not in r]
    assert plain
    assert all(r["usage"]["input_tokens_details"]["cached_tokens"] > CONTEXT // 5 for r in plain)


def test_a_client_that_repeats_its_whole_conversation_gets_one_summary_for_many_turns() -> None:
    history: list[dict[str, Any]] = [{"role": "developer", "content": "You are terse."}]
    made = []
    with serving(scripted_model(remembering, context_length=CONTEXT)) as server:
        for turn in range(40):
            history.append(user(FIRST if turn == 0 else LAST if turn == 39 else work(turn)))
            response = ask(server, input=history, store=False)
            made.append(response.get("compacted"))
            history += response["output"]
    assert "swordfish" in text_of(response)
    new = [one for one in made if one is not None and one["reason"] == "context"]
    again = [one for one in made if one is not None and one["reason"] == "earlier"]
    assert len(new) >= 3
    assert len(again) > 2 * len(new)


def test_the_threshold_of_a_request_is_kept_and_its_item_carries_the_conversation() -> None:
    """The client drops what precedes the compaction item, as the API's guide says it may."""
    limits = [{"type": "compaction", "compact_threshold": 3000}]
    with serving(scripted_model(remembering)) as server:
        history: list[dict[str, Any]] = [user(FIRST)]
        found: list[dict[str, Any]] = []
        for turn in range(30):
            response = ask(server, input=history, store=False, context_management=limits)
            found = [item for item in response["output"] if item["type"] == "compaction"]
            history = [*response["output"]] if found else [*history, *response["output"]]
            if found:
                break
            history.append(user(work(turn)))
        assert response["compacted"]["reason"] == "threshold"
        assert found[0]["summary"].startswith("Summary of the earlier conversation")
        assert response["output"][0]["type"] == "compaction"  # before the model's own output
        final = ask(server, input=[*history, user(LAST)], store=False)
    assert "swordfish" in text_of(final)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_client_that_hangs_up_stops_the_summary(path: str, stream: bool) -> None:
    history = [user(FIRST)]
    for turn in range(40):
        history += [{"role": "assistant", "content": "Done."}, user(work(turn))]
    body = {"input" if path == "/v1/responses" else "messages": history, "stream": stream, "max_tokens": 100}
    model = scripted_model(lambda _prompt: "x" * 100_000, context_length=CONTEXT, step_cost=0.02)
    with serving(model) as server:
        engine = server.engines["echo"]
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            data = msgspec.json.encode(body)
            head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(data)}\r\n\r\n"
            connection.sendall(head.encode() + data)
            while engine.steps < 3:
                time.sleep(0.005)
        assert server.settled()
        # The summary was cut off, and the answer it was for did not begin.
        assert engine.steps < 500


def test_a_stored_conversation_continues_from_its_compaction_item(tmp_path: Any) -> None:
    limits = [{"type": "compaction", "compact_threshold": 3000}]
    previous = None
    with serving(scripted_model(remembering), folder=tmp_path) as server:
        for turn in range(12):
            text = FIRST if turn == 0 else work(turn)
            response = ask(
                server, input=text, previous_response_id=previous, context_management=limits, store=True
            )
            previous = response["id"]
    with serving(scripted_model(remembering), folder=tmp_path) as server:  # another process: only the store
        final = ask(server, input=LAST, previous_response_id=previous)
    assert "swordfish" in text_of(final)
    assert final["usage"]["input_tokens"] < 4000


def test_truncation_drops_the_oldest_turns_without_a_summary() -> None:
    history = [user(FIRST), *(user(work(turn)) for turn in range(60)), user(LAST)]
    with serving(scripted_model(remembering, context_length=CONTEXT)) as server:
        response = ask(server, input=history, truncation="auto")
        assert response["truncation"] == "auto"
        assert response["compacted"]["reason"] == "truncation"
        assert response["compacted"]["summary"] == ""
        assert text_of(response) == "nothing is known"
        refused = httpx.post(
            f"{server.url}/v1/responses", json={"input": history, "truncation": "disabled"}, timeout=60
        )
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"


def test_a_long_result_of_a_tool_does_not_end_a_task() -> None:
    tools = [{"type": "function", "name": "read", "parameters": {"type": "object"}}]
    call = {"type": "function_call", "call_id": "c1", "name": "read", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "line\n" * 4000}
    with serving(scripted_model(remembering, context_length=CONTEXT)) as server:
        response = ask(server, input=[user("Read it."), call, output], tools=tools)
    assert response["status"] == "completed"
    assert response["compacted"]["tokens_after"] < CONTEXT


def test_a_single_message_that_does_not_fit_is_refused_clearly() -> None:
    with serving(scripted_model(remembering, context_length=CONTEXT)) as server:
        refused = httpx.post(f"{server.url}/v1/responses", json={"input": "x" * 9000}, timeout=60)
    assert refused.status_code == 400
    assert "9," in refused.json()["error"]["message"]


# The endpoints of their own


def test_a_compacted_conversation_is_the_input_of_the_next_request() -> None:
    """Through the vendor's SDK: /responses/compact, /responses/input_tokens and what comes after."""
    history: Any = [{"role": "developer", "content": "You are terse."}, user(FIRST)]
    history += [user(work(turn)) for turn in range(30)]
    with serving(scripted_model(remembering)) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        whole = client.responses.input_tokens.count(input=history).input_tokens
        made = client.responses.compact(model="auto", input=history)
        assert made.object == "response.compaction"
        assert made.output[-1].type == "compaction"
        assert made.usage.output_tokens > 0
        window: Any = [item.model_dump(exclude_none=True, warnings=False) for item in made.output]
        short = client.responses.input_tokens.count(input=window).input_tokens
        assert short < whole / 3
        last: Any = user(LAST)
        answer = client.responses.create(model="auto", input=[*window, last])
        again = client.responses.compact(model="auto", input=[*window, last])
        packed: Any = [again.output[-1].model_dump(exclude_none=True), user(LAST)]
        final = client.responses.create(model="auto", input=packed)
    assert answer.usage is not None
    assert "swordfish" in answer.output_text
    assert "swordfish" in final.output_text


def test_the_counted_tokens_are_those_of_the_response() -> None:
    tools = [{"type": "function", "name": "read", "parameters": {"type": "object"}}]
    body = {"input": [user("hello")], "instructions": "Be brief.", "tools": tools}
    with serving(scripted_model(remembering)) as server:
        counted = httpx.post(f"{server.url}/v1/responses/input_tokens", json=body)
        answered = ask(server, **body)
    assert counted.json() == {
        "input_tokens": answered["usage"]["input_tokens"],
        "object": "response.input_tokens",
    }


def test_a_conversation_of_one_message_is_compacted_to_itself() -> None:
    with serving(scripted_model(remembering)) as server:
        url = f"{server.url}/v1/responses/compact"
        made = httpx.post(url, json={"model": "auto", "input": [user(FIRST)]}).json()
        assert made["compacted"]["dropped_items"] == 0
        answer = ask(server, input=[made["output"][-1], user(LAST)])
    assert "swordfish" in text_of(answer)


def test_embeddings_are_refused_by_name() -> None:
    with serving(scripted_model(remembering)) as server:
        refused = httpx.post(f"{server.url}/v1/embeddings", json={"model": "auto", "input": "x"})
    assert refused.status_code == 400
    assert "embeddings" in refused.json()["error"]["message"]


# Values


def call(name: str) -> Item:
    return Item(type="function_call", call_id=name, name="run", arguments="{}")


def output(name: str, text: str = "ok") -> Item:
    return Item(type="function_call_output", call_id=name, output=text)


def said(text: str, role: str = "user") -> Item:
    return Item(role=role, content=text)


@pytest.mark.parametrize("budget", range(12))
def test_a_result_never_stays_without_its_call(budget: int) -> None:
    items = [
        said("go", "system"),
        said("a"),
        call("1"),
        call("2"),
        output("1"),
        output("2"),
        call("3"),
        output("3"),
    ]
    cut = choose_cut(items, [1] * len(items), budget)
    if cut is not None:
        assert cut <= 6  # the newest call and its result stay
        fitted = compacted_items(items, cut, "summary")
        called = {i.call_id for i in fitted if i.type == "function_call"}
        assert {i.call_id for i in fitted if i.type == "function_call_output"} <= called
        assert any(i.role == "user" for i in fitted)  # the task stays
        assert fitted[0].role == "system"


def test_nothing_goes_where_only_an_earlier_summary_could() -> None:
    items = [said("rules", "developer"), Item(type="compaction", content="s"), said("b")]
    assert choose_cut(items, [1, 1, 1], 1) is None


def test_the_users_words_stay_over_many_summaries() -> None:
    listed = user_messages([said("first"), said("second")], 1000)
    for number in range(50):
        earlier = Item(type="compaction", content=f"Summary\n{listed}")
        listed = user_messages([earlier, said(f"request {number}")], 200)
    assert "- first\n- second" in listed
    assert "request 49" in listed
    assert len(listed) < 400


def test_long_outputs_keep_both_ends() -> None:
    (short, whole) = shorten_outputs([output("1", "a" * 500 + "b" * 500), output("2", "ok")], 100)
    assert isinstance(short.output, str)
    assert short.output.startswith("a" * 50)
    assert short.output.endswith("b" * 50)
    assert "900 characters" in short.output
    assert whole.output == "ok"


def test_a_packed_window_survives_and_a_foreign_one_is_left_out() -> None:
    window = CompactedWindow([said("rules", "system")], "what was", [said("newest")])
    packed = pack_window(window)
    assert unpack_window(packed) == window
    assert unpack_window(packed[:-8]) is None
    assert unpack_window("gAAAA") is None
    foreign = Item(type="compaction", encrypted_content="gAAAA")
    assert expand_compaction([said("a"), foreign, said("b")]) == [said("a"), said("b")]
    ours = Item(type="compaction_summary", encrypted_content=packed)
    expanded = expand_compaction([said("a"), ours, said("b")])
    assert [i.content for i in expanded] == ["rules", "what was", "newest", "b"]
    newer = expand_compaction([said("new rules", "developer"), said("a"), ours, said("b")])
    assert [i.content for i in newer] == ["new rules", "what was", "newest", "b"]

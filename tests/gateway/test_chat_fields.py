"""Fields of Chat Completions and Completions, through the vendor's SDK where it has them."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from gateway_support import RunningServer, last_user, scripted_model, serving

CONTEXT = 4096
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("read", "write")
]


def script(prompt: str) -> str:
    asked = last_user(prompt)
    if "Write a summary" in asked:
        return "Facts: the code word is heron."
    if "code word?" in asked:
        return "heron" if "heron" in prompt else "unknown"
    return f"You said: {asked}"


@pytest.fixture(scope="module")
def server() -> Any:
    with serving(scripted_model(script, context_length=CONTEXT)) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def test_several_choices_share_one_prompt(server: RunningServer, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="auto", messages=[user("hello")], n=3, seed=1)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert {c.message.content for c in answer.choices} == {"You said: hello"}
    assert answer.usage is not None
    one = client.chat.completions.create(model="auto", messages=[user("hello")])
    assert one.usage is not None
    assert answer.usage.prompt_tokens == one.usage.prompt_tokens
    assert answer.usage.completion_tokens == 3 * one.usage.completion_tokens
    texts = client.completions.create(model="auto", prompt="[user]\nhi\n[assistant]\n", n=2)
    assert [c.index for c in texts.choices] == [0, 1]
    assert server.settled()


def test_choices_stream_with_their_index_and_end_with_one_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="auto", messages=[user("hello")], n=2, stream=True, stream_options={"include_usage": True}
    )
    said, identities, ends, usages = {0: "", 1: ""}, set(), 0, []
    for chunk in stream:
        identities.add(chunk.id)
        for choice in chunk.choices:
            said[choice.index] += choice.delta.content or ""
            ends += choice.finish_reason is not None
        if chunk.usage is not None:
            usages.append(chunk.usage.completion_tokens)
    assert said == {0: "You said: hello", 1: "You said: hello"}
    assert len(identities) == 1
    assert ends == 2
    assert len(usages) == 1


def test_a_request_whose_second_choice_is_refused_leaves_nothing_running() -> None:
    from keystroke.config import NamedModel

    tables = {"echo": NamedModel(concurrent=1, requests_per_minute=2)}
    with serving(scripted_model(script), tables=tables) as server:
        answer = httpx.post(
            f"{server.url}/v1/chat/completions", json={"messages": [user("hello")], "n": 4}, timeout=30
        )
        assert answer.status_code == 429
        assert server.settled()


@pytest.mark.parametrize(
    ("choice", "status"),
    [
        ("none", 200),
        ("auto", 200),
        ("required", 200),
        ({"type": "function", "function": {"name": "read"}}, 200),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOLS[0]]}}, 200),
        ({"type": "function", "function": {"name": "gone"}}, 400),
        ({"type": "function", "function": {}}, 400),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "perhaps", "tools": [TOOLS[0]]}}, 400),
        ("perhaps", 400),
        (7, 400),
    ],
)
def test_every_form_of_tool_choice(server: RunningServer, choice: Any, status: int) -> None:
    body = {"messages": [user("hello")], "tools": TOOLS, "tool_choice": choice, "max_tokens": 8}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=30)
    assert answer.status_code == status, answer.text
    if status == 400:
        assert answer.json()["error"]["param"].startswith("tool_choice")


def test_older_functions_are_tools(server: RunningServer) -> None:
    functions = [{"name": "read", "parameters": {"type": "object", "properties": {}}}]
    body = {
        "messages": [user("hello")],
        "functions": functions,
        "function_call": {"name": "read"},
        "max_tokens": 64,
    }
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=30).json()
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "read"
    body["function_call"] = {"name": 3}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=30).status_code == 400


def test_what_is_ignored_is_said(client: openai.OpenAI) -> None:
    answer: Any = client.chat.completions.create(
        model="auto",
        messages=[user("hello")],
        frequency_penalty=0.5,
        presence_penalty=0,
        logit_bias={"50256": -100},
        verbosity="low",
        user="me",
    )
    fields = [note.split()[0] for note in answer.notes]
    assert fields == ["frequency_penalty", "logit_bias", "user", "verbosity"]
    plain: Any = client.chat.completions.create(model="auto", messages=[user("hello")])
    assert getattr(plain, "notes", None) is None


def test_audio_is_refused_by_name(server: RunningServer) -> None:
    for field, value in (("audio", {"voice": "alloy", "format": "wav"}), ("modalities", ["audio"])):
        body = {"messages": [user("hello")], field: value}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith(field)


@pytest.mark.parametrize("tier", ["fast", "priority", "ultrafast", "flex", "auto", "default", "warp-9"])
def test_every_tier_is_accepted(server: RunningServer, tier: str) -> None:
    chat = httpx.post(
        f"{server.url}/v1/chat/completions", json={"messages": [user("x")], "service_tier": tier}
    ).json()
    response = httpx.post(f"{server.url}/v1/responses", json={"input": "x", "service_tier": tier}).json()
    shown = {"fast": "priority", "auto": "default"}.get(tier, tier)
    assert (chat["service_tier"], response["service_tier"]) == (shown, shown)


def test_a_chat_that_outgrows_the_context_goes_on(client: openai.OpenAI) -> None:
    """The client sends everything each time, and no turn fails."""
    messages: list[Any] = [user("The code word is heron.")]
    made = []
    for turn in range(30):
        answer: Any = client.chat.completions.create(model="auto", messages=messages)
        made.append(getattr(answer, "compacted", None))
        text = "And the code word?" if turn == 28 else f"Step {turn}: {'word ' * 40}"
        messages += [{"role": "assistant", "content": answer.choices[0].message.content}, user(text)]
    assert messages[-2]["content"] == "heron"
    assert any(one is not None and one["reason"] == "context" for one in made)
    assert any(one is not None and one["reason"] == "earlier" for one in made)

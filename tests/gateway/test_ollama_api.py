"""Ollama's own Python package against a real server: chat, generate, models, refusals."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest
from gateway_support import RunningServer, echo, last_user, scripted_model, serving

prompts: list[str] = []


def script(prompt: str) -> str:
    prompts.append(prompt)
    said = last_user(prompt)
    if prompt.startswith("def "):
        return "return a + b"
    if "call the tool" in said:
        return '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    if "think" in said:
        return "<think>Let me see.</think>\nForty-two."
    return echo(prompt)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(scripted_model(script)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> ollama.Client:
    return ollama.Client(host=server.url)


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def test_a_chat_has_a_message_and_timings(client: ollama.Client) -> None:
    answer = client.chat("echo:latest", user("hello"))
    assert answer.message.content == "You said: hello"
    assert (answer.done, answer.done_reason) == (True, "stop")
    assert answer.eval_count == len("You said: hello") + 1
    assert answer.prompt_eval_count
    assert answer.total_duration
    assert answer.created_at


def test_a_stream_of_lines_ends_with_the_timings(client: ollama.Client) -> None:
    parts = list(client.chat("auto", user("hello there"), stream=True))
    assert "".join(part.message.content or "" for part in parts) == "You said: hello there"
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert len(parts) > 3
    assert parts[-1].eval_count
    assert parts[0].eval_count is None


def test_a_stream_is_lines_of_json_and_the_default(server: RunningServer) -> None:
    reply = httpx.post(f"{server.url}/api/chat", json={"model": "auto", "messages": user("x")})
    assert reply.headers["content-type"].startswith("application/x-ndjson")
    lines = [json.loads(line) for line in reply.text.splitlines()]
    assert all(line["message"]["role"] == "assistant" for line in lines)
    whole = httpx.post(
        f"{server.url}/api/chat", json={"model": "auto", "messages": user("x"), "stream": False}
    )
    assert whole.headers["content-type"] == "application/json"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_tool_call_and_its_result(client: ollama.Client, stream: bool) -> None:
    conversation: list[Any] = user("call the tool")
    if stream:
        parts = list(client.chat("auto", conversation, tools=[WEATHER], stream=True))
        (message,) = [part.message for part in parts if part.message.tool_calls]
    else:
        message = client.chat("auto", conversation, tools=[WEATHER]).message
    assert message.tool_calls is not None
    function = message.tool_calls[0].function
    assert (function.name, function.arguments) == ("get_weather", {"city": "Oslo"})
    conversation += [message, {"role": "tool", "tool_name": "get_weather", "content": "rain"}, *user("so?")]
    assert client.chat("auto", conversation, tools=[WEATHER]).message.content == "You said: so?"
    assert "[tool]\nrain" in prompts[-1]


def test_a_tool_call_has_an_id_that_its_result_may_name(server: RunningServer) -> None:
    """Clients that know ids require a text; older ones ignore it."""
    asked = {"messages": user("call the tool"), "tools": [WEATHER], "stream": False}
    message = httpx.post(f"{server.url}/api/chat", json=asked).json()["message"]
    (call,) = message["tool_calls"]
    assert call["id"].startswith("call_")
    answered = [
        *user("call the tool"),
        message,
        {"role": "tool", "tool_call_id": call["id"], "content": "sun"},
    ]
    reply = httpx.post(f"{server.url}/api/chat", json={"messages": answered, "stream": False})
    assert reply.status_code == 200
    assert "[tool]\nsun" in prompts[-1]


def test_thinking_is_apart_from_the_answer(client: ollama.Client) -> None:
    message = client.chat("auto", user("think"), think=True).message
    assert (message.thinking, message.content) == ("Let me see.", "Forty-two.")
    assert client.chat("auto", user("think"), think=False).message.thinking is None


def test_options_and_formats_are_honoured(client: ollama.Client) -> None:
    short = client.chat("auto", user("hello"), options={"num_predict": 3, "num_ctx": 4096, "mirostat": 1})
    assert (short.message.content, short.done_reason) == ("You", "length")
    stopped = client.generate("auto", "hello", options={"stop": ["said"]})
    assert stopped.response == "You "
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    schema["additionalProperties"] = False
    assert json.loads(client.chat("auto", user("hi"), format=schema).message.content or "") == {"a": 1}
    text = client.generate("auto", "hi", format="json", options={"num_predict": 30}).response or ""
    assert text.lstrip().startswith("{")


def test_logprobs_come_with_their_tokens(client: ollama.Client) -> None:
    answer = client.chat("auto", user("hi"), logprobs=True, top_logprobs=2)
    assert answer.logprobs is not None
    assert "".join(one.token for one in answer.logprobs).startswith("You said")
    assert len(answer.logprobs[0].top_logprobs or ()) == 2


def test_generate_answers_fills_in_and_completes(client: ollama.Client) -> None:
    answer = client.generate("auto", "hello", system="Be brief.")
    assert answer.response == "You said: hello"
    assert prompts[-1].startswith("[system]\nBe brief.")
    filled = client.generate("auto", "def add(a, b):\n    ", suffix="\n\nprint(add(1, 2))")
    assert filled.response == "return a + b"
    assert prompts[-1] == "def add(a, b):\n    \n\nprint(add(1, 2))"
    raw = client.generate("auto", "def add(a, b):\n    ", raw=True)
    assert raw.response == "return a + b"
    assert prompts[-1] == "def add(a, b):\n    "
    parts = list(client.generate("auto", "hello", stream=True))
    assert "".join(part.response or "" for part in parts) == "You said: hello"


def test_a_request_without_input_loads_the_model(client: ollama.Client) -> None:
    assert client.generate("fast").done_reason == "load"
    assert client.chat("fast").done_reason == "load"


def test_models_are_listed_shown_and_loaded(client: ollama.Client) -> None:
    names = [model.model for model in client.list().models]
    assert names == ["auto:latest", "fast:latest", "echo:latest"]
    for name in names:
        shown = client.show(name or "")
        assert shown.capabilities == ["completion", "tools", "insert"]
        assert shown.modelinfo is not None
        family = shown.modelinfo["general.architecture"]
        assert shown.modelinfo[f"{family}.context_length"] == 131_072
    (loaded,) = client.ps().models
    assert (loaded.name, loaded.context_length) == ("echo:latest", 131_072)
    assert client.pull("echo").status == "success"
    assert [step.status for step in client.pull("echo", stream=True)] == ["success"]


def test_the_version_is_one_that_clients_accept(server: RunningServer) -> None:
    told = httpx.get(f"{server.url}/api/version").json()["version"]
    assert tuple(map(int, told.split("."))) >= (0, 13, 4)  # what `codex --oss` asks for; Copilot: 0.6.4


def test_what_is_not_served_is_refused_by_name(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="Embeddings are not made here") as refused:
        client.embed("auto", "text")
    assert refused.value.status_code == 400
    for act in (
        lambda: client.embeddings("auto", "text"),
        lambda: client.delete("echo"),
        lambda: client.copy("echo", "other"),
        lambda: client.push("echo"),
        lambda: client.create("other", from_="echo"),
    ):
        with pytest.raises(ollama.ResponseError, match=r"not (made|managed)"):
            act()
    with pytest.raises(ollama.ResponseError, match="no model called nothing") as missing:
        client.show("nothing")
    assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="keystroke models add"):
        client.pull("nothing")


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "images"),
        ("generate", {"prompt": "x", "images": ["aGk="]}, "images"),
        ("generate", {"prompt": "x", "template": "{{ .Prompt }}"}, "template"),
        ("generate", {"prompt": "x", "context": [1, 2]}, "context"),
        ("generate", {"prompt": "x", "format": "xml"}, "format"),
        ("chat", {"messages": [{"role": "user", "content": 1}]}, "content"),
        ("chat", {"messages": "x"}, "messages"),
        ("chat", {"messages": [{"role": "user", "content": "x"}], "options": {"temperature": 9}}, "temp"),
        ("chat", {"model": "nothing", "messages": [{"role": "user", "content": "x"}]}, "no model called"),
        ("show", {}, "model"),
    ],
)
def test_an_invalid_request_is_refused_in_one_sentence(
    server: RunningServer, path: str, body: dict[str, Any], word: str
) -> None:
    reply = httpx.post(f"{server.url}/api/{path}", json=body)
    assert reply.status_code in (400, 404)
    assert list(reply.json()) == ["error"]
    assert word in reply.json()["error"]


def test_hostile_bodies_are_refused_in_the_shape_of_the_api(server: RunningServer) -> None:
    for content in (b"", b"null", b"[" * 9000, b'"\xff"'):
        reply = httpx.post(f"{server.url}/api/chat", content=content)
        assert reply.status_code == 400
        assert list(reply.json()) == ["error"]
    assert httpx.post(f"{server.url}/api/chat", content=b"x" * (17 << 20)).status_code == 413
    assert list(httpx.get(f"{server.url}/api/nothing").json()) == ["error"]


def test_a_conversation_that_goes_on_reads_only_what_is_new(server: RunningServer) -> None:
    messages = user("a long beginning " * 50)
    for _ in range(3):
        body = {"model": "auto", "messages": messages, "stream": False}
        last = httpx.post(f"{server.url}/api/chat", json=body).json()
        messages += [last["message"], *user("go on")]
    assert 0 < last["prompt_eval_count"] - last["prompt_cached_count"] < 100


def test_turns_reuse_one_connection(server: RunningServer) -> None:
    with httpx.Client(limits=httpx.Limits(max_connections=1)) as pool:
        addresses = set()
        for stream in (True, False, True):
            body = {"model": "auto", "stream": stream, "messages": user("x")}
            with pool.stream("POST", f"{server.url}/api/chat", json=body) as reply:
                reply.read()
                network: Any = reply.extensions["network_stream"]
                addresses.add(network.get_extra_info("client_addr"))
    assert len(addresses) == 1


def test_a_client_that_hangs_up_stops_its_answer() -> None:
    with serving(scripted_model(lambda _prompt: "x" * 100_000, step_cost=0.002)) as running:
        body = {"model": "auto", "messages": user("x"), "options": {"num_predict": 100_000}}
        with httpx.stream("POST", f"{running.url}/api/chat", json=body) as reply:
            next(reply.iter_lines())
        assert running.settled()
        steps = running.engines["echo"].steps
        time.sleep(0.05)
        assert running.engines["echo"].steps == steps < 50_000


def test_options_that_would_change_the_answer_are_noted(server: RunningServer) -> None:
    options = {"repeat_penalty": 1.2, "num_ctx": 4096, "temperature": 0}
    body = {"model": "auto", "messages": user("x"), "stream": False, "options": options}
    told = httpx.post(f"{server.url}/api/chat", json=body).json()
    assert told["notes"] == ["options.repeat_penalty: not sampled with here"]

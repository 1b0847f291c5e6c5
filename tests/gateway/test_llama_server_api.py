"""The endpoints of llama.cpp's server beside completion."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from gateway_support import RunningServer, scripted_model, serving


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(scripted_model(lambda _prompt: "ok"), concurrent=3) as running:
        yield running


def post(server: RunningServer, path: str, **body: Any) -> Any:
    return httpx.post(f"{server.url}{path}", json=body).json()


def test_text_becomes_tokens_and_text_again(server: RunningServer) -> None:
    tokens = post(server, "/tokenize", content="héllo <end>")["tokens"]
    assert tokens == [*"héllo ".encode(), 258]
    assert post(server, "/detokenize", tokens=tokens) == {"content": "héllo <end>"}
    plain = post(server, "/tokenize", content="<end>", parse_special=False)["tokens"]
    assert plain == list(b"<end>")


def test_pieces_are_text_or_bytes(server: RunningServer) -> None:
    pieces = post(server, "/tokenize", content="aé", with_pieces=True)["tokens"]
    assert pieces == [{"id": 97, "piece": "a"}, {"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]


@pytest.mark.parametrize("tokens", [[320], [-1], [2**40], ["x"], "x"])
def test_tokens_outside_the_vocabulary_are_refused(server: RunningServer, tokens: Any) -> None:
    reply = httpx.post(f"{server.url}/detokenize", json={"tokens": tokens})
    assert reply.status_code == 400
    assert "tokens" in reply.json()["error"]["message"]


def test_a_template_is_applied_as_chat_does(server: RunningServer) -> None:
    prompt = post(server, "/apply-template", messages=[{"role": "user", "content": "hello"}])["prompt"]
    assert prompt == "[user]\nhello<end>\n[assistant]\n"


def test_properties_name_the_model_and_its_places(server: RunningServer) -> None:
    props = httpx.get(f"{server.url}/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 131_072
    assert (props["model_alias"], props["total_slots"]) == ("echo", 3)
    assert props["chat_template"].startswith("{% for m in messages %}")
    assert props["eos_token"] == "<eos>"
    assert httpx.get(f"{server.url}/props?model=nothing").status_code == 404


def test_slots_show_what_runs() -> None:
    with serving(scripted_model(lambda _prompt: "x" * 50_000, step_cost=0.002), concurrent=2) as running:
        assert [slot["is_processing"] for slot in httpx.get(f"{running.url}/slots").json()] == [False, False]
        body = {"stream": True, "max_tokens": 50_000, "messages": [{"role": "user", "content": "x"}]}
        with httpx.stream("POST", f"{running.url}/v1/chat/completions", json=body) as reply:
            lines = reply.iter_lines()  # held: letting go of it would hang up
            next(lines)
            busy = httpx.get(f"{running.url}/slots").json()
        assert [slot["is_processing"] for slot in busy] == [True, False]
        assert running.settled()

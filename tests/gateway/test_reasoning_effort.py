"""How much a model reasons is chosen in every API, and a summary is written without reasoning."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from gateway_support import TEMPLATE as PLAIN
from gateway_support import RunningServer, last_user, scripted_model, serving

from keystroke.engine.echo import EOS, SPECIAL
from keystroke.engine.model import Model
from keystroke.engine.templates import ChatTemplate
from keystroke.engine.tokenizer.byte_tokens import ByteTokenizer

THOUGHT, CLOSED = "<think>Hm.</think>", "[assistant]\n\n\n\n\n"  # an empty thought, as the script reads it
# As Qwen3 has it: the model begins a thought by itself unless the prompt holds an empty one.
TEMPLATE = (
    PLAIN + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}"
)


def thinker(prompt: str) -> str:
    said = "Facts: none." if "Write a summary" in last_user(prompt) else "Yes."
    return said if prompt.endswith(CLOSED) else f"{THOUGHT}{said}"


def thinking_model(**costs: Any) -> Model:
    special = {**SPECIAL, "<think>": 270, "</think>": 271}
    tokenizer = ByteTokenizer(special, eos=EOS, vocab_size=320)
    model = scripted_model(thinker, **costs)
    return dataclasses.replace(model, tokenizer=tokenizer, chat=ChatTemplate(TEMPLATE))


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(thinking_model()) as running:
        yield running


def post(server: RunningServer, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(server.url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


def reasoned(reply: dict[str, Any]) -> bool:
    """Whether a response of the Responses API holds reasoning; its text is there in any case."""
    kinds = [item["type"] for item in reply["output"]]
    assert "message" in kinds
    return "reasoning" in kinds


@pytest.mark.parametrize(
    ("effort", "reasons"), [(None, True), ("none", False), ("low", True), ("high", True)]
)
def test_the_effort_of_a_chained_turn_is_honoured(
    server: RunningServer, effort: str | None, reasons: bool
) -> None:
    more = {} if effort is None else {"reasoning": {"effort": effort}}
    first = post(server, "/v1/responses", input="one", **more)
    second = post(server, "/v1/responses", input="two", previous_response_id=first["id"], **more)
    assert [reasoned(first), reasoned(second)] == [reasons, reasons]
    turned = post(
        server,
        "/v1/responses",
        input="three",
        previous_response_id=second["id"],
        reasoning={"effort": "medium" if effort == "none" else "none"},
    )
    assert reasoned(turned) is not reasons


@pytest.mark.parametrize(("effort", "reasons"), [(None, True), ("none", False), ("high", True)])
def test_chat(server: RunningServer, effort: str | None, reasons: bool) -> None:
    more = {} if effort is None else {"reasoning_effort": effort}
    reply = post(server, "/v1/chat/completions", messages=[{"role": "user", "content": "one"}], **more)
    message = reply["choices"][0]["message"]
    assert ("reasoning_content" in message, message["content"]) == (reasons, "Yes.")


@pytest.mark.parametrize(
    ("more", "reasons"),
    [
        ({}, False),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, True),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, True),
    ],
)
def test_messages(server: RunningServer, more: dict[str, Any], reasons: bool) -> None:
    asked = {"max_tokens": 100, "messages": [{"role": "user", "content": "one"}], **more}
    reply = post(server, "/v1/messages", **asked)
    assert [block["type"] for block in reply["content"]] == (["thinking"] if reasons else []) + ["text"]
    if not reasons:  # tokens of reasoning that nobody sees would be paid for
        assert reply["usage"]["output_tokens"] == len("Yes.") + 1


@pytest.mark.parametrize(("think", "reasons"), [(None, True), (False, False), (True, True), ("low", True)])
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_ollama(server: RunningServer, path: str, think: Any, reasons: bool) -> None:
    asked: dict[str, Any] = {"prompt": "one"}
    if path == "/api/chat":
        asked = {"messages": [{"role": "user", "content": "one"}]}
    reply = post(server, path, **asked, stream=False, **({} if think is None else {"think": think}))
    assert ("thinking" in reply.get("message", reply)) is reasons
    assert (reply["eval_count"] == len("Yes.") + 1) is not reasons


def test_a_model_that_does_not_reason_says_so() -> None:
    with serving(scripted_model()) as server:
        message = [{"role": "user", "content": "one"}]
        for path, more in (
            ("/v1/chat/completions", {"reasoning_effort": "high"}),
            ("/v1/messages", {"max_tokens": 10, "thinking": {"type": "adaptive"}}),
            ("/api/chat", {"think": True, "stream": False}),
        ):
            assert post(server, path, messages=message, **more)["notes"] == [
                "reasoning was asked for, but echo does not reason"
            ]
            assert "notes" not in post(server, path, messages=message, max_tokens=10, stream=False)


def test_a_summary_is_written_without_reasoning() -> None:
    with serving(thinking_model(context_length=8192)) as server:
        history: list[Any] = [{"role": "user", "content": "word " * 40}]
        while True:
            reply = post(server, "/v1/responses", input=history, store=False)
            if "compacted" in reply:
                break
            history += [*reply["output"], {"role": "user", "content": "word " * 40}]
    assert "Facts: none." in reply["compacted"]["summary"]
    assert "Hm." not in reply["compacted"]["summary"]
    assert reasoned(reply)  # the answer itself reasons

"""The OpenAI SDK, as people have it installed, against a real server: every call it makes of us."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from gateway_support import RunningServer, echo, last_user, scripted_model, serving

PATCH = "*** Begin Patch\n*** Update File: a.py\n@@\n-x\n+y\n*** End Patch"


def script(prompt: str) -> str:
    said = last_user(prompt)
    if "call the tool" in said:
        return '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    if "call both" in said:
        return (
            '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>\n'
            f"<tool_call>{json.dumps({'name': 'apply_patch', 'arguments': {'input': PATCH}})}</tool_call>"
        )
    if "think" in said:
        return "<think>Let me see.</think>\nForty-two."
    return echo(prompt)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder: Path = tmp_path_factory.mktemp("state")
    with serving(scripted_model(script), folder=folder) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
PATCH_TOOL: Any = {"type": "custom", "name": "apply_patch", "description": "Edit files"}


def test_models_list_names_the_choices_and_the_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["auto", "fast", "echo"]


def test_a_plain_response_has_output_usage_and_a_receipt(client: openai.OpenAI) -> None:
    response = client.responses.create(model="auto", input="hello")
    assert response.output_text == "You said: hello"
    assert response.status == "completed"
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    extra = response.model_extra or {}
    assert extra["routing"]["model"] == "echo"
    assert extra["receipt"]["output_tokens"] == response.usage.output_tokens


def test_a_streamed_response_tells_its_events_in_order(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="echo", input="hello", stream=True))
    kinds = [e.type for e in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-1] == "response.completed"
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == "You said: hello"
    numbers = [e.sequence_number for e in events]
    assert numbers == sorted(set(numbers))


def test_the_stream_helper_builds_the_final_response(client: openai.OpenAI) -> None:
    with client.responses.stream(model="echo", input="hello") as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert final.output_text == "You said: hello"


def test_turns_chain_by_previous_response_id_over_http(client: openai.OpenAI) -> None:
    first = client.responses.create(model="echo", input="one")
    second = client.responses.create(model="echo", input="two", previous_response_id=first.id)
    assert second.output_text == "You said: two"
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens >= (
        first.usage.total_tokens - 2 if first.usage else 0
    )


def test_a_stored_response_can_be_fetched_and_deleted(client: openai.OpenAI) -> None:
    made = client.responses.create(model="echo", input="keep me")
    assert client.responses.retrieve(made.id).output_text == made.output_text
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_a_background_response_is_polled_to_its_end(client: openai.OpenAI) -> None:
    made = client.responses.create(model="echo", input="later", background=True)
    assert made.status in ("queued", "in_progress", "completed")
    for _ in range(200):
        found = client.responses.retrieve(made.id)
        if found.status == "completed":
            break
    assert found.output_text == "You said: later"


def test_a_function_call_is_parsed_and_its_output_answered(client: openai.OpenAI) -> None:
    response = client.responses.create(model="echo", input="call the tool", tools=[WEATHER])
    (call,) = response.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Oslo"})
    after = client.responses.create(
        model="echo",
        previous_response_id=response.id,
        input=[
            {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
            {"role": "user", "content": "and now?"},
        ],
        tools=[WEATHER],
    )
    assert after.output_text == "You said: and now?"


def test_several_calls_and_a_custom_tool_in_one_response(client: openai.OpenAI) -> None:
    with client.responses.stream(model="echo", input="call both", tools=[WEATHER, PATCH_TOOL]) as stream:
        for _ in stream:
            pass
        response = stream.get_final_response()
    assert [item.type for item in response.output] == ["function_call", "custom_tool_call"]
    assert getattr(response.output[1], "input", None) == PATCH


def test_reasoning_is_an_item_of_its_own(client: openai.OpenAI) -> None:
    response = client.responses.create(model="echo", input="think about it")
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output_text == "Forty-two."


def test_logprobs_come_with_the_text(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="echo", input="hi", top_logprobs=2, include=["message.output_text.logprobs"]
    )
    content = getattr(response.output[0], "content")[0]  # noqa: B009 - a union without it
    assert "".join(t.token for t in content.logprobs if not t.token.startswith("<")) == content.text
    assert all(len(t.top_logprobs) == 2 and t.logprob <= 0 for t in content.logprobs)


def test_a_limit_on_tokens_makes_the_response_incomplete(client: openai.OpenAI) -> None:
    response = client.responses.create(model="echo", input="hello", max_output_tokens=3)
    assert (response.status, response.output_text) == ("incomplete", "You")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


def test_chat_plain_streamed_and_with_usage(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]
    whole = client.chat.completions.create(model="echo", messages=messages)
    assert whole.choices[0].message.content == "You said: hello"
    assert whole.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(
        model="echo", messages=messages, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "You said: hello"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == (whole.usage.total_tokens if whole.usage else 0)


def test_chat_tool_calls_and_stop_strings(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER["parameters"]}}
    asked: Any = [{"role": "user", "content": "call the tool"}]
    answer = client.chat.completions.create(model="echo", messages=asked, tools=[tool])
    calls = answer.choices[0].message.tool_calls or []
    assert answer.choices[0].finish_reason == "tool_calls"
    assert json.loads(getattr(calls[0], "function").arguments) == {"city": "Oslo"}  # noqa: B009
    hello: Any = [{"role": "user", "content": "hello"}]
    stopped = client.chat.completions.create(model="echo", messages=hello, stop=[" said"])
    assert stopped.choices[0].message.content == "You"


def test_completions_fill_the_middle(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="echo", prompt="def f(", suffix="):", max_tokens=4)
    assert whole.choices[0].text == "You "
    assert whole.choices[0].finish_reason == "length"
    streamed = client.completions.create(model="echo", prompt="x = ", max_tokens=4, stream=True)
    assert "".join(c.choices[0].text for c in streamed if c.choices) == "You "


def test_connect_holds_a_conversation_on_one_socket(client: openai.OpenAI) -> None:
    with client.responses.connect() as connection:
        texts, previous = [], None
        for said in ("one", "two", "three"):
            extra: Any = {"previous_response_id": previous} if previous else {}
            connection.response.create(model="echo", input=said, store=False, **extra)
            for event in connection:
                if event.type == "response.completed":
                    previous = event.response.id
                    texts.append(event.response.output_text)
                    break
    assert texts == ["You said: one", "You said: two", "You said: three"]


async def test_async_connect_steers_a_running_response(tmp_path: Path) -> None:
    slow = scripted_model(lambda p: "steered!" if "instead" in last_user(p) else "a" * 500, step_cost=0.004)
    with serving(slow) as running:
        client = openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="any")
        async with client.responses.connect() as connection:
            await connection.response.create(model="echo", input="go on and on", store=False)
            ended: list[Any] = []
            kinds: list[str] = []
            first: Any = None
            async for event in connection:
                kinds.append(event.type)
                if event.type == "response.output_text.delta" and kinds.count(event.type) == 5:
                    await connection.response.steer(
                        previous_response_id=first.id,
                        input=[{"type": "message", "role": "user", "content": "do this instead"}],
                    )
                elif event.type == "response.created" and not ended:
                    first = event.response
                elif event.type in ("response.incomplete", "response.completed"):
                    ended.append(event.response)
                    if len(ended) == 2:
                        break
        await client.close()
    assert "response.steer.accepted" in kinds
    old, new = ended
    assert (old.status, old.incomplete_details.reason) == ("incomplete", "steered")
    assert (new.status, new.previous_response_id, new.output_text) == ("completed", old.id, "steered!")
    receipt = new.model_extra["receipt"]
    assert receipt["reused_tokens"] >= old.usage.input_tokens + old.usage.output_tokens
    assert receipt["computed_tokens"] < 60


def test_errors_reach_the_sdk_as_its_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no model called nope"):
        client.responses.create(model="nope", input="x")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.responses.create(model="echo", input="x", temperature=9)
    with pytest.raises(openai.BadRequestError, match="is not known here"):
        client.responses.create(model="echo", input="x", previous_response_id="resp_gone")


def test_nothing_is_left_behind(server: RunningServer) -> None:
    assert server.settled()

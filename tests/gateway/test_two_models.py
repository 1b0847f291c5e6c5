"""Two models, one workflow: routing, moving a conversation, deep in the background, deep unreachable."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_support import RunningServer, last_user, scripted_model, serving

from keystroke import Client
from keystroke.config import NamedModel, Settings
from keystroke.gateway.app import Gateway
from keystroke.gateway.work.registry import ModelRegistry, local_entry, remote_entry
from keystroke.protocol.items import Tool
from keystroke.protocol.response import Response


def named(name: str) -> Any:
    def script(prompt: str) -> str:
        turns = prompt.count("[user]")
        if "endless" in last_user(prompt):
            return "z" * 50_000
        if "weather" in last_user(prompt):
            return '<tool_call>{"name":"look","arguments":{"at":"sky"}}</tool_call>'
        return f"{name} heard turn {turns}: {last_user(prompt)}"

    return script


def words(response: Response) -> str:
    return "".join(part.text for item in response.output for part in getattr(item, "content", ()))


@pytest.fixture
def pair() -> Any:
    fast = scripted_model(named("fast"), "small", step_cost=0.001)
    deep = scripted_model(named("deep"), "large", step_cost=0.002)
    with serving(fast, deep, roles={"large": "deep"}) as server:
        yield server


async def test_auto_says_which_model_and_why_and_a_name_overrides(pair: RunningServer) -> None:
    async with Client(pair.url) as client:
        quick = await client.ask("rename this", model="auto")
        deep = await client.ask("think hard: rename this", model="auto")
        forced = await client.ask("think hard: rename this", model="fast")
    assert [r.model for r in (quick, deep, forced)] == ["small", "large", "small"]
    assert "asked for depth" in str(deep.routing)
    assert "named by the client" in str(forced.routing)


async def test_a_conversation_moves_from_fast_to_deep_and_back(pair: RunningServer) -> None:
    async with Client(pair.url) as client:
        talk = client.conversation()
        said = [words(await talk.ask(str(n), model=m)) for n, m in enumerate(("fast", "deep", "fast"), 1)]
    assert said == ["fast heard turn 1: 1", "deep heard turn 2: 2", "fast heard turn 3: 3"]


async def test_deep_works_in_the_background_while_fast_turns_go_on(pair: RunningServer) -> None:
    async with Client(pair.url) as client:
        task = await client.respond("a long task", model="deep", background=True)
        quick = [words(await client.ask(f"q{n}", model="fast")) for n in range(5)]
        assert quick == [f"fast heard turn 1: q{n}" for n in range(5)]
        done = await task.result()
    assert words(done) == "deep heard turn 1: a long task"
    assert done.background


async def test_background_work_outlives_its_connection(pair: RunningServer) -> None:
    async with Client(pair.url) as client:
        stream = await client.respond("carry on", model="deep", background=True)
        async for event in stream:
            if type(event).__name__ == "Created":
                break
        identity = stream.id
    async with httpx.AsyncClient(base_url=pair.url) as http:
        for _ in range(400):
            answer = await http.get(f"/v1/responses/{identity}")
            if answer.status_code == 404 or answer.json()["status"] == "completed":
                break
            await asyncio.sleep(0.01)
        # Without a store a finished response is gone; that it ran to its end is what the metrics say.
        page = (await http.get("/metrics")).text
    assert 'keystroke_responses_total{model="large",priority="background",status="completed"} 1.0' in page


def with_remote(url: str) -> ModelRegistry:
    """A registry whose deep model is another server's."""
    table = NamedModel(engine="remote", base_url=f"{url}/v1", model="echo", role="deep", context=2000)
    fast = local_entry("small", scripted_model(named("fast"), "small"), named=NamedModel(concurrent=8))
    return ModelRegistry([fast, remote_entry("far", table, Settings())])


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A gateway in front of another gateway."""
    with serving(scripted_model(named("far"), step_cost=0.001)) as behind:
        import gateway_support

        monkeypatch.setattr(gateway_support, "ModelRegistry", lambda _entries: with_remote(behind.url))
        with serving(scripted_model(name="unused")) as front:
            yield front, behind


async def test_a_remote_model_answers_like_a_local_one(far: tuple[RunningServer, RunningServer]) -> None:
    front, _ = far
    async with Client(front.url) as client:
        talk = client.conversation(model="deep")
        assert words(await talk.ask("one")) == "far heard turn 1: one"
        second = await talk.ask("two")
        assert words(second) == "far heard turn 2: two"
        assert second.model == "far"
        assert second.usage is not None
        assert second.usage.output_tokens > 10
        look = Tool(name="look", parameters={"type": "object"})
        called = await client.ask("weather?", model="deep", tools=[look])
        assert [type(i).__name__ for i in called.output] == ["FunctionCall"]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions", "/v1/messages", "/api/chat"])
def test_a_conversation_with_a_remote_model_is_compacted(
    far: tuple[RunningServer, RunningServer], path: str
) -> None:
    history: list[dict[str, str]] = []
    for turn in range(20):
        history += [{"role": "user", "content": f"Turn {turn}. " + "word " * 100}]
        history += [{"role": "assistant", "content": "Done."}]
    body = {"model": "far", "max_tokens": 100, "stream": False}
    body["input" if path == "/v1/responses" else "messages"] = [*history, {"role": "user", "content": "Last"}]
    answer = httpx.post(far[0].url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    done = answer.json()["compacted"]
    assert done["dropped_items"] > 0
    assert "Turn 0." in done["summary"]


def test_reasoning_effort_reaches_a_remote_model(far: tuple[RunningServer, RunningServer]) -> None:
    front, behind = far
    heard: list[str | None] = []
    chat = behind.gateway.endpoints.texts._plan_chat

    async def listening(request: Any, caller: Any) -> Any:
        heard.append(request.reasoning_effort)
        return await chat(request, caller)

    behind.gateway.endpoints.texts._plan_chat = listening  # type: ignore[method-assign]
    for path, more in (
        ("/v1/chat/completions", {"reasoning_effort": "low"}),
        ("/v1/chat/completions", {"reasoning_effort": "none"}),
        ("/v1/messages", {"max_tokens": 10}),
        ("/v1/messages", {"max_tokens": 10, "thinking": {"type": "adaptive"}}),
    ):
        body = {"model": "far", "messages": [{"role": "user", "content": "hello"}], **more}
        assert httpx.post(front.url + path, json=body, timeout=60).status_code == 200
    assert heard == ["low", "none", None, "medium"]


def test_only_more_than_the_usual_effort_of_messages_asks_for_depth(pair: RunningServer) -> None:
    """Claude Code sends `high` with every request."""

    def model(**more: Any) -> str:
        body = {"model": "auto", "max_tokens": 10, "messages": [{"role": "user", "content": "hello"}], **more}
        return str(httpx.post(f"{pair.url}/v1/messages", json=body, timeout=60).json()["model"])

    adaptive = {"type": "adaptive"}
    assert model(thinking=adaptive, output_config={"effort": "high"}) == "small"
    assert model(thinking=adaptive, output_config={"effort": "max"}) == "large"
    assert model(output_config={"effort": "max"}) == "small"


async def test_a_remote_answer_can_be_cancelled_and_steered(far: tuple[RunningServer, RunningServer]) -> None:
    front, behind = far
    async with Client(front.url) as client:
        stream = await client.respond("endless", model="deep")
        texts = 0
        async for event in stream:
            if type(event).__name__ == "TextDelta":
                texts += 1
                if texts == 3:
                    await stream.steer("say this")
        assert stream.response is not None
        assert words(stream.response).endswith("say this")
        again = await client.respond("endless", model="deep")
        async for event in again:
            if type(event).__name__ == "TextDelta":
                await again.cancel()
        assert again.response is not None
        assert again.response.status == "cancelled"
    assert await asyncio.to_thread(behind.settled)


async def test_when_deep_is_unreachable_the_error_is_clear_and_fast_is_unaffected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import gateway_support

    monkeypatch.setattr(gateway_support, "ModelRegistry", lambda _entries: with_remote("http://127.0.0.1:9"))
    with serving(scripted_model(name="unused")) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            deep = asyncio.create_task(http.post("/v1/responses", json={"model": "deep", "input": "x"}))
            fast = await http.post("/v1/responses", json={"model": "fast", "input": "x"})
            assert fast.status_code == 200
            answer = await deep
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "unavailable"


def test_the_registry_and_gateway_refuse_to_start_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="no model is configured"):
        Gateway(ModelRegistry([]))

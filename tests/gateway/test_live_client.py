"""The live client: an editor that never notices more than it should."""

from __future__ import annotations

import asyncio
import random

import gateway_support
import pytest
from bench.free_port import free_port
from gateway_support import RunningServer, scripted_model, serving

from keystroke.clients.live_connection import LiveClient
from keystroke.config import NamedModel, Settings
from keystroke.errors import InputError
from keystroke.gateway.live.connection import LiveConnection
from keystroke.gateway.work.registry import ModelRegistry, remote_entry
from keystroke.protocol import live_messages as live
from keystroke.text import Edit


def test_a_suggestion_comes_back_as_a_value() -> None:
    async def run(url: str) -> None:
        async with LiveClient(url) as client:
            client.open("a.py", "value = ", path="a.py")
            answer = await client.complete("a.py", 8)
            assert isinstance(answer, live.Suggestion)
            assert (answer.start, answer.text) == (8, "one")
            client.change("a.py", 1, [Edit(8, 8, "o")], cursor=9)
            answer = await client.complete("a.py", 9)
            assert isinstance(answer, live.Suggestion)
            assert (answer.version, answer.text) == (1, "ne")

    with serving(scripted_model(lambda prompt: "one\n" if "value = " in prompt else "")) as server:
        asyncio.run(run(server.url))


def test_a_dead_gateway_costs_one_notice_and_no_suggestion() -> None:
    async def run() -> None:
        notices: list[str] = []
        client = LiveClient(f"http://127.0.0.1:{free_port()}", on_notice=notices.append)
        assert await client.start() is False
        client.open("a.py", "x = ")
        client.change("a.py", 1, [Edit(4, 4, "1")])
        answer = await client.complete("a.py", 5)
        assert isinstance(answer, live.NotShown)
        assert answer.reason == "disconnected"
        await asyncio.sleep(0.5)  # several attempts later
        assert len(notices) == 1
        assert "suggestions pause" in notices[0]
        await client.stop()

    asyncio.run(run())


def test_buffers_are_opened_again_at_whatever_gateway_answers_next() -> None:
    port = free_port()

    async def run() -> None:
        notices: list[str] = []
        ready = asyncio.Event()

        def heard(event: live.LiveEvent) -> None:
            if isinstance(event, live.Ready):
                ready.set()

        client = LiveClient(f"http://127.0.0.1:{port}", on_notice=notices.append, on_event=heard)
        await client.start()
        client.open("a.py", "val", version=3, path="a.py")
        client.change("a.py", 4, [Edit(3, 3, "ue = ")])
        started = await asyncio.to_thread(running.__enter__)
        await asyncio.wait_for(ready.wait(), 60)
        answer = await client.complete("a.py", 8)
        assert isinstance(answer, live.Suggestion)
        assert (answer.version, answer.text) == (4, "one")
        assert len(notices) == 2
        assert "back" in notices[1]
        await client.stop()
        assert started.port == port

    model = scripted_model(lambda prompt: "one\n" if "value = " in prompt else "")
    running = serving(model, port=port)
    try:
        asyncio.run(run())
    finally:
        running.__exit__(None, None, None)


def test_a_lost_connection_answers_what_was_asked() -> None:
    async def run(url: str) -> None:
        client = LiveClient(url)
        await client.start()
        client.open("a.py", "x = ", path="a.py")
        asked = asyncio.create_task(client.complete("a.py", 4))
        await asyncio.sleep(0.1)
        assert client._socket is not None
        client._socket._transport.abort()  # type: ignore[union-attr]
        answer = await asyncio.wait_for(asked, 60)
        assert isinstance(answer, live.NotShown)
        assert answer.reason == "disconnected"
        await client.stop()

    with serving(scripted_model(lambda _p: "long " * 50, step_cost=0.05)) as server:
        asyncio.run(run(server.url))


def test_a_cancelled_wait_stops_the_work() -> None:
    async def run(url: str) -> None:
        async with LiveClient(url) as client:
            client.open("a.py", "x = ", path="a.py")
            asked = asyncio.create_task(client.complete("a.py", 4, extent="block"))
            await asyncio.sleep(0.1)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            answer = await client.complete("a.py", 1)
            assert isinstance(answer, (live.Suggestion, live.NotShown))

    with serving(scripted_model(lambda _p: "a b\n    " * 50, step_cost=0.005)) as server:
        asyncio.run(run(server.url))


@pytest.mark.parametrize(
    ("version", "edit"), [(1, Edit(99, 99, "x")), (0, Edit(0, 0, "x")), (1, Edit(2, 50, ""))]
)
def test_a_change_that_cannot_be_is_refused_before_it_is_sent(version: int, edit: Edit) -> None:
    client = LiveClient()
    client.open("a.py", "x = 1")
    with pytest.raises(InputError):
        client.change("a.py", version, [edit])
    assert client.text("a.py") == "x = 1"
    with pytest.raises(InputError, match="not open"):
        client.change("b.py", 1, [])


def test_after_any_typing_the_mirror_is_the_editors_text() -> None:
    async def run(server: RunningServer) -> None:
        rng = random.Random(11)
        async with LiveClient(server.url) as client:
            client.open("a.py", "def f(x):\n    return x\n\n" * 5, path="a.py", language="python")
            asked: list[asyncio.Task[object]] = []
            for version in range(1, 200):
                text = client.text("a.py")
                edits = []
                for _ in range(rng.choice((1, 1, 1, 2, 5))):
                    start = rng.randrange(len(text) + 1)
                    end = min(len(text), start + rng.choice((0, 0, 0, 1, 7)))
                    edit = Edit(start, end, rng.choice(("a", "(", "\n    ", "é𝒳", "", "return f(x)\n")))
                    text = text[: edit.start] + edit.text + text[edit.end :]
                    edits.append(edit)
                cursor = edits[-1].start + len(edits[-1].text)
                client.change("a.py", version, edits, cursor if rng.random() < 0.7 else None)
                if rng.random() < 0.5:
                    asked.append(asyncio.create_task(client.complete("a.py", cursor)))
                if rng.random() < 0.1:
                    await asyncio.sleep(0.01)
            answers = await asyncio.wait_for(asyncio.gather(*asked), 60)
            assert all(isinstance(answer, (live.Suggestion, live.NotShown)) for answer in answers)
            assert not [a for a in answers if isinstance(a, live.NotShown) and a.reason == "failed"]
            (socket,) = server.gateway._connections
            connection = socket._reader
            assert isinstance(connection, LiveConnection)
            mirror = connection._buffers["a.py"].mirror
            assert (mirror.text, mirror.version) == (client.text("a.py"), 199)

    with serving(scripted_model()) as server:
        asyncio.run(run(server))
        assert server.settled()


def test_a_model_behind_a_server_completes_when_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(server: RunningServer, behind: RunningServer) -> None:
        async with LiveClient(server.url) as client:
            client.open("a.py", "value =\nbelow = 1\n", path="a.py", language="python")
            client.change("a.py", 1, [Edit(7, 7, " ")], cursor=8)
            await asyncio.sleep(0.1)
            assert behind.engines["echo"].steps == 0
            answer = await client.complete("a.py", 8)
            assert isinstance(answer, live.Suggestion)
            assert (answer.text, answer.receipt.model) == ("one", "far")
            client.change("a.py", 2, [Edit(8, 8, "o")], cursor=9)
            answer = await client.complete("a.py", 9)
            assert isinstance(answer, live.Suggestion)
            assert (answer.text, answer.receipt.source) == ("ne", "typed_through")

    with serving(scripted_model(lambda prompt: "one\n" if "value = " in prompt else "")) as behind:
        table = NamedModel(engine="remote", base_url=f"{behind.url}/v1", model="echo")
        monkeypatch.setattr(
            gateway_support,
            "ModelRegistry",
            lambda _entries: ModelRegistry([remote_entry("far", table, Settings())]),
        )
        with serving(scripted_model(name="unused")) as server:
            asyncio.run(run(server, behind))

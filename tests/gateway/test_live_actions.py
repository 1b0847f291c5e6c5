"""Problems, refactorings and edits asked for over the live channel."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from gateway_support import RunningServer, last_user, scripted_model, serving

from keystroke.clients.connection import RemoteError
from keystroke.clients.gateway_address import GatewayAddress
from keystroke.clients.lsp.channel import Channel
from keystroke.errors import Unavailable
from keystroke.protocol import live_messages as live

TEXT = "first = 1\nvalue = 1\n"


def script(prompt: str) -> str:
    said = last_user(prompt)
    if "endless" in said:
        return "```\n" + "x" * 50_000
    if "elsewhere" in said:
        return "other.py\n<<<<<<< SEARCH\n=======\nnew\n>>>>>>> REPLACE\n"
    if "prose" in prompt:  # asked again it says the same
        return "```\n# ... rest of the code unchanged\n```\n"
    return "```\nvalue = 2\n```\n"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(scripted_model(script, step_cost=0.002)) as running:
        yield running


@asynccontextmanager
async def channel(server: RunningServer, text: str = TEXT, **opened: Any) -> AsyncIterator[Channel]:
    async def locate() -> GatewayAddress:
        return GatewayAddress(server.url)

    client = Channel(locate, on_event=lambda _: None, on_notice=lambda _: None)
    await client.start()
    client.open("b", text, 1, **{"language": "python", **opened})
    try:
        yield client
    finally:
        await client.stop()


def edit(client: Channel, instruction: str, start: int = 10, end: int = 19) -> live.EditAsk:
    return live.EditAsk(
        id=client.new_id(), buffer="b", version=1, start=start, end=end, instruction=instruction
    )


async def test_problems_are_of_the_version_asked_about(server: RunningServer) -> None:
    async with channel(server, "print(nothing)\n") as client:
        reply = await client.request(live.ProblemsAsk(id="p", buffer="b", version=1))
        assert isinstance(reply, live.Problems)
        assert [(p.code, p.start, p.end) for p in reply.problems] == [("undefined-name", 6, 13)]
        with pytest.raises(RemoteError, match="version 1, not 2"):
            await client.request(live.ProblemsAsk(id="q", buffer="b", version=2))
        with pytest.raises(RemoteError, match="not open"):
            await client.request(live.ProblemsAsk(id="r", buffer="other", version=1))


async def test_text_that_is_not_python_has_no_problems_and_no_refactorings(server: RunningServer) -> None:
    async with channel(server, "int x = nothing;", language="c") as client:
        reply = await client.request(live.ProblemsAsk(id="p", buffer="b", version=1))
        assert isinstance(reply, live.Problems)
        assert reply.problems == []
        ask = live.RefactorAsk(id="q", buffer="b", version=1, kind="inline", start=4, end=5)
        with pytest.raises(RemoteError, match="for Python"):
            await client.request(ask)


async def test_an_edit_is_the_smallest_that_does_it(server: RunningServer) -> None:
    async with channel(server) as client:
        reply = await client.request(edit(client, "make it two"))
        assert isinstance(reply, live.Changes)
        assert reply.files == [live.FileEdits(buffer="b", edits=[live.BufferEdit(18, 19, "2")])]


async def test_an_edit_by_instruction_is_told_the_projects_rules(tmp_path: Path) -> None:
    prompts: list[str] = []

    def listening(prompt: str) -> str:
        prompts.append(prompt)
        return script(prompt)

    (tmp_path / "AGENTS.md").write_text("Say please.")
    (tmp_path / ".editorconfig").write_text("root = true\n[*]\nindent_style = tab\n")
    with serving(scripted_model(listening)) as running:
        async with channel(running, path=str(tmp_path / "a.py"), root=str(tmp_path)) as client:
            await client.request(edit(client, "make it two"))
    assert any("Say please." in prompt and "Indent with tabs." in prompt for prompt in prompts)


@pytest.mark.parametrize(
    ("instruction", "span", "why"),
    [
        ("prose", (10, 19), "leaves code out"),
        ("elsewhere", (0, 0), "other files|does not fit"),
        ("make it two", (10, 9000), "not a span"),
    ],
)
async def test_an_answer_that_cannot_be_used_changes_nothing_and_says_why(
    server: RunningServer, instruction: str, span: tuple[int, int], why: str
) -> None:
    async with channel(server) as client:
        with pytest.raises(RemoteError, match=why):
            await client.request(edit(client, instruction, *span))


async def begun(server: RunningServer, client: Channel) -> asyncio.Future[Any]:
    """An edit that would take a minute, and has begun."""
    steps = server.engines["echo"].steps
    asked = asyncio.ensure_future(client.request(edit(client, "endless", 0, 0)))
    while server.engines["echo"].steps < steps + 5:  # noqa: ASYNC110 the engine has no event for this
        await asyncio.sleep(0.005)
    return asked


async def test_a_cancelled_edit_stops_the_engine(server: RunningServer) -> None:
    async with channel(server, "value = 1\n" * 4000) as client:
        asked = await begun(server, client)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert await asyncio.to_thread(server.settled)


async def test_a_client_that_goes_leaves_nothing_running(server: RunningServer) -> None:
    async with channel(server, "value = 1\n" * 4000) as client:
        asked = await begun(server, client)
    with pytest.raises(Unavailable):
        await asked
    assert await asyncio.to_thread(server.settled)


async def test_without_a_model_that_follows_instructions_it_says_how_to_get_one() -> None:
    model = dataclasses.replace(scripted_model(script), chat=None)
    with serving(model) as server:
        async with channel(server) as client:
            with pytest.raises(RemoteError, match="keystroke models add coder"):
                await client.request(edit(client, "make it two"))


async def test_a_refactoring_sees_the_buffer_and_never_leaves_its_workspace(
    server: RunningServer, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "a.py").write_text("old = 1\n")
    (root / "b.py").write_text("import a\n\nprint(a.name)\n")
    (tmp_path / "c.py").write_text("import a\n\nprint(a.name)\n")
    async with channel(server, "name = 1\n", path=str(root / "a.py"), root=str(root)) as client:
        ask = live.RefactorAsk(id="r", buffer="b", version=1, kind="rename", start=0, end=4, name="title")
        reply = await client.request(ask)
        assert isinstance(reply, live.Changes)
        assert {(f.buffer, f.path) for f in reply.files} == {("b", None), (None, str(root / "b.py"))}
        assert (root / "a.py").read_text() == "old = 1\n"

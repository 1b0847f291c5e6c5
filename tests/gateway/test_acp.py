"""An editor that hosts agents, over real pipes: `keystroke acp` against a gateway with a scripted model."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from acp import PROTOCOL_VERSION, text_block
from acp.client.connection import ClientSideConnection
from acp.schema import AllowedOutcome, DeniedOutcome, RequestPermissionResponse
from gateway_support import RunningServer, scripted_model, serving

BROKEN = "def add(a, b):\n    return a - b\n"
FIXED = "def add(a, b):\n    return a + b\n"
FURTHER = "def add(a, b):\n    return a + b + 1\n"


class Editor:
    """The editor's side: remembers what it was shown and answers as told."""

    def __init__(self) -> None:
        self.updates: list[Any] = []
        self.asked: list[Any] = []
        self.allows = True
        self.on_update: Callable[[Any], None] = lambda update: None

    async def session_update(self, session_id: str, update: Any, **_: Any) -> None:
        self.updates.append(update)
        self.on_update(update)

    async def request_permission(
        self, session_id: str, tool_call: Any, options: list[Any], **_: Any
    ) -> RequestPermissionResponse:
        self.asked.append(tool_call)
        if not self.allows:
            return RequestPermissionResponse(outcome=DeniedOutcome(outcome="cancelled"))
        chosen = next(option.option_id for option in options if option.kind == "allow_once")
        return RequestPermissionResponse(outcome=AllowedOutcome(outcome="selected", option_id=chosen))

    def kinds(self) -> list[str]:
        return [update.session_update for update in self.updates]

    def said(self) -> str:
        return "".join(u.content.text for u in self.updates if u.session_update == "agent_message_chunk")


@asynccontextmanager
async def hosted(url: str, *arguments: str) -> AsyncIterator[tuple[Editor, ClientSideConnection]]:
    program = "from keystroke.clients.cli import main; main()"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, "acp", "--gateway", url, *arguments,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    editor = Editor()
    connection = ClientSideConnection(editor, process.stdin, process.stdout)  # type: ignore[arg-type]
    try:
        yield editor, connection
    finally:
        await connection.close()
        process.stdin.close()
        assert await asyncio.wait_for(process.wait(), 60) == 0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "calc.py").write_text(BROKEN)
    return folder


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    def script(prompt: str) -> str:
        if "forever" in prompt.rsplit("[user]", 1)[-1]:
            return "x" * 100_000
        return f"{FURTHER if 'one more' in prompt else FIXED}```\n"

    with serving(scripted_model(script, "worker", step_cost=0.0005), folder=tmp_path / "state") as running:
        yield running


async def test_a_prompt_is_a_task_whose_change_the_editor_asks_about(
    server: RunningServer, root: Path
) -> None:
    async with hosted(server.url) as (editor, agent):
        first = await agent.initialize(protocol_version=PROTOCOL_VERSION)
        assert first.agent_info is not None
        assert first.agent_info.name == "keystroke"
        session = (await agent.new_session(cwd=str(root), mcp_servers=[])).session_id
        answer = await agent.prompt(session_id=session, prompt=[text_block("make add in calc.py add")])
        assert answer.stop_reason == "end_turn"
        assert (root / "calc.py").read_text() == FIXED
        (asked,) = editor.asked
        (diff,) = asked.content
        assert (diff.path, diff.old_text, diff.new_text) == (str(root / "calc.py"), BROKEN, FIXED)
        assert "tool_call" in editor.kinds()
        assert "change calc.py in 1 place" in editor.said()
        # The next prompt of the session goes on with the same task.
        answer = await agent.prompt(
            session_id=session, prompt=[text_block("add in calc.py must add one more")]
        )
        assert answer.stop_reason == "end_turn"
        assert (root / "calc.py").read_text() == FURTHER
        assert len(server.gateway.tasks._runs) == 1


async def test_what_the_user_refuses_is_not_made(server: RunningServer, root: Path) -> None:
    async with hosted(server.url) as (editor, agent):
        await agent.initialize(protocol_version=PROTOCOL_VERSION)
        session = (await agent.new_session(cwd=str(root), mcp_servers=[])).session_id
        editor.allows = False
        answer = await agent.prompt(session_id=session, prompt=[text_block("make add in calc.py add")])
        assert answer.stop_reason == "end_turn"
        assert (root / "calc.py").read_text() == BROKEN
        assert "nothing was written" in editor.said()


async def test_cancelling_a_prompt_stops_its_task(server: RunningServer, root: Path) -> None:
    async with hosted(server.url) as (editor, agent):
        await agent.initialize(protocol_version=PROTOCOL_VERSION)
        session = (await agent.new_session(cwd=str(root), mcp_servers=[])).session_id
        working = asyncio.Event()
        editor.on_update = lambda update: working.set()
        prompt = asyncio.create_task(
            agent.prompt(session_id=session, prompt=[text_block("work forever on calc.py")])
        )
        await asyncio.wait_for(working.wait(), 60)
        await agent.cancel(session_id=session)
        assert (await asyncio.wait_for(prompt, 60)).stop_reason == "cancelled"
        assert server.settled()


async def test_a_folder_that_is_not_there_is_said_in_the_conversation(server: RunningServer) -> None:
    async with hosted(server.url) as (editor, agent):
        await agent.initialize(protocol_version=PROTOCOL_VERSION)
        session = (await agent.new_session(cwd="/no/such/folder", mcp_servers=[])).session_id
        answer = await agent.prompt(session_id=session, prompt=[text_block("do")])
        assert answer.stop_reason == "refusal"
        assert "no folder" in editor.said()

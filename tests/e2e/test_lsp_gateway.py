"""The gateway behind the language server: found, started, shared, lost, found again, and gone at the end."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from lsp_support import Editor, editing, eventually, scripted_model, serving
from lsprotocol import types
from pygls.exceptions import JsonRpcException

from keystroke.clients.local_gateway import Announcement, read_announcement

CALLS = 'alpha = load("alpha")\nbeta = load("beta")\ngamma = load('
FAKE = ("--echo", "--linger", "0")


def announced(root: Path) -> Announcement | None:
    files = list((root / "state" / "gateways").glob("*.json"))
    assert len(files) <= 1
    return read_announcement(files[0]) if files else None


def running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return True
    return state != "Z"  # ended; only nobody has asked for its exit code yet


async def ready(editor: Editor) -> tuple[str, Announcement]:
    uri = editor.open("work.py", "value = ")
    assert await editor.until_ghost(uri) == "pass"
    said = announced(editor.root)
    assert said is not None
    return uri, said


async def test_editors_share_a_gateway_that_leaves_after_the_last_of_them(tmp_path: Path) -> None:
    async with editing(tmp_path, *FAKE) as first, editing(tmp_path, *FAKE) as second:
        (_, one), (_, two) = await asyncio.gather(ready(first), ready(second))
        assert one == two
        assert one.token
        file = next((tmp_path / "state" / "gateways").glob("*.json"))
        assert file.stat().st_mode & 0o077 == 0
    await eventually(lambda: not running(one.pid))
    assert announced(tmp_path) is None


async def test_a_lost_gateway_is_said_once_and_ghost_text_comes_back(tmp_path: Path) -> None:
    async with editing(tmp_path, *FAKE) as editor:
        uri, first = await ready(editor)
        os.kill(first.pid, signal.SIGKILL)
        editor.type(uri, "1\nother = ")  # typing goes on meanwhile, and is not lost
        assert await editor.until_ghost(uri) == "pass"
        second = announced(tmp_path)
        assert second is not None
        assert second.pid != first.pid
        said = [m.message for m in editor.client.messages]
        assert ["was lost" in m for m in said] == [True, False]
        assert ["is back; suggestions resume" in m for m in said] == [False, True]
    await eventually(lambda: not running(second.pid))


async def test_a_gateway_that_cannot_start_is_explained_and_the_editor_goes_on(tmp_path: Path) -> None:
    async with editing(tmp_path, "--model", "no-such-model-anywhere", "--linger", "0") as editor:
        uri = editor.open("work.py", "value = ")
        await eventually(lambda: editor.client.messages)
        assert await editor.ghost(uri) is None
        (message,) = editor.client.messages
        assert "could not start" in message.message
        assert "no-such-model-anywhere" in message.message
        assert message.type.value == 1


async def test_no_gateway_at_the_named_address_is_said_once(tmp_path: Path) -> None:
    async with editing(tmp_path, "--gateway", "http://127.0.0.1:9") as editor:
        uri = editor.open("work.py", "value = ")
        await eventually(lambda: editor.client.messages)
        for key in "12":
            editor.type(uri, key)
            assert await editor.ghost(uri) is None
        assert len(editor.client.messages) == 1


async def test_work_cancelled_from_its_progress_ends(tmp_path: Path) -> None:
    slow = scripted_model(lambda prompt: "```\n" + "x" * 9000, step_cost=0.4)
    with serving(slow) as server:
        async with editing(tmp_path, "--gateway", server.url) as editor:
            uri = editor.open("work.py", "value = 1\n" * 400)
            await eventually(editor.connected)
            params = types.ExecuteCommandParams("keystroke.edit", [uri, None, "rewrite it"])
            asked = asyncio.ensure_future(editor.client.workspace_execute_command_async(params))
            await eventually(lambda: server.engines["echo"].steps)
            (token,) = editor.client.progress_reports
            editor.client.window_work_done_progress_cancel(types.WorkDoneProgressCancelParams(token))
            with pytest.raises(JsonRpcException):
                await asked
            editor.close(uri)
            await eventually(server.settled)


@pytest.mark.model
async def test_the_embedded_model_completes_code_in_the_editor(tmp_path: Path) -> None:
    async with editing(tmp_path, "--linger", "0") as editor:
        uri = editor.open("work.py", CALLS)
        shown = await editor.until_ghost(uri)
        assert "\n" not in shown
        editor.type(uri, shown[0])
        assert await editor.ghost(uri) == shown[1:]
        said = announced(tmp_path)
    assert said is not None
    await eventually(lambda: not running(said.pid))

"""Tasks in the editor: told as they go, taken hunk by hunk, and never over what was typed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lsp_support import Editor, RunningServer, editing, eventually, plain, scripted_model, serving
from lsprotocol import types
from pygls.exceptions import JsonRpcException

BROKEN = "def add(a, b):\n    return a - b\n\n\ndef sub(a, b):\n    return a + b\n"
FIXED = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "calc.py").write_text(BROKEN)
    return folder


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    def script(prompt: str) -> str:
        return "x" * 100_000 if "forever" in prompt else f"{FIXED}```\n"

    with serving(scripted_model(script, "worker", step_cost=0.0005), folder=tmp_path / "gateway") as running:
        yield running


async def command(editor: Editor, name: str, *arguments: Any) -> Any:
    params = types.ExecuteCommandParams(name, list(arguments))
    return plain(await editor.client.workspace_execute_command_async(params))


async def test_an_editor_that_shows_tasks_gets_every_event_and_takes_hunks(
    server: RunningServer, root: Path
) -> None:
    async with editing(root, "--gateway", server.url, tasks=True) as editor:
        told: list[dict[str, Any]] = []
        editor.client.feature("keystroke/task")(lambda params: told.append(plain(params)))
        task = (await command(editor, "keystroke.task", "make add in calc.py add"))["id"]
        await eventually(lambda: any(event["type"] == "task.asked" for event in told))
        diff = await command(editor, "keystroke.taskDiff", task)
        assert [hunk["first"] for hunk in diff["hunks"]] == [2, 6]
        uri = editor.open("calc.py", BROKEN)
        editor.type(uri, "mine = 1\n")
        await eventually(lambda: editor.texts[uri])
        with pytest.raises(JsonRpcException, match="unsaved changes"):
            await command(editor, "keystroke.taskAct", task, "approve", {"hunks": [0]})
        editor.replace(uri, len(BROKEN), len(BROKEN) + len("mine = 1\n"), "")
        await command(editor, "keystroke.taskAct", task, "approve", {"hunks": [0]})
        await eventually(lambda: told[-1]["type"] == "task.ended")
        assert (root / "calc.py").read_text() == BROKEN.replace("a - b", "a + b", 1)
        assert told[-1]["task"]["status"] == "done"
        await command(editor, "keystroke.taskAct", task, "undo")
        assert (root / "calc.py").read_text() == BROKEN
        assert [known["id"] for known in await command(editor, "keystroke.tasks")] == [task]
        with pytest.raises(JsonRpcException, match="no task action explode"):
            await command(editor, "keystroke.taskAct", task, "explode")
        with pytest.raises(JsonRpcException, match="needs an instruction"):
            await command(editor, "keystroke.task", "  ")
        with pytest.raises(JsonRpcException, match="no folder"):
            await command(editor, "keystroke.task", "do", {"workspace": "/no/such/folder"})


async def test_any_other_editor_is_asked_by_plain_messages_one_hunk_after_the_other(
    server: RunningServer, root: Path
) -> None:
    async with editing(root, "--gateway", server.url) as editor:
        asked: list[str] = []
        answers = iter(["One by one", "Leave it", "Take it"])

        def answer(params: types.ShowMessageRequestParams) -> types.MessageActionItem:
            asked.append(params.message)
            return types.MessageActionItem(next(answers))

        editor.client.feature(types.WINDOW_SHOW_MESSAGE_REQUEST)(answer)
        await command(editor, "keystroke.task", "make add in calc.py add")
        await eventually(lambda: any("keystroke undo" in m.message for m in editor.client.messages))
        assert (root / "calc.py").read_text() == BROKEN.replace("a + b", "a - b", 1)
        assert asked[0].startswith("Keystroke: Make this change (change calc.py in 2 places)?")
        assert asked[2] == "Keystroke: calc.py:6\n-    return a + b\n+    return a - b"

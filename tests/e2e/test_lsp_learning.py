"""What an editor takes through the language server is learned from, where that was turned on."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from lsp_support import editing, scripted_model, serving
from lsprotocol import types

from keystroke.config import LearnSettings
from keystroke.gateway.record.outcome_store import OutcomeStore

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_what_an_editor_takes_is_kept(tmp_path: Path) -> None:
    model = scripted_model(lambda prompt: "left + right" if prompt.endswith("total = ") else "")
    folder, work = tmp_path / "state", tmp_path / "work"
    work.mkdir()
    with serving(model, folder=folder, learn=LearnSettings(enabled=True)) as gateway:
        async with editing(work, "--gateway", gateway.url) as editor:
            uri = editor.open("taken.py", "left, right = 1, 2\ntotal = ")
            await editor.until_ghost(uri)
            item = await editor.item(uri)
            assert item is not None
            assert item.command is not None
            editor.type(uri, str(item.insert_text))
            params = types.ExecuteCommandParams(item.command.command, item.command.arguments)
            await editor.client.workspace_execute_command_async(params)
            editor.close(uri)
            await editor.ghost(editor.open("after.py", "total = "))  # all before it has been seen
    with closing(OutcomeStore(folder / "learned.db")) as learned:
        rows = [row for row in learned.outcomes() if row.path == "taken.py"]
    assert [(row.became, row.taken, row.written) for row in rows] == [("accepted", 12, "left + right")]
    assert str(work) not in rows[0].project

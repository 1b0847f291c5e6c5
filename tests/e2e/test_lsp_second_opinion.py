"""A larger model behind the language server: the editor is told that there is something better, and asks."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from lsp_support import editing, eventually, scripted_model, serving


def test_an_editor_that_listens_asks_again_and_is_shown_the_larger_models_text(tmp_path: Path) -> None:
    small = scripted_model(lambda prompt: "left\n", name="small")
    large = scripted_model(lambda prompt: "left + right\n", name="large")
    assert small.fim is not None
    models = [replace(m, fim=replace(small.fim, order="spm")) for m in (small, large)]

    async def run(url: str) -> None:
        revised: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        async with editing(tmp_path, "--gateway", url) as editor:

            def told(params: Any) -> None:
                if not revised.done():
                    revised.set_result(params)

            editor.client.feature("keystroke/suggestionRevised")(told)
            await eventually(editor.connected)
            uri = editor.open("a.py", "left, right = 1, 2\ntotal =")
            editor.type(uri, " ")
            item = await editor.item(uri, invoked=False)
            assert item is not None
            assert item.insert_text == "left"
            heard = await asyncio.wait_for(revised, 60)
            assert (heard.uri, heard.verdict, heard.model) == (uri, "lengthened", "large")
            item = await editor.item(uri)
            assert item is not None
            assert item.insert_text == "left + right"

    with serving(*models, roles={"large": "deep"}) as server:
        asyncio.run(run(server.url))

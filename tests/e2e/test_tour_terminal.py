"""The terminal's part of the tour, and its picture: drawn by the interface itself, photographed by a browser.

A file of its own: the browser of the other tests is driven without a loop, which leaves none for these.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from bench.browser import FLAGS, chromium
from page_support import needs_browser, scripted_model, serving
from textual.widgets import Input

from keystroke.clients.gateway_address import GatewayAddress
from keystroke.clients.tui.app import TerminalApp
from keystroke.clients.tui.widgets import QuestionPanel

pytestmark = [needs_browser, pytest.mark.browser]


async def test_the_terminal_shows_a_change_and_waits_for_a_yes(tmp_path: Path) -> None:
    root = tmp_path / "calc"
    root.mkdir()
    (root / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    model = scripted_model(lambda prompt: "def add(a, b):\n    return a + b\n```\n", "echo")
    with serving(model, folder=tmp_path / "state") as running:
        app = TerminalApp(GatewayAddress(running.url), root, tmp_path / "sessions")
        async with app.run_test(size=(100, 26)) as pilot:
            app.query_one(Input).value = "/do make add in calc.py add"
            await pilot.press("enter")
            for _ in range(500):
                if app.query(QuestionPanel) and not isinstance(app.focused, Input):
                    break
                await pilot.pause(0.02)
            assert app.query(QuestionPanel)
            await pilot.pause(0.2)
            drawn = app.export_screenshot(title="keystroke")
            await pilot.press("n")
    folder = Path(os.environ.get("KEYSTROKE_PICTURES") or tmp_path)
    assert len(await _photographed(drawn, folder / "terminal.png")) < 200_000


async def _photographed(svg: str, file: Path) -> bytes:
    """The terminal's drawing as a picture; its fonts are this machine's, not those of an outside address."""
    from playwright.async_api import async_playwright

    plain = re.sub(r"@font-face\s*{[^}]*}", "", svg)
    async with async_playwright() as driver:
        opened = await driver.chromium.launch(executable_path=chromium(), args=FLAGS)
        page = await opened.new_page(viewport={"width": 1000, "height": 560})
        await page.set_content(f"<body style='margin:0'>{plain}</body>")
        taken = await page.locator("svg").first.screenshot(path=str(file))
        await opened.close()
    return taken

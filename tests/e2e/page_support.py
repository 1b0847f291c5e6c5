"""What browser tests share: a real Chromium on the real page of a real server."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from bench.browser import FLAGS, chromium, reason_why_not

sys.path.insert(0, str(Path(__file__).parents[1] / "gateway"))

from gateway_support import RunningServer, last_user, scripted_model, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

__all__ = ["Tab", "browser", "last_user", "needs_browser", "scripted_model", "serving", "visiting"]

PATIENCE = 60_000.0  # milliseconds for anything to happen; a loaded machine is slow, not wrong


needs_browser = pytest.mark.skipif(reason_why_not() is not None, reason=reason_why_not() or "")


@contextmanager
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=chromium(), args=FLAGS)
        try:
            yield opened
        finally:
            opened.close()


@dataclass
class Tab:
    """One tab on the page, and all that it complained of."""

    page: Page
    complaints: list[str] = field(default_factory=list)

    def until(self, expression: str, argument: Any = None) -> None:
        """Wait until a JavaScript expression (or a function of `argument`) is true."""
        self.page.wait_for_function(expression, arg=argument, timeout=PATIENCE)

    def text(self) -> str:
        """The file as the editor holds it; for texts that fit the screen."""
        lines = self.page.locator(".cm-line")
        whole: list[str] = lines.evaluate_all(
            "all => all.map(line => { const copy = line.cloneNode(true);"
            " copy.querySelectorAll('.ghost, .jump-new').forEach(e => e.remove());"
            " return copy.textContent; })"
        )
        return "\n".join(whole)

    def write(self, name: str, text: str, cursor: str | None = None) -> None:
        """Open a file of this name and text, as a person would, and go to its end (or behind `cursor`)."""
        self.page.set_input_files(
            "#file", {"name": name, "mimeType": "text/plain", "buffer": text.encode()}, timeout=PATIENCE
        )
        self.until("name => document.getElementById('file-name').value === name", name)
        self.page.locator(".cm-content").focus()
        self.page.keyboard.press("Control+End")
        if cursor is not None:
            behind = text.rindex(cursor) + len(cursor)
            self.page.keyboard.press("Control+Home")
            for _ in range(text[:behind].count("\n")):
                self.page.keyboard.press("ArrowDown")
            self.page.keyboard.press("Home")
            self.page.keyboard.press("Home")
            for _ in range(behind - text.rfind("\n", 0, behind) - 1):
                self.page.keyboard.press("ArrowRight")

    def connected(self) -> None:
        self.page.wait_for_selector("#state[data-state=open]", timeout=PATIENCE)

    def ghost(self) -> str:
        """Wait for ghost text."""
        self.page.wait_for_selector(".ghost", timeout=PATIENCE)
        return "\n".join(self.page.locator(".ghost").all_inner_texts())


@contextmanager
def visiting(
    browser: Browser,
    server: RunningServer,
    *,
    address: str = "",
    forgiving: Callable[[str], bool] | None = None,
    **context: Any,
) -> Iterator[Tab]:
    """A tab of its own on the server's page. When it is left, nothing may have been complained of on its
    console but what `forgiving` lets pass."""
    room = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **context})
    room.set_default_timeout(PATIENCE)
    tab = Tab(room.new_page())

    def heard(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            tab.complaints.append(message.text)

    tab.page.on("console", heard)
    tab.page.on("pageerror", lambda error: tab.complaints.append(str(error)))
    try:
        tab.page.goto(address or f"{server.url}/")
        yield tab
        assert [text for text in tab.complaints if forgiving is None or not forgiving(text)] == []
    finally:
        room.close()

"""The three-minute tour of docs/tour.md, walked with the embedded model; its pictures are taken on the way.

`KEYSTROKE_PICTURES=docs/pictures` (make pictures) keeps them; otherwise they are only taken.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from page_support import Tab, browser, needs_browser, serving, visiting

from keystroke.config import load_settings
from keystroke.engine.locate import shipped_model
from keystroke.gateway.work.registry import registry_from_settings

if TYPE_CHECKING:
    from gateway_support import RunningServer
    from playwright.sync_api import Browser

pytestmark = [needs_browser, pytest.mark.browser, pytest.mark.model]

FILE = '''import sqlite3


class Inventory:
    """Items by name, kept in a database."""

    def __init__(self, path: str) -> None:
        self.connection = sqlite3.connect(path)

    def find(self, name: str):
        query = "SELECT * FROM items WHERE name = '%s'" % name
        return self.connection.execute(query).fetchall()

'''


@pytest.fixture(scope="module")
def chrome() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    if shipped_model() is None:
        pytest.skip("the embedded model is not here")
    alone = {"paths.models": str(tmp_path_factory.mktemp("models"))}  # whatever else is on this machine
    with serving(registry=registry_from_settings(load_settings(alone, environ={}))) as running:
        yield running


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = Path(os.environ.get("KEYSTROKE_PICTURES") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def picture(tab: Tab, file: Path) -> None:
    tab.page.wait_for_timeout(100)
    tab.page.screenshot(path=file)
    assert file.stat().st_size < 200_000


def test_the_playground_types_fixes_and_races(chrome: Browser, server: RunningServer, pictures: Path) -> None:
    with visiting(chrome, server, viewport={"width": 1100, "height": 640}) as tab:
        tab.connected()
        tab.write("inventory.py", FILE)
        tab.page.wait_for_selector("#findings .fix")
        tab.page.keyboard.type("    def close(self) -> None:")
        tab.page.keyboard.press("Enter")
        tab.page.keyboard.type("self.conn", delay=80)
        assert tab.ghost()
        picture(tab, pictures / "ghost-text.png")
        tab.page.keyboard.press("Tab")
        tab.page.keyboard.press("Control+Home")
        tab.page.keyboard.press("F8")
        tab.page.keyboard.press("Alt+Enter")
        tab.until("() => document.querySelector('.cm-content').textContent.includes('name = ?')")
        assert "execute(query, (name,))" in tab.text()
        picture(tab, pictures / "fixed.png")
        tab.page.click("#tab-race")
        tab.page.fill("#race-line", "def is_prime(n: int) -> bool:\n    ")
        tab.page.click("#race-go")
        tab.page.wait_for_selector("#race-stop", state="hidden")
        tab.until("() => /tok.s/.test(document.getElementById('race-note-b').textContent)")
        left, right = tab.page.inner_text("#race-out-a"), tab.page.inner_text("#race-out-b")
        assert left == right  # drafts on against off: the same text
        picture(tab, pictures / "race.png")


def test_the_playground_in_the_dark_on_a_phone(
    chrome: Browser, server: RunningServer, pictures: Path
) -> None:
    phone = {"width": 390, "height": 760}
    with visiting(chrome, server, viewport=phone, color_scheme="dark") as tab:
        tab.connected()
        tab.write("inventory.py", FILE)
        tab.page.wait_for_selector("#findings .fix")
        picture(tab, pictures / "phone.png")

"""The compiled extension in a real VS Code (code-server) and a real browser: what a person does, and sees.

Needs code-server and the extension's packages, which `make test-editors` fetches into `.editors/`; skipped
where they are not. `KEYSTROKE_PICTURES=docs/pictures` keeps the pictures.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from bench.free_port import free_port
from page_support import PATIENCE, browser, needs_browser, scripted_model, serving

if TYPE_CHECKING:
    from gateway_support import RunningServer
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).parents[2]
EDITORS = Path(os.environ.get("TEST_EDITORS") or ROOT / ".editors")
CODE_SERVER = EDITORS / "code-server" / "node_modules" / "code-server"
EXTENSION = EDITORS / "extension"
MISSING = not (CODE_SERVER.is_dir() and (EXTENSION / "out" / "extension.js").is_file())
PROGRAM = Path(sys.executable).with_name("keystroke")

pytestmark = [
    needs_browser,
    pytest.mark.browser,
    pytest.mark.skipif(MISSING, reason="no VS Code here: make test-editors fetches one"),
]

STATUS = "[id='keystroke.keystroke.keystroke']"
CALC = "def add(a, b):\n    return a - b\n\n\ndef sub(a, b):\n    return a + b\n"
RIGHT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n"
AREA = "def area(width, height):\n    return width * height\n\n\nprint(area(2, 3))\n"


def answers(prompt: str) -> str:
    if "[user]" in prompt:
        return f"{RIGHT}```\n"
    return "\n" if "silent" in prompt else "total + 1\n"


@pytest.fixture(scope="module")
def chrome() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serving(
        scripted_model(answers, "small", step_cost=0.002), folder=tmp_path_factory.mktemp("gateway")
    ) as running:
        yield running


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "sum.py").write_text("total = 0\n")
    (folder / "calc.py").write_text(CALC)
    (folder / "area.py").write_text(AREA)
    return folder


@pytest.fixture(scope="module")
def address(gateway: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A VS Code with the extension, which uses the gateway of this test."""
    home = tmp_path_factory.mktemp("vscode")
    settings = {
        "keystroke.command": str(PROGRAM),
        "keystroke.gateway": gateway.url,
        "security.workspace.trust.enabled": False,
        "workbench.startupEditor": "none",
        "workbench.secondarySideBar.defaultVisibility": "hidden",
        "editor.minimap.enabled": False,
        "editor.quickSuggestions": {"other": "off"},
        "chat.disableAIFeatures": True,
        "telemetry.telemetryLevel": "off",
    }
    (home / "data" / "User").mkdir(parents=True)
    (home / "data" / "User" / "settings.json").write_text(json.dumps(settings))
    shutil.copytree(EXTENSION, home / "extensions" / "keystroke.keystroke-0.1.0", symlinks=True)
    node = EDITORS / "node" / "node"
    with running(
        [str(node) if node.exists() else "node", str(CODE_SERVER / "out" / "node" / "entry.js")], home
    ) as url:
        yield url


@contextmanager
def running(command: list[str], home: Path) -> Iterator[str]:
    port = free_port()
    options = ["--auth", "none", "--bind-addr", f"127.0.0.1:{port}", "--config", str(home / "config.yaml")]
    options += ["--user-data-dir", str(home / "data"), "--extensions-dir", str(home / "extensions")]
    options += ["--disable-telemetry", "--disable-update-check", "--disable-workspace-trust"]
    (home / "config.yaml").write_text("{}\n")
    log = (home / "log").open("wb")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KEYSTROKE_")}
    process = subprocess.Popen(
        [*command, *options], stdout=log, stderr=log, env=clean, start_new_session=True
    )
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{url}/healthz", timeout=5).close()
                break
            except (OSError, urllib.error.URLError):
                assert process.poll() is None, (home / "log").read_text()[-2000:]
                time.sleep(0.2)
        yield url
    finally:
        os.killpg(process.pid, 15)
        process.wait(60)
        log.close()


class Code:
    """A window of VS Code."""

    def __init__(self, page: Page, picture: Path) -> None:
        self.page, self._pictures = page, picture

    def until(self, expression: str) -> None:
        self.page.wait_for_function(expression, timeout=PATIENCE)

    def ghost(self) -> str:
        self.page.wait_for_selector(".ghost-text-decoration, .ghost-text", timeout=PATIENCE)
        found = self.page.locator("[class*=ghost-text-decoration]").all_inner_texts()
        return "".join(found).replace("\xa0", " ")

    def shows(self, text: str, where: str = ".editor-instance .view-lines") -> None:
        """Wait until the text stands there."""
        self.page.wait_for_function(
            "([where, text]) => [...document.querySelectorAll(where)]"
            ".some(e => e.innerText.replaceAll('\\u00a0', ' ').includes(text))",
            arg=[where, text],
            timeout=PATIENCE,
        )

    def command(self, title: str) -> None:
        self.page.keyboard.press("F1")
        self.page.wait_for_selector(".quick-input-widget input")
        self.page.keyboard.type(title)
        self.page.locator(f".quick-input-list .monaco-list-row[aria-label*='{title}']").first.click()

    def answer(self, text: str) -> None:
        self.page.wait_for_selector(".quick-input-widget .quick-input-message")
        self.page.locator(".quick-input-widget input").fill(text)
        self.page.keyboard.press("Enter")

    def picture(self, name: str) -> None:
        self.page.wait_for_timeout(300)
        self.page.screenshot(path=self._pictures / name)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = Path(os.environ.get("KEYSTROKE_PICTURES") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def editing(chrome: Browser, address: str, project: Path, file: str, pictures: Path) -> Iterator[Code]:
    """A window on the project with one file open, its cursor at the end."""
    room = chrome.new_context(viewport={"width": 1100, "height": 640})
    room.set_default_timeout(PATIENCE)
    page = room.new_page()
    try:
        place = f"vscode-remote://{address.removeprefix('http://')}{project / file}"
        payload = json.dumps([["openFile", place]])
        page.goto(f"{address}/?folder={project}&payload={payload}")
        page.wait_for_selector(".editor-instance .view-line")
        code = Code(page, pictures)
        code.shows("small", STATUS)
        page.locator(".editor-instance .view-line").first.click()
        page.keyboard.press("Control+End")
        yield code
    finally:
        room.close()


def test_ghost_text_comes_is_taken_by_word_and_whole_and_the_status_says_who(
    chrome: Browser, address: str, project: Path, pictures: Path
) -> None:
    with editing(chrome, address, project, "sum.py", pictures) as code:
        code.page.keyboard.type("total = ", delay=30)
        assert code.ghost() == "total + 1"
        code.until(f"() => /small [\\d.]+ (ms|tok.s)/.test(document.querySelector(`{STATUS}`).innerText)")
        code.picture("vscode-ghost-text.png")
        code.page.keyboard.press("Control+ArrowRight")
        code.shows("total = total")
        code.page.keyboard.press("Tab")
        code.shows("total = total + 1")
        code.page.wait_for_selector("[class*=ghost-text-decoration]", state="detached")
        code.page.keyboard.press("Enter")
        code.page.keyboard.type("silent = ", delay=30)
        code.until(f"() => /Nothing shown|nothing/i.test(document.querySelector(`{STATUS} a`).ariaLabel)")


def test_the_next_edit_is_marked_and_taken_with_one_key(
    chrome: Browser, address: str, project: Path, pictures: Path
) -> None:
    with editing(chrome, address, project, "area.py", pictures) as code:
        code.page.keyboard.press("Control+Home")
        for _ in range(len("def area(width")):
            code.page.keyboard.press("ArrowRight")
        for _ in range(len("width")):
            code.page.keyboard.press("Backspace")
        code.page.keyboard.press("Escape")
        code.page.keyboard.type("breadth", delay=20)
        code.page.keyboard.press("Escape")
        code.page.wait_for_selector("[class*=ced-]", state="attached")  # a decoration of the extension
        code.picture("vscode-next-edit.png")
        code.page.keyboard.press("Control+Alt+n")
        code.shows("Ln 2", "[id='status.editor.selection']")
        code.page.keyboard.press("Control+Alt+n")
        code.shows("return breadth * height")


def test_a_task_is_given_shown_and_taken_by_hunk(
    chrome: Browser, address: str, project: Path, pictures: Path
) -> None:
    with editing(chrome, address, project, "calc.py", pictures) as code:
        code.command("Keystroke: Give a task")
        code.answer("make add in calc.py add")
        code.answer("")
        tree = ".pane-body .monaco-list"
        code.shows("asking", tree)
        code.shows("calc.py:6", tree)
        box = code.page.locator(".monaco-list-row[aria-label*='calc.py:6'] [role=checkbox]")
        box.click()
        code.until(
            "() => document.querySelector(\".monaco-list-row[aria-label*='calc.py:6'] [role=checkbox]\")"
            ".ariaChecked === 'false'"
        )
        code.picture("vscode-tasks.png")
        row = code.page.locator(".monaco-list-row[aria-label*='asking']")
        row.hover()
        row.locator(".action-label[aria-label*='Accept']").click()
        code.shows("done", tree)
        assert (project / "calc.py").read_text() == CALC.replace("a - b", "a + b", 1)


def test_settings_are_heard_without_a_restart(
    chrome: Browser, address: str, project: Path, pictures: Path
) -> None:
    with editing(chrome, address, project, "sum.py", pictures) as code:
        code.command("Keystroke: Switch ghost text on or off")
        code.until(f"() => document.querySelector(`{STATUS} a`).ariaLabel.includes('off')")
        code.page.keyboard.press("Enter")
        code.page.keyboard.type("total = ", delay=30)
        code.page.wait_for_timeout(1500)
        assert code.page.locator("[class*=ghost-text-decoration]").count() == 0
        code.command("Keystroke: Switch ghost text on or off")
        code.until(f"() => !document.querySelector(`{STATUS} a`).ariaLabel.includes('off')")
        code.page.keyboard.type("t")
        assert code.ghost() == "otal + 1"

"""Markup from files, models and commands is shown as text everywhere on the page: in a real browser it
creates no element, runs nothing, requests nothing, and never gets as far as the page's policy."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from page_support import Tab, browser, last_user, needs_browser, scripted_model, serving, visiting

from keystroke.agent.loop import tool_probe

if TYPE_CHECKING:
    from gateway_support import RunningServer
    from playwright.sync_api import Browser

pytestmark = [needs_browser, pytest.mark.browser]

RUN = "document.title='run'"
MARKUP = (  # without a slash, so that it can name a file
    f"'\"><img src=evil onerror={RUN}><svg onload={RUN}><iframe srcdoc='<script>{RUN}'><script>{RUN}<!--"
    f"<a href=javascript:{RUN}><style>*{{display:none}}<base href=evil>${{{RUN}}}"
)
IMAGE = MARKUP[: MARKUP.index("<svg")]
SHOWN = "<img src=evil"  # a part of it that is shown wherever it is shown, also where it is cut
WATCH = """
globalThis.violations = [];
addEventListener("securitypolicyviolation", (e) => violations.push(e.effectiveDirective + " " + e.sample));
"""
PLANTED = (
    "img[src*=evil], svg[onload], iframe, base, a[href^=javascript], [onerror], [onload],"
    " script:not([src]), main style"
)


def answers(prompt: str) -> str:
    """Markup as ghost text, as an edit and as an answer."""
    if "<fim_" in prompt or "[user]" not in prompt:
        return f"{MARKUP!r}\n"  # a string of Python
    return f"```\ntext = {MARKUP!r}\n```" if "Rename" in prompt else f"{MARKUP} {last_user(prompt)[-100:]}"


@pytest.fixture(scope="module")
def chrome() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@contextmanager
def attacked(chrome: Browser, server: RunningServer) -> Iterator[Tab]:
    """A tab that is attacked. At the end the page is whole, and nothing was even tried."""
    asked: list[str] = []
    with visiting(chrome, server, address="about:blank") as tab:
        tab.page.add_init_script(WATCH)
        tab.page.on("request", lambda request: asked.append(request.url))
        tab.page.on("dialog", lambda dialog: asked.append(f"evil dialog {dialog.message}"))
        tab.page.goto(f"{server.url}/")
        tab.connected()
        yield tab
        tab.page.wait_for_timeout(100)
        assert tab.page.title() == "Keystroke"
        assert tab.page.locator(PLANTED).count() == 0
        assert tab.page.locator("main").is_visible()
        assert tab.page.evaluate("violations") == []
        assert [url for url in asked if "evil" in url] == []


def shows(tab: Tab, place: str) -> None:
    """Wait until the markup is text of `place`."""
    tab.until(
        "([place, text]) => [...document.querySelectorAll(place)].some("
        "e => (e instanceof HTMLInputElement ? e.value : e.textContent).includes(text))",
        [place, SHOWN],
    )


def test_in_names_buffers_suggestions_chat_and_edits(chrome: Browser) -> None:
    model = scripted_model(answers, "small", step_cost=0.0005)
    with serving(model) as server, attacked(chrome, server) as tab:
        name = f"{MARKUP}.py"
        tab.write(name, f"import yaml\nyaml.load({MARKUP!r}, Loader=yaml.Loader)\n# {MARKUP}\n")
        shows(tab, "#file-name")
        shows(tab, ".cm-line")
        tab.page.wait_for_selector("#findings .fix")
        tab.write("text.py", "text = 0\n")
        tab.page.keyboard.type("text = ")
        shows(tab, ".ghost")
        tab.page.keyboard.press("Tab")
        tab.page.fill("#chat-line", MARKUP)
        tab.page.keyboard.press("Enter")
        tab.until(
            "text => document.getElementById('chat-log').textContent.split(text).length > 2", SHOWN
        )  # what was said and what was answered
        tab.write("count.py", "text = 1\n")
        tab.page.keyboard.press("Control+k")
        tab.page.keyboard.type("Rename it")
        tab.page.keyboard.press("Enter")
        shows(tab, ".hunk")
        tab.page.keyboard.press("a")
        assert SHOWN in tab.text()


def test_in_findings(chrome: Browser) -> None:
    """The findings of a file quote its code."""
    with serving(scripted_model(answers, "small")) as server, attacked(chrome, server) as tab:
        tab.write("run.py", f'import subprocess\nsubprocess.run("echo {MARKUP}" + input(), shell=True)\n')
        tab.page.wait_for_selector("#findings li, #findings .finding")
        tab.page.keyboard.press("Control+Home")
        tab.page.keyboard.press("F8")


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_in_tasks_commands_outputs_and_diffs(
    chrome: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tool_probe._known, "worker", True)  # it calls tools
    root = tmp_path / MARKUP[:200]
    root.mkdir()
    (root / IMAGE).write_text(f"x = 1  # {MARKUP}\n")
    said = [
        call("run", command=f"cat {shlex.quote(IMAGE)}"),
        call("edit", path=IMAGE, old="x = 1", new=f"y = 1  # {IMAGE}"),
        "Done.",
    ]
    model = scripted_model(lambda prompt: said.pop(0) if len(said) > 1 else said[0], "worker")
    model.engine.info = replace(model.engine.info, parameters=7_000_000_000)
    with serving(model, folder=tmp_path / "state") as server, attacked(chrome, server) as tab:
        tab.page.request.post(
            f"{server.url}/v1/tasks",
            data={"workspace": str(root), "instruction": MARKUP, "files": [IMAGE], "run": True},
        )
        tab.page.reload()
        tab.connected()
        tab.page.click("#tab-tasks")
        shows(tab, "#task-list option")
        tab.page.select_option("#task-list", index=1)
        shows(tab, "#task-asked")  # the command
        tab.page.click("#task-no")
        shows(tab, "#task-hunks .hunk pre")
        shows(tab, "#task-hunks .place")
        shows(tab, "#task-log")
        tab.page.click("#task-yes")
        tab.page.wait_for_selector("#task-undo", state="visible")
        assert f"y = 1  # {IMAGE}" in (root / IMAGE).read_text()

"""The terminal interface, driven as a person drives it, on a real gateway."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, OptionList

sys.path.insert(0, str(Path(__file__).parents[1] / "gateway"))

from gateway_support import RunningServer, last_user, scripted_model, serving

from keystroke.clients.gateway_address import GatewayAddress
from keystroke.clients.tui.app import TerminalApp
from keystroke.clients.tui.session import SessionEntry, SessionStore
from keystroke.clients.tui.widgets import DiffView, LogEntry, QuestionPanel, StatusBar
from keystroke.text.terminal import safe_for_terminal

BROKEN = "def add(a, b):\n    return a - b\n\n\ndef sub(a, b):\n    return a + b\n"
FIXED = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n"


def answers(prompt: str) -> str:
    asked = last_user(prompt)
    if "calc.py" in prompt:
        return f"{FIXED}```\n"
    return "word " * 4000 if "long" in asked else f"You said: {asked[-100:]}"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "calc.py").write_text(BROKEN)
    return folder


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    with serving(scripted_model(answers, "worker", step_cost=0.001), folder=tmp_path / "server") as running:
        yield running


@asynccontextmanager
async def opened(server: RunningServer, root: Path) -> AsyncIterator[tuple[TerminalApp, Pilot[None]]]:
    app = TerminalApp(GatewayAddress(server.url), root, root.parent / "state")
    async with app.run_test(size=(100, 40)) as pilot:
        yield app, pilot


async def until(true: Callable[[], Any], pilot: Pilot[None]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, log(pilot.app)
        await pilot.pause(0.02)


def log(app: Any) -> str:
    return "\n".join(f"{said.kind}: {said.body}" for said in app.query(LogEntry))


async def say(app: TerminalApp, pilot: Pilot[None], line: str) -> None:
    app.query_one(Input).focus()
    app.query_one(Input).value = line
    await pilot.press("enter")


async def test_an_answer_streams_and_the_bar_tells_model_and_speed(server: RunningServer, root: Path) -> None:
    async with opened(server, root) as (app, pilot):
        await say(app, pilot, "hello")
        await until(lambda: "You said: hello" in log(app), pilot)
        await until(lambda: "ready" in app.query_one(StatusBar).body, pilot)
        assert "worker" in app.query_one(StatusBar).body
        assert "tok/s" in app.query_one(StatusBar).body
        assert "– tok/s" not in app.query_one(StatusBar).body


async def test_escape_stops_and_a_line_redirects(server: RunningServer, root: Path) -> None:
    async with opened(server, root) as (app, pilot):
        await say(app, pilot, "a long one")
        await until(lambda: "word word" in log(app), pilot)
        await say(app, pilot, "be brief")
        await until(lambda: "You said: be brief" in log(app), pilot)
        await until(lambda: "ready" in app.query_one(StatusBar).body, pilot)
        await say(app, pilot, "a long one again")
        await until(
            lambda: log(app).count("word word") and "answering" in app.query_one(StatusBar).body, pilot
        )
        await pilot.press("escape")
        await until(lambda: "stopped" in log(app), pilot)
        kinds = [entry.kind for entry in app.session.entries]
        assert kinds == ["user", "assistant", "user", "assistant", "user", "assistant"][: len(kinds)]
    assert server.settled()


async def test_a_task_shows_its_diff_waits_for_a_yes_and_rewinds_with_the_files(
    server: RunningServer, root: Path
) -> None:
    async with opened(server, root) as (app, pilot):
        await say(app, pilot, "hello")
        await until(lambda: "ready" in app.query_one(StatusBar).body and "You said" in log(app), pilot)
        await pilot.press("ctrl+t")
        await say(app, pilot, "make add in calc.py add")
        await until(lambda: app.query(QuestionPanel) and not isinstance(app.focused, Input), pilot)
        assert app.query(DiffView)
        assert (root / "calc.py").read_text() == BROKEN
        await pilot.press("y")
        await until(lambda: "done" in log(app), pilot)
        assert (root / "calc.py").read_text() == FIXED
        await until(lambda: "ready" in app.query_one(StatusBar).body, pilot)
        await pilot.press("ctrl+r")
        await until(lambda: app.screen.query(OptionList), pilot)
        await pilot.press("down", "enter")  # before the first thing said
        await until(lambda: app.query_one(Input).value == "hello", pilot)
        assert app.session.entries == []
        assert (root / "calc.py").read_text() == BROKEN


async def test_only_the_hunks_chosen_land_and_a_no_changes_nothing(server: RunningServer, root: Path) -> None:
    async with opened(server, root) as (app, pilot):
        await say(app, pilot, "/do make add in calc.py add")
        await until(lambda: app.query(QuestionPanel) and not isinstance(app.focused, Input), pilot)
        await pilot.press("n")
        await until(lambda: "proposed" in log(app), pilot)
        assert (root / "calc.py").read_text() == BROKEN
        await until(lambda: "ready" in app.query_one(StatusBar).body, pilot)
        await say(app, pilot, "/do make add in calc.py add")
        await until(lambda: app.query(QuestionPanel) and not isinstance(app.focused, Input), pilot)
        await pilot.press("down", "space", "y")
        await until(lambda: "done" in log(app), pilot)
        assert (root / "calc.py").read_text() == BROKEN.replace("a - b", "a + b", 1)


async def test_a_rewind_stops_where_somebody_else_changed_a_file(server: RunningServer, root: Path) -> None:
    async with opened(server, root) as (app, pilot):
        await say(app, pilot, "/do make add in calc.py add")
        await until(lambda: app.query(QuestionPanel) and not isinstance(app.focused, Input), pilot)
        await pilot.press("y")
        await until(lambda: "done" in log(app) and "ready" in app.query_one(StatusBar).body, pilot)
        (root / "calc.py").write_text("mine = 1\n")
        await pilot.press("ctrl+r")
        await until(lambda: app.screen.query(OptionList), pilot)
        await pilot.press("enter")
        await until(lambda: "was changed after the edit" in log(app), pilot)
        assert (root / "calc.py").read_text() == "mine = 1\n"
        assert [entry.kind for entry in app.session.entries] == ["task"]


async def test_a_session_is_listed_and_gone_on_with(server: RunningServer, root: Path) -> None:
    async with opened(server, root) as (app, pilot):
        await say(app, pilot, "remember me")
        await until(lambda: "You said" in log(app) and "ready" in app.query_one(StatusBar).body, pilot)
    async with opened(server, root) as (app, pilot):
        await pilot.press("ctrl+o")
        await until(lambda: app.screen.query(OptionList), pilot)
        await pilot.press("enter")
        await until(lambda: "remember me" in log(app), pilot)
        assert len(app.session.entries) == 2
        await say(app, pilot, "and now")
        await until(lambda: "You said: and now" in log(app), pilot)


async def test_leaving_in_the_middle_of_an_answer_is_quiet_and_keeps_what_was_said(
    server: RunningServer, root: Path
) -> None:
    async with opened(server, root) as (app, pilot):
        await say(app, pilot, "a long one")
        await until(lambda: "word word" in log(app), pilot)
    (kept,) = SessionStore(root.parent / "state").list(root)
    assert [entry.kind for entry in kept.entries] == ["user", "assistant"]
    assert "word word" in kept.entries[1].text


def test_strangers_text_cannot_steer_the_terminal() -> None:
    assert safe_for_terminal("\x1b]0;title\x07[bold]\x9b2J\nnext") == "�]0;title�[bold]�2J\nnext"


def test_sessions_are_private_whole_or_not_at_all_and_unreadable_ones_are_left_alone(tmp_path: Path) -> None:
    sessions = SessionStore(tmp_path)
    session = sessions.create(tmp_path)
    sessions.save(session)
    assert sessions.list() == []  # nothing said, nothing kept
    session.entries.append(SessionEntry(kind="user", text="hello"))
    sessions.save(session)
    (file,) = (tmp_path / "sessions").glob("*.json")
    assert file.stat().st_mode & 0o777 == 0o600
    (tmp_path / "sessions" / "broken.json").write_text("{")
    assert [known.id for known in sessions.list(tmp_path)] == [session.id]
    assert sessions.load(session.id).entries == session.entries


@pytest.mark.slow
def test_it_runs_in_a_real_terminal(server: RunningServer, root: Path) -> None:
    tmux = shutil.which("tmux")
    if tmux is None:
        pytest.skip("tmux is not installed")
    socket = str(root.parent / "tmux")
    code = (
        "from pathlib import Path; from keystroke.clients.gateway_address import GatewayAddress; "
        "from keystroke.clients.tui.app import TerminalApp; "
        f"TerminalApp(GatewayAddress({server.url!r}), Path({str(root)!r}), "
        f"Path({str(root.parent / 'state')!r})).run()"
    )

    def ask(*words: str) -> str:
        done = subprocess.run([tmux, "-S", socket, *words], capture_output=True, text=True, check=False)
        return done.stdout

    size = ("-x", "100", "-y", "30")
    begin = (tmux, "-S", socket, "-f", "/dev/null", "new-session", "-d", *size, sys.executable, "-c", code)
    subprocess.run(begin, check=True)
    try:
        _wait(lambda: "Type a message" in ask("capture-pane", "-p"))
        ask("send-keys", "hello from tmux", "Enter")
        _wait(lambda: "You said: hello from tmux" in ask("capture-pane", "-p"))
        ask("send-keys", "C-q")
        _wait(lambda: "keystroke" not in ask("list-sessions", "-F", "keystroke"))
    finally:
        ask("kill-server")


def _wait(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_without_arguments_a_pipe_gets_help_and_a_terminal_the_interface(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from keystroke.clients import cli
    from keystroke.clients.cli import app

    ran: list[list[str]] = []

    class Recorded:
        def main(self, args: list[str], **_: Any) -> int:
            ran.append(args)
            return 0

    monkeypatch.setattr(app, "root_command", Recorded)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    cli._run([])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    cli._run([])
    assert ran == [[], ["tui"]]

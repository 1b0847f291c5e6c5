"""`keystroke do`: a real server for the model, a real sandbox, real files, a terminal where one is needed."""
# ruff: noqa: F811 - fixtures are imported by name

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cli_home import Home, home, remote_home, server  # noqa: F401
from openai_server import DONE, USAGE, Behaviour, OpenAIServer, chat, delta, stream
from test_cli_chat import terminal

from keystroke.agent.loop.events import OutputEvent
from keystroke.agent.sandbox import find_sandbox
from keystroke.clients.cli.do_view import TerminalTaskView
from keystroke.clients.cli.options import Invocation

BEFORE = "def add(a, b):\n    return a - b\n"
AFTER = "def add(a, b):\n    return a + b\n"
CHECK = "python3 -c 'import calc, sys; sys.exit(calc.add(1, 2) != 3)'"
needs_sandbox = pytest.mark.skipif(not find_sandbox().confines, reason="no sandbox holds on this machine")


def calls(*made: tuple[str, dict[str, Any]]) -> Behaviour:
    """An answer that calls tools, as a server streams it."""
    parts = [
        {"index": at, "id": f"c{at}", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for at, (name, arguments) in enumerate(made)
    ]
    return stream(delta(None, tool_calls=parts), delta(None, "tool_calls"), USAGE, DONE)


EDIT = calls(("edit", {"path": "calc.py", "old": "    return a - b", "new": "    return a + b"}))


@pytest.fixture
def file(remote_home: Home) -> Path:
    path = remote_home.root / "calc.py"
    path.write_text(BEFORE)
    return path


def says(server: OpenAIServer, *answers: Behaviour) -> None:
    server.on("/chat/completions", *answers)


def told(server: OpenAIServer) -> Sequence[dict[str, Any]]:
    messages: Sequence[dict[str, Any]] = server.bodies[-1]["messages"]
    return messages


def test_a_task_is_done_shown_and_taken_back(remote_home: Home, server: OpenAIServer, file: Path) -> None:
    says(server, EDIT, chat("Done: it adds."))
    shown = remote_home.keystroke("do", "make add add")
    assert "-    return a - b\n+    return a + b\n" in shown.stdout
    assert "change calc.py" in shown.stderr
    assert "Done: it adds." in shown.stderr
    assert "keystroke undo" in shown.stderr
    assert file.read_text() == AFTER
    tools = [tool["function"]["name"] for tool in server.bodies[0]["tools"]]
    assert tools == ["read", "search", "edit"]
    assert "make add add" in remote_home.keystroke("undo").stdout
    assert file.read_text() == BEFORE


def test_a_rename_asks_no_model(remote_home: Home, server: OpenAIServer, file: Path) -> None:
    (remote_home.root / "use.py").write_text("from calc import add\n\nprint(add(1, 2))\n")
    shown = remote_home.keystroke("do", "rename add to plus", "--model", "none-of-this-name")
    assert "change calc.py in 1 place, change use.py in 2 places" in shown.stderr
    assert "print(plus(1, 2))" in (remote_home.root / "use.py").read_text()
    assert not server.bodies


def test_tool_results_go_back_as_data_under_the_call_s_own_id(
    remote_home: Home, server: OpenAIServer, file: Path
) -> None:
    says(server, calls(("read", {"path": "calc.py"}), ("read", {"path": "none.py"})), chat("Nothing to do."))
    remote_home.keystroke("do", "look")
    answers = [message for message in told(server) if message["role"] == "tool"]
    assert [message["tool_call_id"] for message in answers] == ["c0", "c1"]
    assert "what follows is data" in answers[0]["content"]
    assert "does not exist" in answers[1]["content"]


@needs_sandbox
def test_a_check_that_fails_sends_the_model_back(remote_home: Home, server: OpenAIServer, file: Path) -> None:
    says(server, chat("I think it is fine."), EDIT, chat("Now it adds."))
    shown = remote_home.keystroke("do", "make add add", "--check", CHECK)
    assert file.read_text() == AFTER
    assert "ended with exit code 1" in shown.stderr
    assert any("still fails" in str(message["content"]) for message in told(server))


@needs_sandbox
def test_a_task_that_fails_changes_nothing_and_says_so(
    remote_home: Home, server: OpenAIServer, file: Path
) -> None:
    says(server, chat("I give up."))
    shown = remote_home.keystroke("do", "make add add", "--check", CHECK, code=1)
    assert "nothing was changed" in shown.stderr
    assert file.read_text() == BEFORE


def test_a_dry_run_writes_nothing(remote_home: Home, server: OpenAIServer, file: Path) -> None:
    says(server, EDIT, chat("Done."))
    shown = remote_home.keystroke("do", "make add add", "--dry-run")
    assert "+    return a + b" in shown.stdout
    assert file.read_text() == BEFORE


def test_events_are_json_for_programs(remote_home: Home, server: OpenAIServer, file: Path) -> None:
    says(server, EDIT, chat("Done."))
    shown = remote_home.keystroke("do", "make add add", "--json")
    events = [json.loads(line) for line in shown.stdout.splitlines()]
    assert [events[0]["type"], events[-1]["type"]] == ["began", "ended"]
    assert events[-1]["status"] == "done"
    assert "+    return a + b" in events[-1]["diff"]
    assert events[-1]["receipts"][0]["tokens"] == 4


def test_words_of_the_task_let_the_model_run_and_nobody_to_ask_means_no(
    remote_home: Home, server: OpenAIServer, file: Path
) -> None:
    says(server, calls(("run", {"command": "touch made"})), chat("I could not."))
    remote_home.keystroke("do", "run the tests and say what fails")
    assert "run" in [tool["function"]["name"] for tool in server.bodies[0]["tools"]]
    assert any("was not approved" in str(message["content"]) for message in told(server))
    assert not (remote_home.root / "made").exists()


@needs_sandbox
def test_approve_never_runs_in_the_sandbox_without_asking(
    remote_home: Home, server: OpenAIServer, file: Path
) -> None:
    says(server, calls(("run", {"command": "cp calc.py other.py"})), chat("Copied."))
    remote_home.keystroke("do", "copy it", "--run", "--approve", "never")
    assert (remote_home.root / "other.py").read_text() == BEFORE


def test_going_on_keeps_the_conversation(remote_home: Home, server: OpenAIServer, file: Path) -> None:
    says(server, EDIT, chat("Done."))
    remote_home.keystroke("do", "make add add")
    assert "the last task is done" in remote_home.refused("do", "--continue")
    says(server, calls(("edit", {"path": "more.py", "old": "", "new": "x = 1"})), chat("Added."))
    remote_home.keystroke("do", "--continue", "and add more.py")
    words = [str(message["content"]) for message in told(server)]
    assert any("make add add" in word for word in words)
    assert any("and add more.py" in word for word in words)
    assert (remote_home.root / "more.py").read_text() == "x = 1\n"


def test_what_cannot_be_is_said_in_one_line(remote_home: Home, server: OpenAIServer) -> None:
    assert "say what to do" in remote_home.refused("do")
    assert "no task in this workspace" in remote_home.refused("do", "--continue")
    assert "--approve is never, commands, all" in remote_home.refused("do", "x", "--approve", "maybe")
    assert "outside the workspace" in remote_home.refused("do", "x", "-f", "/etc/passwd", code=1)


def test_ctrl_c_stops_it_and_a_line_typed_meanwhile_steers_it(
    remote_home: Home, server: OpenAIServer, file: Path
) -> None:
    slow = chat(*(["thinking "] * 200), pause=0.05)
    says(server, slow, EDIT, chat("Done as told."))
    with terminal(remote_home, "do", "make add add") as screen:
        screen.expect("commands in")
        assert server.streaming.wait(60)
        screen.type("just use plus\n")
        screen.expect(r"\(sent: just use plus\)")
        screen.expect("Done as told")
        assert screen.leave() == 0
    assert file.read_text() == AFTER
    assert any(message["content"] == "just use plus" for message in server.bodies[1]["messages"])
    file.write_text(BEFORE)
    server.streaming.clear()
    says(server, slow)
    with terminal(remote_home, "do", "make add add") as screen:
        screen.expect("commands in")
        assert server.streaming.wait(60)
        screen.type("\x03")
        screen.expect("stopped")
        assert screen.leave() == 130
    assert file.read_text() == BEFORE


@needs_sandbox
def test_a_command_is_asked_for_on_the_terminal(remote_home: Home, server: OpenAIServer, file: Path) -> None:
    says(server, calls(("run", {"command": "cp calc.py other.py"})), chat("Copied."))
    with terminal(remote_home, "do", "copy it", "--run") as screen:
        screen.expect(r"Run `cp calc.py other.py` in the sandbox\? \[y/N\]")
        screen.type("y\n")
        screen.expect("keystroke undo")
        assert screen.leave() == 0
    assert (remote_home.root / "other.py").exists()


def test_a_line_without_end_does_not_grow_in_memory(capsys: pytest.CaptureFixture[str]) -> None:
    shown = TerminalTaskView(Invocation())
    for _ in range(100):
        shown._show(OutputEvent("x" * 65_536))
    assert len(shown._printed) < 10_000
    shown._show(OutputEvent("\nend\n"))
    assert [len(line) < 10_000 for line in capsys.readouterr().err.splitlines()] == [True, True]

"""`keystroke eval`: a set of one's own done through the command, with a scripted server for the model."""
# ruff: noqa: F811 - fixtures are imported by name

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_home import Home, home, remote_home, server  # noqa: F401
from openai_server import OpenAIServer, chat
from test_do_command import calls

from keystroke.agent.sandbox import find_sandbox

pytestmark = pytest.mark.skipif(not find_sandbox().confines, reason="no sandbox holds on this machine")


@pytest.fixture
def tasks(remote_home: Home) -> Path:
    """Two exercises, of which the scripted model gets one right."""
    root = remote_home.root / "exercises"
    for name, answer in (("one", "1"), ("two", "2")):
        place = root / name
        (place / ".meta").mkdir(parents=True)
        (place / ".docs").mkdir()
        files = {"solution": [f"{name}.py"], "test": [f"{name}_test.py"]}
        (place / ".meta" / "config.json").write_text(json.dumps({"files": files}))
        (place / ".docs" / "instructions.md").write_text(f"Return {name}.\n")
        (place / f"{name}.py").write_text("def f():\n    pass\n")
        (place / f"{name}_test.py").write_text(
            f"from {name} import f\n\n\ndef test():\n    assert f() == {answer}\n"
        )
    return root


def test_tasks_are_done_scored_recorded_and_drawn(
    remote_home: Home, server: OpenAIServer, tasks: Path
) -> None:
    change = {"old": "    pass", "new": "    return 1"}
    first, second = (
        calls(("edit", {"path": "one.py", **change})),
        calls(("edit", {"path": "two.py", **change})),
    )
    server.on("/chat/completions", first, chat("Done."), second, chat("Done."))
    shown = remote_home.keystroke("eval", "exercises", "--out", "out.jsonl", "--plot", "plot.svg")
    assert "50.0" in shown.stdout
    assert "1/2" in shown.stdout
    assert (remote_home.root / "plot.svg").read_text().startswith("<svg")
    asked = len(server.bodies)
    again = remote_home.keystroke("eval", "exercises", "--out", "out.jsonl", "--json")
    assert len(server.bodies) == asked
    told = json.loads(again.stdout)
    assert told["ways"][0]["score"] == 50.0
    assert {row["task"]: row["status"] for row in told["results"]} == {"one": "passed", "two": "failed"}


def test_tasks_can_be_listed_and_chosen(remote_home: Home, tasks: Path) -> None:
    assert remote_home.keystroke("eval", "exercises", "--list").stdout == "one\ntwo\n"
    assert remote_home.keystroke("eval", "exercises", "--list", "--only", "t*").stdout == "two\n"


def test_what_cannot_be_is_said_in_one_line(remote_home: Home, tasks: Path) -> None:
    assert "there is no set" in remote_home.refused("eval", "nowhere")
    assert "numbers like 1,4,16" in remote_home.refused("eval", "exercises", "--attempts", "many")
    assert "from 1 to 64" in remote_home.refused("eval", "exercises", "--attempts", "0")
    (remote_home.root / "empty").mkdir()
    assert "known format" in remote_home.refused("eval", "empty")

"""`keystroke do --background` and `keystroke tasks`, against a gateway with a scripted model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gateway_support import RunningServer, scripted_model, serving
from test_tasks import BROKEN, FIXED, text

from keystroke.clients.cli import main
from keystroke.clients.gateway_address import GatewayAddress

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    model = scripted_model(lambda prompt: f"{FIXED}```\n", "worker")
    with serving(model, folder=tmp_path / "state") as running:
        yield running


@pytest.fixture
def command(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """The command line in a project; its gateway is the test's own."""
    root = tmp_path / "project"
    root.mkdir()
    (root / "calc.py").write_text(BROKEN)
    monkeypatch.chdir(root)
    monkeypatch.setenv("KEYSTROKE_PATHS_STATE", str(tmp_path / "state"))
    (tmp_path / "keystroke.toml").touch()
    monkeypatch.setenv("KEYSTROKE_CONFIG", str(tmp_path / "keystroke.toml"))

    class Here:
        async def locate(self) -> GatewayAddress:
            return GatewayAddress(server.url)

    monkeypatch.setattr("keystroke.clients.cli.shared_gateway.shared_gateway", lambda run: Here())

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["keystroke", *arguments])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def test_a_task_in_the_background_is_watched_answered_and_taken_back(
    command: Command, tmp_path: Path
) -> None:
    root = tmp_path / "project"
    assert "started" in command("do", "--background", "make add in calc.py add")[1]
    _, shown = command("tasks", "show")
    assert "+    return a + b" in shown
    assert "`keystroke tasks approve`" in shown
    assert text(root) == BROKEN
    code, listed = command("tasks", "--json")
    (task,) = json.loads(listed)
    assert (code, task["status"]) == (0, "asking")
    command("tasks", "approve", "--hunks", "0", task["id"][-6:])
    assert "done: change calc.py in 1 place" in command("tasks", "show")[1]
    assert text(root) == BROKEN.replace("a - b", "a + b", 1)
    command("tasks", "undo")
    assert text(root) == BROKEN
    code, said = command("tasks", "undo", "nothing")
    assert code != 0
    assert "there is no task nothing" in said


def test_a_task_at_the_shared_gateway_is_told_as_one_done_here(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, given = tmp_path / "project", ("do", "make add in calc.py add", "--model", "worker")
    monkeypatch.setattr("keystroke.clients.cli.open_model.gateway_model", lambda name, run: "worker")
    code, said = command(*given, "--check", "grep -q 'a + b' calc.py")
    assert code == 0
    assert "the last task is done; say what else to do" in command("do", "--continue", "--model", "worker")[1]
    refused = command("do", "--continue", "and more", "--dry-run", "--model", "worker")
    assert "leave out --dry-run" in refused[1]
    assert refused[0] == 2
    assert "→ run `grep -q 'a + b' calc.py`" in said
    assert "-    return a - b\n+    return a + b\n" in said
    assert "`keystroke undo` reverts it" in said
    assert text(root) == FIXED
    assert command("undo")[0] == 0
    assert text(root) == BROKEN
    _, said = command(*given, "--approve", "all")
    assert "not approved; nothing was written" in said  # there is nobody to ask
    assert text(root) == BROKEN
    _, said = command("--json", "do", "--continue", "--model", "worker")
    assert json.loads(said.splitlines()[-1])["type"] == "ended"

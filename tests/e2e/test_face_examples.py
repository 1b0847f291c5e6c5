"""The examples of the faces run on a real server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "gateway"))

from gateway_support import scripted_model, serving

EXAMPLES = Path(__file__).parents[2] / "examples"


def ran(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_live_ghost_text_prints_one_line_a_key() -> None:
    with serving(scripted_model(lambda prompt: " second\n")) as server:
        lines = ran("live_ghost_text.py", server.url).splitlines()
    assert [line[:3] for line in lines] == ["' '", "'s'", "'e'", "'c'"]
    assert all("ms" in line for line in lines)


def test_an_editor_over_the_language_server_prints_one_line_a_key() -> None:
    with serving(scripted_model(lambda prompt: " second\n")) as server:
        lines = ran("lsp_ghost_text.py", server.url).splitlines()
    assert [line[:3] for line in lines] == ["' '", "'s'", "'e'", "'c'"]
    assert any("econd" in line for line in lines)


def test_a_followed_task_shows_its_change_and_makes_none(tmp_path: Path) -> None:
    root = tmp_path / "project"
    root.mkdir()
    (root / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    model = scripted_model(lambda prompt: "def add(a, b):\n    return a + b\n```\n")
    with serving(model, folder=tmp_path / "state") as server:
        told = ran("follow_task.py", str(root), "make add in calc.py add", server.url)
    assert "+    return a + b" in told
    assert "proposed" in told
    assert (root / "calc.py").read_text() == "def add(a, b):\n    return a - b\n"

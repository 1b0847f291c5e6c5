"""Every example runs as its first lines say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine" / "remote"))

from openai_server import running

from keystroke.config import load_settings
from keystroke.engine.library import ModelLibrary
from keystroke.engine.locate import shipped_model

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KEYSTROKE_")}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=250,
        env=environment,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture
def model() -> None:
    if shipped_model() is None and "smollm2" not in ModelLibrary(load_settings().paths.models).names():
        pytest.skip("no model is here; add one with `keystroke models add smollm2`")


@pytest.mark.model
def test_complete_file_prints_a_completion(model: None, tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return \n\n\nprint(1)\n")
    done = run("complete_file.py", str(file), "6")
    assert done.stdout.strip()
    assert "tokens" in done.stderr


@pytest.mark.model
def test_stream_chat_reuses_the_first_turn_in_the_second(model: None) -> None:
    if "smollm2" not in ModelLibrary(load_settings().paths.models).names():
        pytest.skip("smollm2 is not here; add it with `keystroke models add smollm2`")
    done = run("stream_chat.py", "What is a list?")
    reused = [int(line.split()[3]) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(reused) == 2
    assert reused[1] > 16


def test_remote_chat_streams_from_a_server_and_says_what_is_wrong() -> None:
    with running() as server:
        assert run("remote_chat.py", server.url, "test-model").stdout == "Hello world\n"
        url = server.url
    assert "cannot be reached" in run("remote_chat.py", url, "test-model", code=1).stderr


def test_there_is_a_test_for_every_example() -> None:
    here = Path(__file__)
    faces = here.parents[1] / "e2e" / "test_face_examples.py"
    tests = here.read_text(encoding="utf-8") + faces.read_text(encoding="utf-8")
    assert [file.name for file in EXAMPLES.glob("*.py") if f'"{file.name}"' not in tests] == []

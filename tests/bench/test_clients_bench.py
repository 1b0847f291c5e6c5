"""The benchmark of clients runs: the vendors' packages do a scripted task on a real server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench.client_rows.script import answer, offered

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_vendors_packages_do_a_scripted_task_end_to_end(tmp_path: Path) -> None:
    pytest.importorskip("anthropic")
    pytest.importorskip("ollama")
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- written by bench.clients -->\nold\n<!-- end -->\nafter\n")
    command = [sys.executable, "-m", "bench.clients", "--scripted", "--tasks", "1", "--write", str(page)]
    done = subprocess.run(
        [*command, "--clients", "openai", "anthropic", "ollama"],
        cwd=ROOT,
        env={**os.environ, "BENCH_RESULTS": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    for client in ("openai", "anthropic", "ollama"):
        assert figures[f"{client}_tasks_done"] == 1.0, done.stdout
        assert figures[f"{client}_turns"] == 3
        assert figures[f"{client}_connections"] == 1
        assert figures[f"{client}_reused"] > 0.5
    written = page.read_text()
    assert written.startswith("before\n")
    assert written.endswith("after\n")
    assert "| Ollama | 1 of 1 | 3 |" in written
    assert "old" not in written


def test_the_script_uses_the_tools_that_are_offered() -> None:
    parameters: dict[str, object] = {"new_string": {}, "old_string": {}, "file_path": {}}
    tool = {"name": "Edit", "parameters": {"properties": parameters}}
    asked = "In hello.py, print 'hello' instead of 'hi'."
    prompt = f"working directory: /work\n{json.dumps(tool)}\n[user]\n{asked}\n"
    assert list(offered(prompt)) == ["Edit"]
    call = json.loads(answer(prompt).removeprefix("<tool_call>").removesuffix("</tool_call>"))
    assert call["name"] == "Edit"
    assert call["arguments"]["file_path"] == "/work/hello.py"
    assert list(call["arguments"]) == list(parameters)
    assert answer(f"{prompt}[tool]\ndone") == "hello.py is done."
    assert answer("[user]\nsomething else") == "A small task"

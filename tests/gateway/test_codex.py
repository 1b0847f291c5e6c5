"""Codex CLI, the real one from npm, works through the gateway: over SSE, over WebSocket, and when stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import platformdirs
import pytest
from gateway_support import RunningServer, scripted_model, serving

from installed import program

VERSION = "0.166.0"
PATCH = "*** Begin Patch\n*** Update File: hello.py\n@@\n-print('hi')\n+print('hello')\n*** End Patch\n"


@pytest.fixture(scope="module")
def codex() -> Path:
    """The `codex` program, installed once for this machine."""
    npm = program("npm")
    if npm is None:
        pytest.skip("npm is not installed, so Codex CLI cannot be had")
    folder = platformdirs.user_cache_path("keystroke-tests", appauthor=False) / f"codex-{VERSION}"
    binary = folder / "node_modules" / ".bin" / "codex"
    if not binary.exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text("{}")
        command = [npm, "install", "--no-audit", "--no-fund", f"@openai/codex@{VERSION}"]
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=240, check=False
            )
        except subprocess.TimeoutExpired:
            pytest.skip("npm did not deliver Codex CLI within four minutes")
        if done.returncode != 0 or not binary.exists():
            pytest.skip(f"npm cannot be reached: {done.stderr.strip()[-200:]}")
    return binary


@pytest.fixture
def home() -> Iterator[Path]:
    """CODEX_HOME; Codex refuses to keep its helpers under /tmp."""
    folder = (
        platformdirs.user_cache_path("keystroke-tests", appauthor=False) / "codex-home" / uuid.uuid4().hex
    )
    folder.mkdir(parents=True)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def configure(home: Path, server: RunningServer, *, websockets: bool) -> None:
    catalog = home / "models.json"
    with urllib.request.urlopen(f"{server.url}/v1/models") as answer:
        catalog.write_bytes(answer.read())
    (home / "config.toml").write_text(
        f"""
model = "fast"
model_provider = "keystroke"
model_catalog_json = "{catalog}"
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
web_search = "disabled"

[analytics]
enabled = false

[features]
apps = false
plugins = false

[model_providers.keystroke]
name = "Keystroke"
base_url = "{server.url}/v1"
env_key = "KEYSTROKE_TEST_KEY"
wire_api = "responses"
supports_websockets = {"true" if websockets else "false"}
"""
    )


def start(codex: Path, home: Path, work: Path, prompt: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(codex), "exec", "--skip-git-repo-check", "--ephemeral", "--json", "-C", str(work), prompt],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "CODEX_HOME": str(home), "KEYSTROKE_TEST_KEY": "x"},
        start_new_session=True,
    )


def editing(prompt: str) -> str:
    if "[tool]" in prompt:
        return "The greeting is changed."
    return f"<tool_call>{json.dumps({'name': 'apply_patch', 'arguments': {'input': PATCH}})}</tool_call>"


@pytest.mark.parametrize("websockets", [False, True], ids=["sse", "websocket"])
def test_a_codex_turn_edits_a_file_through_apply_patch(
    codex: Path, home: Path, tmp_path: Path, websockets: bool
) -> None:
    (tmp_path / "hello.py").write_text("print('hi')\n")
    with serving(scripted_model(editing)) as server:
        sockets: list[Any] = []
        plain = server.gateway.sockets["/v1/responses"]

        async def counted(scope: Any, receive: Any, send: Any) -> None:
            sockets.append(scope)
            await plain(scope, receive, send)

        server.gateway.sockets["/v1/responses"] = counted
        configure(home, server, websockets=websockets)
        process = start(codex, home, tmp_path, "change the greeting")
        out, err = process.communicate(timeout=90)
        assert server.settled()
    events = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert process.returncode == 0, err
    assert (tmp_path / "hello.py").read_text() == "print('hello')\n"
    messages = [e["item"]["text"] for e in events if e.get("item", {}).get("type") == "agent_message"]
    assert messages == ["The greeting is changed."]
    assert [e["type"] for e in events][-1] == "turn.completed"
    assert len(sockets) == (1 if websockets else 0)


@pytest.mark.parametrize("websockets", [False, True], ids=["sse", "websocket"])
def test_interrupting_codex_stops_the_decode_and_frees_the_place(
    codex: Path, home: Path, tmp_path: Path, websockets: bool
) -> None:
    model = scripted_model(lambda _prompt: "x" * 100_000, step_cost=0.005)
    with serving(model) as server:
        engine = server.engines["echo"]
        configure(home, server, websockets=websockets)
        process = start(codex, home, tmp_path, "talk without end")
        deadline = time.monotonic() + 60
        while engine.steps < 30 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engine.steps >= 30, "codex never reached the server"
        os.killpg(process.pid, signal.SIGKILL if websockets else signal.SIGINT)
        process.communicate(timeout=60)
        assert server.settled(), "the answer went on after its reader was gone"
        steps = engine.steps
        time.sleep(0.1)
        assert engine.steps == steps

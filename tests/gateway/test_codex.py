"""Codex CLI, the real one from npm, works through the gateway: over SSE, over WebSocket, when stopped, and in
a session much longer than the model's context."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import platformdirs
import pytest
from gateway_support import RunningServer, last_user, scripted_model, serving

from installed import program
from keystroke.gateway.api.serializers import ResponseSerializer
from keystroke.protocol.response import Compacted, Response

VERSION = "0.169.0"
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


class CodexSession:
    """Codex as editors run it: one process, one thread, any number of turns."""

    def __init__(self, codex: Path, home: Path, work: Path) -> None:
        self._process = subprocess.Popen(
            [str(codex), "app-server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=work,
            env={**os.environ, "CODEX_HOME": str(home), "KEYSTROKE_TEST_KEY": "x"},
            start_new_session=True,
        )
        self._watchdog = threading.Timer(600, self._process.kill)  # then reading ends, and the test fails
        self._watchdog.start()
        self._call("initialize", clientInfo={"name": "test", "title": "test", "version": "1"})
        self._send({"method": "initialized", "params": {}})
        started = self._call("thread/start", model="fast", cwd=str(work), approvalPolicy="never")
        self._thread = started["thread"]["id"]

    def ask(self, text: str) -> str:
        """The answer to one turn."""
        given = [{"type": "text", "text": text}]
        self._send({"id": 1, "method": "turn/start", "params": {"threadId": self._thread, "input": given}})
        said = ""
        for event in self._events():
            item = event["params"].get("item", {}) if event.get("method") == "item/completed" else {}
            if item.get("type") == "agentMessage":
                said += item["text"]
            if event.get("method") == "turn/completed":
                assert event["params"]["turn"]["status"] == "completed", event
                return said
        raise AssertionError("Codex ended")

    def close(self) -> None:
        self._watchdog.cancel()
        self._process.kill()
        self._process.communicate()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _events(self) -> Iterator[dict[str, Any]]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            assert "error" not in event, event
            assert event.get("method") != "error", event
            yield event

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._send({"id": 0, "method": method, "params": params})
        reply = next(event for event in self._events() if event.get("id") == 0)
        result: dict[str, Any] = reply["result"]
        return result


def remembering(prompt: str) -> str:
    """A model that knows what its prompt contains, and nothing else."""
    found = re.search(r"the password of the build server is \w+", prompt)
    known = found[0] if found else "nothing is known"
    if "Write a summary" in last_user(prompt):
        return f"Facts: {known}."
    return known if "what is the password" in last_user(prompt) else f"Done. {'x' * 200}"


def test_sixty_codex_turns_over_a_context_of_8k_keep_what_the_first_one_said(
    codex: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    responses: list[Response] = []
    end = ResponseSerializer.on_end

    def listening(serializer: ResponseSerializer, outcome: Any) -> list[Any]:
        events = end(serializer, outcome)
        responses.append(serializer.response)
        return events

    monkeypatch.setattr(ResponseSerializer, "on_end", listening)
    model = scripted_model(remembering, context_length=8192)
    # A token of this model is a byte: it is shown the short instructions and tools of a small model.
    model.engine.info = replace(model.engine.info, parameters=1_500_000_000)
    with serving(model) as server:
        configure(home, server, websockets=True)
        session = CodexSession(codex, home, tmp_path)
        try:
            session.ask("Remember that the password of the build server is swordfish.")
            for turn in range(58):
                session.ask(f"Step {turn}: " + " ".join(f"change{turn}_{word}" for word in range(40)))
            last = session.ask("Now tell me: what is the password?")
        finally:
            session.close()
        assert server.settled()
    assert last == "the password of the build server is swordfish"
    assert [response.status for response in responses] == ["completed"] * 60
    made = [response.compacted for response in responses if isinstance(response.compacted, Compacted)]
    assert sum(one.reason == "context" for one in made) >= 5
    assert all(one.dropped_items > 0 for one in made)

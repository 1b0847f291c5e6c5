"""`keystroke serve`, `keys` and `usage` as a person runs them."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from bench.free_port import free_port
from websockets.sync.client import connect

from installed import lend_operators, program
from keystroke.clients.cli import main

PROGRAM = str(Path(sys.executable).with_name("keystroke"))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's world of one temporary folder, for this process and those it starts."""
    lend_operators(tmp_path / ".cache" / "keystroke")
    for name in [n for n in os.environ if n.startswith("KEYSTROKE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("KEYSTROKE_PATHS_STATE", str(tmp_path))
    monkeypatch.setenv("KEYSTROKE_SERVER_DRAIN_S", "0.5")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Command:
    """The command in this process: quick, and with the exit code a shell would see."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def __call__(self, *arguments: str, code: int = 0) -> Any:
        self._capture.readouterr()
        with pytest.raises(SystemExit) as left:
            main(list(arguments))
        seen = self._capture.readouterr()
        assert left.value.code == code, seen.err
        return seen


@pytest.fixture
def keystroke(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


@contextmanager
def served(*arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [PROGRAM, "--json", "serve", "--echo", "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate(timeout=60)[1]
    try:
        yield json.loads(line)["url"], process
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_an_answer_shows_up_in_usage_and_stopping_ends_streams_with_a_terminal_event(
    keystroke: Command,
) -> None:
    with served() as (url, process):
        answer = httpx.post(f"{url}/v1/responses", json={"input": "hello"}, timeout=60).json()
        assert answer["output"][0]["content"][0]["text"] == "You said: hello"
        taken = keystroke("serve", "--echo", "--port", url.rpartition(":")[2], code=2).err
        assert "cannot listen" in taken
        body = {"input": "word " * 2000, "stream": True}
        kinds: list[str] = []
        with httpx.stream("POST", f"{url}/v1/responses", json=body, timeout=60) as stream:
            for line in stream.iter_lines():
                if line.startswith("event: "):
                    kinds.append(line.removeprefix("event: "))
                    if kinds.count("response.output_text.delta") == 5:
                        process.send_signal(signal.SIGTERM)
        ends = ("response.completed", "response.failed", "response.cancelled", "response.incomplete")
        assert sum(kind in ends for kind in kinds) == 1
        assert process.wait(60) in (0, -signal.SIGTERM)
    (row,) = json.loads(keystroke("usage", "--json").out)
    assert (row["key"], row["model"], row["responses"]) == ("local", "echo", 2)
    assert row["output_tokens"] > answer["usage"]["output_tokens"]
    assert "first token" in keystroke("usage").out


def test_a_second_interrupt_ends_running_answers_at_once(
    keystroke: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEYSTROKE_SERVER_DRAIN_S", "3600")
    with served() as (url, process):
        assert process.stderr is not None
        kinds: list[str] = []
        said = ""
        body = {"input": "word " * 2000, "stream": True}
        with httpx.stream("POST", f"{url}/v1/responses", json=body, timeout=60) as stream:
            for line in stream.iter_lines():
                if line.startswith("event: "):
                    kinds.append(line.removeprefix("event: "))
                    if not said and kinds[-1] == "response.output_text.delta":
                        process.send_signal(signal.SIGINT)
                        said = process.stderr.readline()
                        process.send_signal(signal.SIGINT)
        assert "finishing 1 answer, 3600 s at most; Ctrl-C again" in said
        assert kinds[-1] == "response.failed"
        assert process.wait(60) == 130
        assert process.stderr.read() == ""


def test_keys_are_made_listed_and_revoked_and_a_running_server_notices(keystroke: Command) -> None:
    refused = keystroke("serve", "--echo", "--host", "0.0.0.0", "--port", "0", code=2).err
    assert "keystroke keys create" in refused
    token = keystroke("keys", "create", "bob").out.strip()
    assert token.startswith("ks_")
    with served("--host", "0.0.0.0") as (url, _):
        url = url.replace("0.0.0.0", "127.0.0.1") + "/v1/models"
        good = {"authorization": f"Bearer {token}"}
        assert httpx.get(url, timeout=60).status_code == 401
        assert httpx.get(url, headers=good, timeout=60).status_code == 200
        listed = keystroke("keys", "list").out
        assert "bob" in listed
        assert token not in listed
        keystroke("keys", "revoke", "bob")
        status = 200
        for _ in range(150):
            status = httpx.get(url, headers=good, timeout=60).status_code
            if status == 401:
                break
            time.sleep(0.1)
        assert status == 401
    assert "no live key called bob" in keystroke("keys", "revoke", "bob", code=2).err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--tls-key", "x.pem"), "both a certificate and its key"),
        (("--tls-key", "x.pem", "--tls-certificate", "y.pem"), "does not exist"),
        (("--port", "70000"), "server.port must be between"),
        (("--model", "no-such-model"), "no model called no-such-model"),
    ],
)
def test_options_that_cannot_work_are_one_sentence(
    keystroke: Command, arguments: tuple[str, ...], words: str
) -> None:
    said = keystroke("serve", *arguments, code=2).err
    assert words in said
    assert len(said.strip().splitlines()) == 1


def test_tls_answers_over_https_and_over_a_secure_socket_and_refuses_plain_text(home: Path) -> None:
    openssl = program("openssl", "version")
    if openssl is None:
        pytest.skip("openssl makes the certificate and is not installed")
    certificate, key = home / "certificate.pem", home / "key.pem"
    make = [
        openssl,
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "1",
    ]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*make, *names, *files], check=True, capture_output=True)
    trusted = ssl.create_default_context(cafile=str(certificate))
    with served("--tls-certificate", str(certificate), "--tls-key", str(key)) as (url, _):
        assert url.startswith("https://")
        answer = httpx.post(f"{url}/v1/responses", json={"input": "hello"}, verify=trusted, timeout=60).json()
        assert answer["output"][0]["content"][0]["text"] == "You said: hello"
        with connect(f"{url.replace('https', 'wss')}/v1/responses", ssl=trusted) as socket:
            socket.send(json.dumps({"type": "response.create", "input": "hello"}))
            assert json.loads(socket.recv(timeout=60))["type"] == "response.created"
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{url.replace('https', 'http')}/health", timeout=60)


def test_a_second_port_serves_the_same_models_to_clients_of_ollama(
    keystroke: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = free_port()
    monkeypatch.setenv("KEYSTROKE_SERVER_OLLAMA_PORT", str(second))
    with served() as (url, _process):
        for address in (url, f"http://127.0.0.1:{second}"):
            names = [model["name"] for model in httpx.get(f"{address}/api/tags", timeout=60).json()["models"]]
            assert "echo:latest" in names
        taken = keystroke("serve", "--echo", "--port", "0", code=2).err
        assert f"127.0.0.1:{second}" in taken
        assert "--ollama" in taken

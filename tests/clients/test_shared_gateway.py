"""Commands share one gateway: started on demand, the same text as without, gone when idle, lost and found
again."""
# ruff: noqa: F811 - fixtures are imported by name

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli_home import PROGRAM, Home, home  # noqa: F401
from tiny_model import write_tiny_model

from keystroke.agent.loop import TaskStore
from keystroke.clients.cli.fingerprint import checkout, fingerprint
from keystroke.clients.cli.options import Invocation
from keystroke.clients.cli.shared_gateway import serve_command
from keystroke.clients.gateway_address import GatewayAddress
from keystroke.clients.gateway_http import GatewayHttp, error_from_detail
from keystroke.clients.local_gateway import Announcement, process_exists, running_gateways
from keystroke.errors import KeystrokeError, NotFound, QueueFull
from keystroke.protocol.response import ErrorDetail

CODE = "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return \n"


def eventually(true: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def shared(home: Home, tmp_path: Path) -> Iterator[Home]:
    """A home with a tiny model that converses, whose commands share a gateway."""
    model = write_tiny_model(home.root / "tiny", context=32768)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))  # it ends when told to
    home.configure('[model]\ndefault = "tiny"\n[models.tiny]\npath = "tiny"\n')
    (home.root / "a.py").write_text(CODE)
    home.environment |= {"KEYSTROKE_SHARING_ENABLED": "1", "KEYSTROKE_SHARING_IDLE_S": "60"}
    try:
        yield home
    finally:
        for said in gateways(home):
            os.kill(said.pid, signal.SIGTERM)
        eventually(lambda: not gateways(home))


def gateways(home: Home) -> list[Announcement]:
    return running_gateways(home.root / "state")


def test_two_commands_use_one_gateway_and_say_what_a_model_loaded_here_says(shared: Home) -> None:
    commands: list[tuple[tuple[str, ...], str]] = [
        (("complete", "a.py:6", "--max-tokens", "12", "--all"), ""),
        (("complete", "a.py:6:7", "--lines", "1", "--context", "24", "--all"), ""),
        (("complete", "-", "--all"), "class Stack:\n    def push(self, item):\n        sel"),
        (("generate", "for i in <|im_end|> range(", "--max-tokens", "12", "--temperature", "1"), ""),
        (("chat", "--max-tokens", "12"), "Hello.\nAnd again.\n"),
    ]
    said = [shared.keystroke(*command, stdin=stdin).stdout for command, stdin in commands]
    (gateway,) = gateways(shared)
    here = [shared.keystroke(*command, "--local", stdin=stdin).stdout for command, stdin in commands]
    assert said == here
    assert gateways(shared) == [gateway]
    before = shared.keystroke("--local", "complete", "a.py:6", "--max-tokens", "12", "--all").stdout
    assert before == said[0]


def test_the_gateway_is_as_sure_of_a_completion_as_a_model_loaded_here(shared: Home) -> None:
    arguments = ("complete", "a.py:6:7", "--lines", "1", "--json")
    there, here = (json.loads(shared.keystroke(*more, *arguments).stdout) for more in ((), ("--local",)))
    assert there["completion"] == here["completion"] != ""
    # This model writes half characters, whose place in the text differs by a token.
    assert there["confidence"] == pytest.approx(here["confidence"], rel=0.2)


def test_reports_count_tokens_and_find_what_was_read_before(shared: Home) -> None:
    arguments = ("complete", "a.py:6", "--json", "--max-tokens", "12")
    first, second = (json.loads(shared.keystroke(*arguments).stdout) for _ in range(2))
    assert first["tokens"] > 0
    assert first["prompt_tokens"] == second["prompt_tokens"] > 20
    assert second["reused_tokens"] > 20
    assert first["completion"] == second["completion"]


def test_a_completion_says_how_long_it_took(shared: Home) -> None:
    told = [line for line in shared.keystroke("demo").stderr.splitlines() if "tokens in" in line]
    assert len(told) == 3
    for line in told:
        tokens, milliseconds, rate = map(int, re.findall(r"[\d]+", line))
        assert tokens > 0
        assert milliseconds > 0
        assert rate > 0


def test_doctor_says_what_is_loaded_where(shared: Home) -> None:
    assert json.loads(shared.keystroke("doctor", "--quick", "--json").stdout)["gateways"] == []
    assert "not running" in shared.keystroke("doctor", "--quick").stdout
    shared.keystroke("complete", "a.py:6")
    (found,) = json.loads(shared.keystroke("doctor", "--quick", "--json").stdout)["gateways"]
    (said,) = gateways(shared)
    assert (found["pid"], found["url"]) == (said.pid, said.url)
    (model,) = found["models"]
    assert (model["name"], model["state"], model["chat"]) == ("tiny", "loaded", True)
    assert f"process {said.pid}" in shared.keystroke("doctor", "--quick").stdout


def test_any_model_of_this_machine_can_be_asked_for_and_is_loaded_once(shared: Home, tmp_path: Path) -> None:
    other = write_tiny_model(shared.root / "other")
    for name in ("other", str(other), "./other"):
        assert shared.keystroke("generate", "def f(", "--model", name, "--max-tokens", "4").code == 0
    (said,) = gateways(shared)
    status = GatewayHttp(GatewayAddress(said.url, said.token)).status()
    assert sorted(m.name for m in status.models) == sorted(["tiny", str(other)])


def test_what_cannot_be_loaded_is_one_sentence_and_the_gateway_goes_on(shared: Home) -> None:
    shared.keystroke("generate", "x", "--max-tokens", "2")  # starting may take a while, and say so
    assert "there is no model called tinny; did you mean tiny?" in shared.refused(
        "generate", "x", "-m", "tinny"
    )
    broken = shared.root / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\xff" * 64)
    assert "broken.gguf" in shared.refused("generate", "x", "-m", "broken.gguf", code=1)
    (said,) = gateways(shared)
    shared.keystroke("generate", "x", "--max-tokens", "2")
    assert gateways(shared) == [said]


def test_other_settings_or_another_version_get_a_gateway_of_their_own(
    shared: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def name(**changes: object) -> str:
        run = Invocation(**changes)  # type: ignore[arg-type]
        return serve_command(run, (), linger=None, echo=False, project=True).name("as it is")

    for key, value in shared.environment.items():
        monkeypatch.setenv(key, value)
    monkeypatch.chdir(shared.root)
    plain = name()
    assert name() == plain
    assert name(flags={"sharing.idle_s": "5"}) == plain, "how long it lingers does not make it another"
    assert name(flags={"engine.threads": "1"}) != plain
    shared.configure("[engine]\nthreads = 1\n")
    assert name() != plain
    shared.configure('[model]\ndefault = "tiny"\n[models.tiny]\npath = "tiny"\n')
    assert name() == plain
    project = shared.root / "project"
    project.mkdir()
    (project / "keystroke.toml").write_text("[engine]\nthreads = 1\n")
    monkeypatch.chdir(project)
    assert name() == name(flags={"engine.threads": "1"}), "what a project says about engines counts"
    (project / "keystroke.toml").write_text("[assist]\naudit = false\n")
    assert name() == plain
    monkeypatch.setattr("keystroke.clients.cli.installed_version.release", lambda: "9.9.9")
    assert name() != plain


def test_after_an_upgrade_commands_get_a_gateway_of_their_own_and_the_one_of_before_stays(
    shared: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("generate", "x", "--max-tokens", "2")
    shared.keystroke(*command)
    (before,) = gateways(shared)
    with monkeypatch.context() as patch:
        patch.setattr("keystroke.clients.cli.fingerprint.fingerprint", lambda: "another state")
        shared.keystroke(*command)
        told = json.loads(shared.keystroke("doctor", "--quick", "--json").stdout)["gateways"]
        assert [found["current"] for found in told] == [False, False]
    both = gateways(shared)
    assert len(both) == 2
    assert before in both
    shared.keystroke(*command)
    assert gateways(shared) == both, "what was there before is found again"


def test_a_gateway_runs_the_program_of_whoever_started_it_and_says_so(shared: Home) -> None:
    if checkout() is None:
        pytest.skip("an installed program is found where its Python finds it")
    another = shared.root / "elsewhere" / "keystroke" / "__init__.py"
    another.parent.mkdir(parents=True)
    another.write_text("raise RuntimeError('another checkout')\n")
    shared.environment["PYTHONPATH"] = str(another.parents[1])
    shared.keystroke("generate", "x", "--max-tokens", "2")
    (said,) = gateways(shared)
    assert said.program == fingerprint()


def test_a_language_the_model_has_not_learned_is_refused_the_same_way_through_the_gateway(
    shared: Home,
) -> None:
    (shared.root / "tiny" / "keystroke.json").write_text(json.dumps({"languages": ["python"]}))
    (shared.root / "a.go").write_text("package main\n\nfunc f() {\n")
    refused = [
        shared.keystroke("complete", "a.go:3", *where, code=1).stderr.splitlines()[-1]
        for where in ((), ("--local",))
    ]
    assert refused[0] == refused[1]
    assert "tiny was trained on Python, not on go" in refused[0]
    assert shared.keystroke("complete", "a.py:6", "--max-tokens", "4").code == 0


def test_a_gateway_that_was_killed_is_started_again_and_nobody_notices(shared: Home) -> None:
    first = shared.keystroke("complete", "a.py:6", "--max-tokens", "12", "--all").stdout
    (said,) = gateways(shared)
    os.kill(said.pid, signal.SIGKILL)
    assert shared.keystroke("complete", "a.py:6", "--max-tokens", "12", "--all").stdout == first
    (other,) = gateways(shared)
    assert other.pid != said.pid


def test_a_gateway_that_dies_in_the_middle_of_an_answer_is_one_sentence(shared: Home) -> None:
    shared.keystroke("generate", "x", "--max-tokens", "2")
    (said,) = gateways(shared)
    command = [PROGRAM, "generate", "x", "--max-tokens", "30000", "--temperature", "1"]
    with subprocess.Popen(
        command,
        env=shared.environment,
        cwd=shared.root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(8)
        os.kill(said.pid, signal.SIGKILL)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 1
    (line,) = told.decode().splitlines()
    assert line.startswith("keystroke: The gateway ")
    assert line.endswith("run the command again.")


def test_an_interrupt_ends_the_answer_and_not_the_gateway(shared: Home) -> None:
    shared.keystroke("generate", "x", "--max-tokens", "2")
    (said,) = gateways(shared)
    command = [PROGRAM, "generate", "x", "--max-tokens", "30000", "--temperature", "1"]
    with subprocess.Popen(
        command, env=shared.environment, cwd=shared.root, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(8)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    assert (process.returncode, told) == (130, b"")
    http = GatewayHttp(GatewayAddress(said.url, said.token))
    eventually(lambda: not any(m.running or m.waiting for m in http.status().models))
    assert gateways(shared) == [said]


def test_a_task_that_is_stopped_while_its_gateway_starts_can_be_continued(shared: Home) -> None:
    command = [PROGRAM, "do", "make f in a.py return 2"]
    (shared.root / "a.py").write_text("def f():\n    return 1\n")
    with subprocess.Popen(
        command, env=shared.environment, cwd=shared.root, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        eventually(lambda: any((shared.root / "state").glob("tasks/*/*.json")))
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    known = TaskStore(shared.root / "state", shared.root).latest()
    assert known.instruction == "make f in a.py return 2"
    assert known.given["model"] == "tiny"


def test_a_gateway_nobody_asks_ends_and_takes_its_announcement_with_it(shared: Home) -> None:
    shared.environment["KEYSTROKE_SHARING_IDLE_S"] = "0"
    shared.keystroke("generate", "x", "--max-tokens", "2")
    eventually(lambda: not gateways(shared))
    folder = shared.root / "state" / "gateways"
    eventually(lambda: not list(folder.glob("*.json")))


def test_where_no_gateway_can_start_the_model_is_loaded_here(shared: Home) -> None:
    state = shared.root / "state"
    state.write_text("in the way")
    done = shared.keystroke("generate", "x", "--max-tokens", "2", code=None)
    assert "the model is loaded here instead" in done.stderr
    assert done.code == 0
    assert done.stdout.strip("\n")
    state.unlink()


def test_commands_that_come_together_start_one_gateway(shared: Home) -> None:
    command = [PROGRAM, "complete", "a.py:6", "--max-tokens", "4"]
    together = [
        subprocess.Popen(command, env=shared.environment, cwd=shared.root, stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    said = {process.communicate(timeout=120)[0] for process in together}
    assert len(said) == 1
    assert len(gateways(shared)) == 1


def test_an_edit_through_the_gateway_is_the_edit_made_here(shared: Home) -> None:
    answers = []
    for where in ((), ("--local",)):
        done = shared.keystroke(
            "--set",
            "generation.max_tokens=24",
            "edit",
            "a.py",
            "-m",
            "rename add",
            "--json",
            *where,
            code=None,
        )
        answers.append((done.code, done.stdout))
    assert answers[0] == answers[1]


def test_a_refusal_keeps_its_kind_over_the_wire() -> None:
    assert type(error_from_detail(ErrorDetail("x", "not_found", "There is none."), 404)) is NotFound
    full = error_from_detail(ErrorDetail("x", "queue_full", "Full."), 429)
    assert isinstance(full, QueueFull)
    assert type(error_from_detail(ErrorDetail("x", "something_new", "New."), 400)) is KeystrokeError


def test_a_process_that_is_gone_is_not_alive() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert not process_exists(ended.pid)
    assert process_exists(os.getpid())

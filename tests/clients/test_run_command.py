"""`keystroke run`: the command is as ever, byte for byte and signal for signal; a failure gets its diagnosis."""
# ruff: noqa: F811 - fixtures are imported by name
# ruff: noqa: E501 - programs are one line

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_home import PROGRAM, Home, home, remote_home, server  # noqa: F401
from openai_server import OpenAIServer, chat
from test_cli_chat import terminal

from keystroke.clients.cli.command_runner import run_captured
from keystroke.errors import NotFound

PYTHON = sys.executable


def run(home: Home, *command: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [PROGRAM, "run", *options, "--", *command],
        cwd=home.root,
        env=home.environment,
        capture_output=True,
        input=b"typed\n",
        timeout=100,
        check=False,
    )


def test_output_and_exit_code_are_the_commands_own(home: Home) -> None:
    code = (
        "import sys; sys.stdout.buffer.write(bytes(range(256)) * 3000); sys.stderr.write('err' + sys.stdin.read());"
        "sys.exit(7)"
    )
    done = run(home, PYTHON, "-c", code)
    assert done.stdout == bytes(range(256)) * 3000
    assert done.stderr == b"errtyped\n"
    assert done.returncode == 7


def test_a_command_ended_by_a_signal_ends_us_by_the_same(home: Home) -> None:
    for number in (signal.SIGTERM, signal.SIGSEGV):
        done = run(home, PYTHON, "-c", f"import os; os.kill(os.getpid(), {int(number)})")
        assert done.returncode == -number


def test_signals_sent_to_us_reach_the_command(home: Home) -> None:
    code = (
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(41))\n"
        "print('ready', flush=True)\ntime.sleep(60)"
    )
    child = subprocess.Popen(
        [PROGRAM, "run", "--", PYTHON, "-c", code],
        cwd=home.root,
        env=home.environment,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == 41


def test_on_a_terminal_the_command_has_a_terminal_and_hears_its_keys(home: Home) -> None:
    code = "import os, sys; print(sys.stdin.isatty(), sys.stdout.isatty(), os.get_terminal_size().columns > 0); print(input('name? ')[::-1]); sys.exit(3)"
    with terminal(home, "run", "--", PYTHON, "-c", code) as screen:
        screen.expect("True True")
        screen.expect(r"name\? ")
        screen.type("abc\n")
        screen.expect("cba")
        assert screen.leave() == 3


def test_ctrl_c_on_a_terminal_reaches_the_command_alone(home: Home) -> None:
    code = "import time\ntry:\n    print('ready', flush=True)\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    print('caught', flush=True)\n    raise SystemExit(5)"
    with terminal(home, "run", "--", PYTHON, "-c", code) as screen:
        screen.expect("ready")
        screen.type("\x03")
        screen.expect("caught")
        assert screen.leave() == 5


def test_a_traceback_gets_its_place_and_a_fix_and_nothing_is_written(home: Home) -> None:
    text = "def f():\n    return lenn([1])\n\n\nf()\n"
    (home.root / "app.py").write_text(text)
    done = run(home, PYTHON, "app.py")
    assert done.returncode == 1
    said = done.stderr.decode().partition("\nkeystroke: ")[2]
    assert said.startswith("app.py:2: NameError: name 'lenn' is not defined")
    assert "1. Change to `len`" in said
    assert (home.root / "app.py").read_text() == text


def test_json_goes_to_standard_error_as_one_line(home: Home) -> None:
    (home.root / "app.py").write_text("print('out')\nprint(lenn([1]))\n")
    done = run(home, PYTHON, "app.py", options=("--json",))
    assert done.stdout == b"out\n"
    record = json.loads(done.stderr.decode().splitlines()[-1])
    assert (record["kind"], record["path"], record["line"]) == ("NameError", "app.py", 2)
    assert record["fixes"][0]["edits"] == [{"start": 19, "end": 23, "text": "len"}]
    assert record["fixes"][0]["checked"] == "check"


def test_a_fix_that_only_parses_is_not_called_proved(home: Home) -> None:
    (home.root / "app.py").write_text("d = {'name': 1}\nprint(d['nmae'])\n")
    said = run(home, PYTHON, "app.py").stderr.decode()
    assert "(app.py; parses, not run)" in said
    assert "proved" not in said


def test_one_key_applies_a_fix_and_undo_takes_it_back(home: Home) -> None:
    text = "print(lenn([1]))\n"
    (home.root / "app.py").write_text(text)
    with terminal(home, "run", "--", PYTHON, "app.py") as screen:
        screen.expect(r"\+print\(len\(\[1\]\)\)")  # the diff comes before the question
        screen.expect("apply 1")
        screen.type("1")
        screen.expect("applied")
        assert screen.leave() == 1
    assert (home.root / "app.py").read_text() == "print(len([1]))\n"
    home.keystroke("undo")
    assert (home.root / "app.py").read_text() == text


def test_verify_keeps_a_fix_that_helps(home: Home) -> None:
    (home.root / "app.py").write_text("print(lenn([1]))\n")
    done = run(home, PYTHON, "app.py", options=("--fix", "--verify"))
    assert b"now succeeds" in done.stderr
    assert (home.root / "app.py").read_text() == "print(len([1]))\n"


def test_verify_takes_back_a_fix_that_does_not_help_and_tries_the_next(home: Home) -> None:
    (home.root / "app.py").write_text("d = {'name': 1}\nd.clear()\nprint(d['nmae'])\n")
    done = run(home, PYTHON, "app.py", options=("--fix", "--verify"))
    assert b"Change the key to 'name': the command fails as before, so the fix was undone" in done.stderr
    assert b"verified: the command now succeeds" in done.stderr
    assert (home.root / "app.py").read_text() == "d = {'name': 1}\nd.clear()\nprint(d.get('nmae'))\n"
    assert home.keystroke("undo", "--list").stdout.count("\n") == 1


@pytest.mark.parametrize(
    "ending", ["raise SystemExit(1)", "import time; time.sleep(300)"], ids=["fails", "hangs"]
)
def test_verify_leaves_the_file_as_it_was_if_nothing_helps(home: Home, ending: str) -> None:
    text = "print(lenn([1]))\n"
    (home.root / "app.py").write_text(text)
    again = (
        "import os, sys\nseen = os.path.exists('ran')\nopen('ran', 'w').close()\n"
        "sys.stderr.write('Traceback (most recent call last):\\n  File \"app.py\", line 1, in <module>\\n'"
        "\"NameError: name 'lenn' is not defined\\n\")\n"
        f"if not seen: raise SystemExit(1)\n{ending}\n"
    )
    (home.root / "stubborn.py").write_text(again)
    done = run(home, PYTHON, "stubborn.py", options=("--fix", "--verify", "--verify-seconds", "3"))
    assert b"so the fix was undone" in done.stderr
    assert done.returncode == 1
    assert (home.root / "app.py").read_text() == text
    assert "nothing to undo" in home.refused("undo")


def test_a_model_is_asked_only_where_no_rule_helps(remote_home: Home, server: OpenAIServer) -> None:
    server.on("/chat/completions", chat("```\nn = 1\nprint(1 / n)\n```\n"))
    (remote_home.root / "app.py").write_text("n = 0\nprint(1 / n)\n")
    done = run(remote_home, PYTHON, "app.py", options=("--fix", "--verify"))
    assert b"now succeeds" in done.stderr
    assert (remote_home.root / "app.py").read_text() == "n = 1\nprint(1 / n)\n"
    assert "ZeroDivisionError" in server.bodies[-1]["messages"][-1]["content"]
    asked = len(server.bodies)
    (remote_home.root / "app.py").write_text("print(lenn([1]))\n")
    run(remote_home, PYTHON, "app.py")
    assert len(server.bodies) == asked


def test_a_model_that_changes_only_the_layout_has_fixed_nothing(
    remote_home: Home, server: OpenAIServer
) -> None:
    server.on("/chat/completions", chat("```\nn = 0  # zero\nprint(1 / n)\n```\n"))
    (remote_home.root / "app.py").write_text("n = 0\n\nprint(1 / n)\n")
    done = run(remote_home, PYTHON, "app.py", options=("--fix",))
    assert b"no fix was found for this failure" in done.stderr
    assert (remote_home.root / "app.py").read_text() == "n = 0\n\nprint(1 / n)\n"


def test_without_a_model_it_says_how_to_configure_one(home: Home) -> None:
    (home.root / "app.py").write_text("print(1 / 0)\n")
    done = run(home, PYTHON, "app.py")
    assert b"keystroke models add coder" in done.stderr


def test_files_outside_the_workspace_are_not_read(home: Home, tmp_path: Path) -> None:
    outside = tmp_path / "outside.py"
    outside.write_text("print(lenn([1]))\n")
    done = run(home, PYTHON, str(outside), options=("--fix",))
    assert b"keystroke:" not in done.stderr
    assert outside.read_text() == "print(lenn([1]))\n"


def test_what_cannot_be_run_is_one_sentence(home: Home) -> None:
    assert "no command 'nosuch'" in home.refused("run", "--", "nosuch")
    assert "give the command" in home.refused("run")
    (home.root / "plain.txt").write_text("x")
    assert "not executable" in home.refused("run", "--", "./plain.txt")


def alive(pid: int) -> bool:
    """Whether a process still runs: not gone, and not dead and waiting for its parent to notice."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_check_is_ended_with_its_children_when_its_time_is_over(tmp_path: Path) -> None:
    ended = run_captured("sleep 600 & echo $!; wait", tmp_path, 0.5)
    assert ended.timed_out
    pid = int(ended.output.split()[0])
    deadline = time.monotonic() + 60  # a killed process takes a moment to die; alone it sleeps ten minutes
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(pid)
    with pytest.raises(NotFound):
        run_captured(["nosuch-command"], tmp_path, 1)


def test_fix_that_finds_nothing_says_so(home: Home) -> None:
    done = run(home, PYTHON, "-c", "print('fine')", options=("--fix",))
    assert b"there was nothing to fix" in done.stderr
    done = run(home, "sh", "-c", "echo odd; exit 3", options=("--fix",))
    assert b"ended with 3" in done.stderr
    assert b"nothing was changed" in done.stderr
    assert done.returncode == 3
    (home.root / "stop.py").write_text("raise SystemError('no rule knows this')\n")
    done = run(home, PYTHON, "stop.py", options=("--fix",))
    assert b"no fix was found for this failure; nothing was changed" in done.stderr
    assert b"fix" not in run(home, PYTHON, "-c", "print('fine')").stderr

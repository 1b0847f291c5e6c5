"""`keystroke run` while its command still runs: failures are told at once, and nobody is disturbed by it."""
# ruff: noqa: F811 - fixtures are imported by name

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import pytest
from cli_home import PROGRAM, Home, home  # noqa: F401
from test_cli_chat import terminal

PYTHON = sys.executable
FAILING = """import logging
import sys


def handle(n):
    return lenn(str(n))


def fail(n):
    try:
        handle(n)
    except Exception:
        logging.exception("request %d", n)


"""


@contextmanager
def started(home: Home, text: str, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    (home.root / "app.py").write_text(FAILING + text)
    child = subprocess.Popen(
        [PROGRAM, "run", *options, "--", PYTHON, "app.py"],
        cwd=home.root,
        env=home.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def until(stream: IO[bytes], words: bytes) -> bytes:
    """What a stream says up to the line that holds some words."""
    said = b""
    for line in stream:
        said += line
        if words in line:
            return said
    raise AssertionError(f"{words!r} was never said, but {said!r}")


def test_a_failure_is_told_while_the_command_goes_on(home: Home) -> None:
    with started(home, "fail(1)\nfail(2)\nprint(input())\n") as child:
        assert child.stderr is not None
        said = until(child.stderr, b"1. Change to `len`")
        assert b"keystroke: app.py:6: NameError: name 'lenn' is not defined" in said
        assert child.poll() is None
        out, err = child.communicate(b"go on\n", timeout=60)
        assert (out, child.returncode) == (b"go on\n", 0)
        assert b"keystroke:" not in err  # the same place failed twice, and is told once


def test_each_failure_is_a_line_of_json_as_it_comes(home: Home) -> None:
    with started(home, "fail(1)\ninput()\nint('x')\n", "--json") as child:
        assert child.stderr is not None
        first = json.loads(until(child.stderr, b'"kind"').splitlines()[-1])
        assert (first["kind"], first["path"], first["line"]) == ("NameError", "app.py", 6)
        _, err = child.communicate(b"\n", timeout=60)
    last = json.loads(err.splitlines()[-1])
    assert (last["kind"], last["line"], last["fixes"]) == ("ValueError", 18, [])


def test_a_fix_for_a_text_that_was_edited_meanwhile_is_not_applied(home: Home) -> None:
    with started(home, "fail(1)\ninput()\n", "--fix") as child:
        assert child.stderr is not None
        until(child.stderr, b"1. Change to `len`")
        edited = (home.root / "app.py").read_text() + "# edited\n"
        (home.root / "app.py").write_text(edited)
        child.communicate(b"\n", timeout=60)
    assert (home.root / "app.py").read_text() == edited


def test_a_prompt_is_shown_again_below_what_was_told(home: Home) -> None:
    (home.root / "app.py").write_text(FAILING + "fail(1)\nprint(input('name? ')[::-1])\n")
    with terminal(home, "run", "--", PYTHON, "app.py") as screen:
        screen.expect(r"name\? ")
        screen.expect("keystroke: app.py:6: NameError")
        screen.expect(r"name\? ")
        screen.type("abc\n")
        screen.expect("cba")
        screen.expect("apply 1, or n")
        screen.type("n")
        assert screen.leave() == 0


def test_a_program_that_fills_the_screen_is_not_written_over(home: Home) -> None:
    whole = "sys.stdout.write('\\x1b[?1049h'); sys.stdout.flush()\nfail(1)\nprint('shown', flush=True)\n"
    (home.root / "app.py").write_text(FAILING + whole + "input()\nprint('\\x1b[?1049lleft', flush=True)\n")
    with terminal(home, "run", "--", PYTHON, "app.py") as screen:
        screen.expect("shown")
        with pytest.raises(AssertionError):
            screen.expect("keystroke:", seconds=2)
        screen.type("\n")
        screen.expect("left")
        screen.expect("keystroke: app.py:6: NameError")
        screen.expect("apply 1, or n")
        screen.type("n")
        assert screen.leave() == 0


def test_input_from_a_pipe_and_a_terminal_for_the_output_go_together(home: Home) -> None:
    code = "import sys; print(sys.stdin.isatty(), sys.stdout.isatty(), sys.stderr.isatty(), sys.stdin.read())"
    main, side = pty.openpty()
    child = subprocess.Popen(
        [PROGRAM, "run", "--", PYTHON, "-c", code],
        cwd=home.root,
        env=home.environment,
        stdin=subprocess.PIPE,
        stdout=side,
        stderr=side,
    )
    os.close(side)
    child.communicate(b"from a pipe", timeout=60)
    shown = os.read(main, 4096)
    os.close(main)
    assert shown == b"False True True from a pipe\r\n"
    assert child.returncode == 0


def test_a_reader_that_goes_away_ends_the_command_as_ever(home: Home) -> None:
    code = "while True: print('y' * 1000)"
    child = subprocess.Popen(
        [PROGRAM, "run", "--", PYTHON, "-c", code],
        cwd=home.root,
        env=home.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stdout.readline().startswith(b"yyy")
    child.stdout.close()
    assert child.wait(60) != 0
    assert child.stderr is not None
    assert b"BrokenPipeError" in child.stderr.read()


def test_what_a_command_leaves_running_does_not_hold_us(home: Home) -> None:
    done = subprocess.run(
        [PROGRAM, "run", "--", "sh", "-c", "sleep 300 & echo $!; exit 4"],
        cwd=home.root,
        env=home.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        timeout=100,
        check=False,
    )
    os.kill(int(done.stdout), 15)
    assert done.returncode == 4

"""What is printed where: plain lines without a terminal, nothing with --quiet, sizes for people."""
# ruff: noqa: F811 - fixtures are imported by name

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_home import PROGRAM, Home, home  # noqa: F401

from keystroke.clients.cli.console import (
    Console,
    ProgressText,
    format_duration,
    format_size,
    print_error,
)
from keystroke.clients.local_gateway import startup_progress


def test_progress_without_a_terminal_is_sparse_plain_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 1.0, 6.0, 7.0, 12.0])
    monkeypatch.setattr("keystroke.clients.cli.console.time.monotonic", lambda: next(clock))
    with Console().progress() as progress:
        for done in (10, 20, 30, 40):
            progress("convert", done, 40)
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "convert: 50 %, about 10 s\nconvert: 100 %\n")


def test_waiting_without_measure_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 1.0, 6.0, 12.0, 18.0, 24.0])
    monkeypatch.setattr("keystroke.clients.cli.console.time.monotonic", lambda: next(clock))
    with Console().progress() as progress:
        for done in (0, 0, 0, 0, 100):
            progress("compiling", done, 100)
    assert capsys.readouterr().err == "compiling …\ncompiling: 100 %\n"


def test_the_log_of_a_starting_gateway_tells_its_client_each_stage_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "gateway.log"
    assert startup_progress(log) == ("starting the gateway", 0, 0)
    with Console(quiet=True).progress(log=True) as progress:
        progress("compiling", 0, 1)
        progress("compiling", 0, 1)
        progress("laying out m", 30_000_000, 40_000_000)
    log.write_text(capsys.readouterr().err)
    assert log.read_text() == "compiling: 0 %\nlaying out m: 75 %\n"
    assert startup_progress(log) == ("laying out m", 75, 100)


def test_reading_is_said_once_in_tokens_with_the_time_it_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 0.5, 2.5, 4.5, 20.0])
    monkeypatch.setattr("keystroke.clients.cli.console.time.monotonic", lambda: next(clock))
    with Console().progress() as progress:
        for done in (1000, 1240, 1500, 3000):
            progress("reading the prompt", done, 3800)
    assert capsys.readouterr().err == "reading 1,240 of 3,800 tokens, about 21 s\n"


def test_downloads_show_megabytes_and_their_speed() -> None:
    text = ProgressText()
    assert text.describe("add coder", 0, 1_117_320_768, 0.0) == "add coder: 0 B of 1.1 GB"
    shown = text.describe("add coder", 250_000_000, 1_117_320_768, 10.0)
    assert shown == "add coder: 250 MB of 1.1 GB, 25.0 MB/s, about 35 s"
    assert text.describe("starting the gateway", 0, 0, 0.0) == "starting the gateway …"


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "1 s"), (89, "89 s"), (120, "2 min"), (7200, "2.0 h")])
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_quiet_prints_results_and_errors_only(capsys: pytest.CaptureFixture[str]) -> None:
    quiet = Console(quiet=True)
    with quiet.progress() as progress:
        progress("convert", 1, 2)
    quiet.note("a remark")
    quiet.line("a result")
    print_error("an error\nin two lines")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("a result\n", "keystroke: an error in two lines\n")


def test_a_table_lines_up_and_its_last_column_is_free(capsys: pytest.CaptureFixture[str]) -> None:
    Console().table(("name", "where"), [("a", "here"), ("longer", "there")])
    assert capsys.readouterr().out == "name    where\na       here\nlonger  there\n"


def test_on_a_terminal_the_last_column_is_wrapped_below_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    link = f"https://{'x' * 90}"
    Console().table(("name", "what"), [("first", "word " * 20), ("b", link)])
    ten = " ".join(["word"] * 10)
    assert capsys.readouterr().out.splitlines() == [
        "name   what",
        f"first  {ten}",
        f"       {ten}",
        f"b      {link}",
    ]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 KB"), (98_362_432, "98.4 MB"), (3e12, "3.0 TB")],
)
def test_sizes_are_for_people(count: float, text: str) -> None:
    assert format_size(count) == text


def test_hints_can_be_typed_as_they_stand_where_the_program_is_not_on_the_path(home: Home) -> None:
    """As after `make run`: the program lies in .venv/bin and nowhere on the PATH."""
    place = home.root / ".venv" / "bin"
    place.mkdir(parents=True)
    (place / "keystroke").symlink_to(PROGRAM)

    environment = {**home.environment, "PATH": "/usr/bin:/bin"}

    def hint(*command: str) -> str:
        asked = [*command, "config", "show", "no.such"]
        said = subprocess.run(
            asked, cwd=home.root, env=environment, capture_output=True, text=True, check=False
        ).stderr
        return str(re.findall("`(.+?)`", said)[-1])

    typed = hint(".venv/bin/keystroke")
    assert typed == ".venv/bin/keystroke config show"
    assert subprocess.run(
        typed.split(), cwd=home.root, env=environment, capture_output=True, check=True
    ).stdout
    module = hint(sys.executable, "-m", "keystroke")
    assert module == f"{Path(sys.executable).name} -m keystroke config show"

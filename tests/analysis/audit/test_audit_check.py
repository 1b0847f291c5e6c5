"""`audit --fix --check`: only fixes remain after which the project's own checks still pass."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from keystroke.clients.cli.audit import audit
from keystroke.clients.cli.audit_check import project_checks

TEXT = """import os
def show(name: str):
    os.system(f"ls '{name}'")
def drop(name: str):
    os.system(f"rm '{name}'")
"""


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(audit)
    return CliRunner().invoke(app, list(arguments))


def python(code: str) -> str:
    return shlex.join([sys.executable, "-c", code])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "setup.cfg").write_text("")
    path = tmp_path / "a.py"
    path.write_text(TEXT)
    return path


def test_fixes_after_which_the_check_passes_are_written(file: Path) -> None:
    result = run(str(file), "--fix", "--check", python("import ast; ast.parse(open('a.py').read())"))
    assert file.read_text().count("shlex.quote(name)") == 2
    assert "2 fixed; the check passes" in result.stderr


def test_a_fix_that_breaks_the_check_is_left_out_and_the_others_stay(file: Path) -> None:
    check = python("assert \"rm '{name}'\" in open('a.py').read()")
    result = run(str(file), "--fix", "--check", check)
    text = file.read_text()
    assert 'os.system(f"ls {shlex.quote(name)}")' in text
    assert "rm '{name}'" in text
    assert "a.py:5: python-command-injection was not fixed" in result.stderr


def test_a_check_that_fails_before_judges_nothing(file: Path) -> None:
    result = run(str(file), "--fix", "--check", python("raise SystemExit(3)"))
    assert result.exit_code != 0
    assert "fails before any fix" in str(result.exception)
    assert file.read_text() == TEXT


def test_the_files_are_restored_if_a_check_cannot_go_on(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from keystroke.clients.cli import audit_check
    from keystroke.clients.cli.command_runner import CommandResult

    runs: list[str] = []

    def interrupted(command: str, cwd: Path, seconds: float) -> CommandResult:
        runs.append(command)
        if len(runs) > 1:
            raise KeyboardInterrupt
        return CommandResult(0, "")

    monkeypatch.setattr(audit_check, "run_captured", interrupted)
    run(str(file), "--fix", "--check", "x")
    assert len(runs) == 2
    assert file.read_text() == TEXT


def test_a_check_belongs_to_fix(file: Path) -> None:
    result = run(str(file), "--check", "true")
    assert "--fix" in str(result.exception)


def test_auto_finds_the_checks_of_the_project(tmp_path: Path) -> None:
    assert project_checks(tmp_path) == []
    for name in ("mypy", "pytest"):
        (tmp_path / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
        (tmp_path / ".venv" / "bin" / name).write_text("")
    (tmp_path / "pyproject.toml").write_text('[tool.mypy]\nfiles = ["a.py"]\n')
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text("")
    (tmp_path / "node_modules" / ".bin").mkdir(parents=True)
    (tmp_path / "node_modules" / ".bin" / "tsc").write_text("")
    (tmp_path / "tsconfig.json").write_text("{}")
    (tmp_path / "gradlew").write_text("")
    assert [Path(command[0]).name for command in project_checks(tmp_path)] == [
        "mypy",
        "pytest",
        "tsc",
        "gradlew",
    ]


def test_auto_without_any_check_says_so(file: Path) -> None:
    result = run(str(file), "--fix", "--check", "auto")
    assert "--check CMD" in str(result.exception)
    assert file.read_text() == TEXT

"""Test runners that are loaded ahead give what the command itself gives, each in a sandbox of its own."""

from __future__ import annotations

import importlib.util
import shlex
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from workspaces import Project

from keystroke.agent.sandbox import (
    CommandLimits,
    ExitReason,
    SandboxPolicy,
    StandbyCommand,
    find_sandbox,
)
from keystroke.agent.tools import Runner
from keystroke.agent.tools.warm_tests import PytestCommand
from keystroke.agent.workspace import Overlay
from keystroke.engine.base import Interrupt

SANDBOX = find_sandbox()
pytestmark = pytest.mark.skipif(not SANDBOX.confines, reason="no sandbox holds on this machine")

CHECK = "tools/python -m pytest -q -p no:cacheprovider"
HOW = "import sys\nfrom calc import add\n\ndef test_add():\n    assert (sys.orig_argv[2], add(1, 2)) == 0\n"
ECHO = "import sys; print('before', flush=True); print('got', sys.stdin.readline().strip(), flush=True)"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """With a Python that finds pytest alone: the many plugins of this environment take seconds to load."""
    project = Project(tmp_path)
    library = project.root / "tools/lib"
    library.mkdir(parents=True)
    for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py"):
        found = importlib.util.find_spec(name)
        assert found is not None
        assert found.origin is not None
        place = Path(found.origin)
        place = place.parent if found.submodule_search_locations else place
        (library / place.name).symlink_to(place)
    alone = f'#!/bin/sh\nPYTHONPATH=$PWD/tools/lib exec {shlex.quote(sys.executable)} -S "$@"\n'
    project.write("tools/python", alone)
    (project.root / "tools/python").chmod(0o755)
    return project


@pytest.fixture
def overlay(project: Project) -> Overlay:
    return project.overlay()


@pytest.fixture
def runner(project: Project, overlay: Overlay) -> Iterator[Runner]:
    runner = project.runner(SANDBOX, overlay)
    yield runner
    runner.close()


def standby(folder: Path, code: str, seconds: float = 60.0) -> StandbyCommand:
    policy = SandboxPolicy(folder)
    return StandbyCommand(SANDBOX, [sys.executable, "-I", "-c", code], policy, CommandLimits(seconds=seconds))


def test_the_second_check_runs_in_a_loaded_runner_and_sees_the_files_of_its_own_time(
    project: Project, overlay: Overlay, runner: Runner
) -> None:
    project.write("test_calc.py", HOW)
    assert "('-m', -1)" in runner.run_check(CHECK).output  # nothing was loaded yet
    overlay.write("calc.py", "def add(a, b):\n    return a + b\n")
    second = runner.run_check(CHECK)
    assert "('-c', 3)" in second.output
    assert second.code == 1
    overlay.write("test_calc.py", "def test_nothing():\n    pass\n")
    third = runner.run_check(CHECK)
    assert third.ok
    assert "1 passed" in third.output


def test_a_runner_can_be_loaded_before_the_first_check(project: Project, runner: Runner) -> None:
    project.write("test_calc.py", HOW)
    runner.prepare_check(CHECK)
    runner.prepare_check("true")
    assert "('-c', -1)" in runner.run_check(CHECK).output


def test_a_plugin_of_the_workspace_is_never_loaded_ahead(
    project: Project, overlay: Overlay, runner: Runner
) -> None:
    """Its code may change before the runner is used."""
    about = "tools/lib/project_plugin-1.0.dist-info"
    project.write(f"{about}/METADATA", "Metadata-Version: 2.1\nName: project-plugin\nVersion: 1.0\n")
    project.write(f"{about}/entry_points.txt", "[pytest11]\nproject = project_plugin\n")
    plugin = (
        "open('loaded', 'w').close()\n\n\n"
        "def pytest_terminal_summary(terminalreporter):\n    terminalreporter.write_line('plugin {}')\n"
    )
    project.write("tools/lib/project_plugin.py", plugin.format("old"))
    runner.prepare_check(CHECK)
    loaded = project.folder / "copies/copy0/loaded"
    deadline = time.monotonic() + 120
    while not loaded.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    overlay.write("tools/lib/project_plugin.py", plugin.format("new"))
    assert "plugin new" in runner.run_check(CHECK).output


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("python -m pytest", ()),
        ("python3.12 -m pytest -q tests/test_a.py", ("-q", "tests/test_a.py")),
        (".venv/bin/python -m pytest 'a.py::t[x y]'", ("a.py::t[x y]",)),
        ("python -m pytest --tb=short", ("--tb=short",)),
        ("python -m pytest && true", None),
        ("python -m pytest $ARGS", None),
        ("X=1 python -m pytest", None),
        ("python -m unittest", None),
        ("python -X dev -m pytest", None),
        ("make test", None),
        ("python -m pytest 'a", None),
        ("", None),
    ],
)
def test_only_plain_commands_of_pytest_are_loaded_ahead(
    tmp_path: Path, line: str, arguments: tuple[str, ...] | None
) -> None:
    command = PytestCommand.parse(line, tmp_path)
    assert (command and command.arguments) == arguments


def test_the_program_pytest_is_run_by_the_interpreter_it_names(tmp_path: Path) -> None:
    script = tmp_path / "bin/pytest"
    script.parent.mkdir()
    script.write_text("#!/opt/x/python3\nimport pytest\n")
    assert PytestCommand.parse("bin/pytest -q", tmp_path) == PytestCommand(
        "/opt/x/python3", str(script), ("-q",)
    )
    script.write_text("#!/bin/sh\n")
    assert PytestCommand.parse("bin/pytest -q", tmp_path) is None


def test_a_standby_command_waits_for_its_line(tmp_path: Path) -> None:
    seen: list[str] = []
    done = standby(tmp_path, ECHO).resume("here", None, seen.append)
    assert done is not None
    assert done.output == "before\ngot here\n"
    assert "got here\n" in "".join(seen)


def test_the_time_of_a_standby_command_counts_from_its_line(tmp_path: Path) -> None:
    waiting = standby(tmp_path, ECHO, 0.01)
    threading.Event().wait(0.2)
    done = waiting.resume("here", seconds=60)
    assert done is not None
    assert done.exit_reason is ExitReason.EXITED
    assert "got here" in done.output
    late = standby(tmp_path, f"{ECHO}; import time; time.sleep(600)").resume("here", seconds=0.3)
    assert late is not None
    assert late.exit_reason is ExitReason.TIMEOUT


def test_a_standby_command_that_ended_before_its_line_says_so(tmp_path: Path) -> None:
    one = standby(tmp_path, "pass")
    one.ended.result()
    assert one.resume("here") is None
    other = standby(tmp_path, "import time; time.sleep(0.2)")  # ends with the line unread
    assert other.resume("here") is None


def test_an_interrupt_ends_a_standby_command_and_close_ends_a_waiting_one(tmp_path: Path) -> None:
    interrupt = Interrupt()
    threading.Timer(0.2, interrupt.set).start()
    done = standby(tmp_path, f"{ECHO}; import time; time.sleep(600)").resume("here", interrupt)
    assert done is not None
    assert done.exit_reason is ExitReason.INTERRUPTED
    waiting = standby(tmp_path, ECHO)
    waiting.close()
    waiting.close()
    assert waiting.ended.done()

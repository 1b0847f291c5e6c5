"""An edit whose process is killed at any step: all files or none, once the next command has looked."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keystroke.assist.edit import EditPlan, Journal, Workspace, plan_patch

PATCH = """*** Begin Patch
*** Add File: new/n.py
+x = 0
*** Delete File: b.py
*** Update File: a.py
@@
-one
+uno
*** Update File: c.py
@@
-three
+tre
*** End Patch"""
STEPS = ("open", "replace", "fsync", "unlink", "close", "mkdir", "chmod")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "work"
    root.mkdir()
    for name, text in (("a.py", "one\r\ntwo"), ("b.py", "gone\n"), ("c.py", "\ufeffthree\n")):
        (root / name).write_text(text, encoding="utf-8", newline="")
    return root


def files(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def killed_at(step: int, work: Callable[[], object]) -> bool:
    """Do the work in a process that kills itself before its nth call of the system. Whether it did."""
    child = os.fork()
    if child == 0:
        count = 0

        def counted(plain: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **named: Any) -> Any:
                nonlocal count
                if count == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                count += 1
                return plain(*arguments, **named)

            return call

        try:
            for name in STEPS:
                setattr(os, name, counted(getattr(os, name)))
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_an_edit_killed_at_any_step_is_whole_or_taken_back(root: Path, tmp_path: Path) -> None:
    before = files(root)
    workspace = Workspace(root)
    probe = plan_patch(workspace, PATCH)
    probe.apply()
    after = files(root)
    outcomes = set()
    for step in range(500):
        restore(root, before)
        journal = Journal(tmp_path / f"state{step}", workspace)
        if not killed_at(step, lambda: plan_patch(workspace, PATCH).apply(journal)):  # noqa: B023
            break
        said = journal.recover()
        now = files(root)
        assert now in (before, after), f"step {step}: {sorted(now)}"
        outcomes.add((now == after, bool(said)))
        assert journal.recover() == []
        if now == after:
            journal.undo()
            assert files(root) == before
        else:
            assert list(journal.entries()) == []
    else:
        raise AssertionError("the edit never ended")
    # Some were stopped before, some in the middle, some after the last file was replaced.
    assert outcomes == {(False, False), (False, True), (True, False)}


def test_an_undo_killed_at_any_step_can_be_repeated(root: Path, tmp_path: Path) -> None:
    before = files(root)
    workspace = Workspace(root)
    for step in range(500):
        restore(root, before)
        journal = Journal(tmp_path / f"state{step}", workspace)
        plan_patch(workspace, PATCH).apply(journal)
        if not killed_at(step, journal.undo):
            break
        for entry in list(journal.entries()):
            journal.revert(entry)
        left = {name: data for name, data in files(root).items() if not name.endswith(".keystroke")}
        assert left == before, step
    else:
        raise AssertionError("the undo never ended")


def test_an_edit_under_way_in_another_process_is_left_alone(root: Path, tmp_path: Path) -> None:
    workspace = Workspace(root)
    journal = Journal(tmp_path / "state", workspace)
    plan = plan_patch(workspace, PATCH)
    with journal.recording("under way", plan._inverse_changes()):
        half_done(plan)
        now = files(root)
        assert Journal(tmp_path / "state", workspace).recover() == []
        assert files(root) == now


def test_an_interrupted_edit_of_a_file_that_was_changed_since_is_said_once_and_not_touched(
    root: Path, tmp_path: Path
) -> None:
    workspace = Workspace(root)
    journal = Journal(tmp_path / "state", workspace)

    def die() -> None:
        plan = plan_patch(workspace, PATCH)
        with journal.recording("cut short", plan._inverse_changes()):
            half_done(plan)
            os.kill(os.getpid(), signal.SIGKILL)

    assert killed_at(10_000, die)
    (root / "a.py").write_text("mine now")
    now = files(root)
    (sentence,) = journal.recover()
    assert "cannot be taken back: a.py was changed" in sentence
    assert files(root) == now
    assert journal.recover() == []


def half_done(plan: EditPlan) -> None:
    """Write some of a plan's files."""
    plan.workspace.write([write for write in plan._writes if write.path == "c.py"])


def restore(root: Path, content: dict[str, bytes]) -> None:
    for name in files(root):
        (root / name).unlink()
    for name, data in content.items():
        (root / name).write_bytes(data)

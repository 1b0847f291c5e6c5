"""The folder of a task's copies: gone with its task, also with one that was killed; a full disk is one
sentence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from keystroke.agent.workspace.scratch import PREFIX, remove, remove_abandoned, task_folder

_HOLDS = """
import sys
from pathlib import Path
from keystroke.agent.workspace.scratch import task_folder
with task_folder(Path(sys.argv[1])) as folder:
    (folder / "copy0").mkdir()
    (folder / "copy0" / "file").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(place: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process with a task's folder."""
    command = [sys.executable, "-c", _HOLDS, str(place)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def wait_for_removal() -> None:
    for thread in threading.enumerate():
        if thread.name == "remove-abandoned":
            thread.join()


def test_what_a_killed_task_left_goes_at_the_next_start_and_a_running_one_keeps_its_own(
    tmp_path: Path,
) -> None:
    strangers = tmp_path / f"{PREFIX}stranger"  # nobody's lock: not ours to judge
    strangers.mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to(strangers)
    with holder(tmp_path) as (_, alive), holder(tmp_path) as (killed, left):
        assert (left / "copy0" / "file").exists()
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert left.exists()
        with task_folder(tmp_path) as mine:
            wait_for_removal()
            assert not left.exists()
            assert {mine, alive, strangers} < set(tmp_path.iterdir())
            assert remove_abandoned(tmp_path) == []  # mine is held too
        assert not mine.exists()
        assert (alive / "copy0" / "file").exists()
    assert strangers.exists()


def test_a_removal_that_was_cut_short_goes_on_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holder(tmp_path) as (killed, left):
        killed.send_signal(signal.SIGKILL)
        killed.wait()

        def ends(*arguments: object, **options: object) -> None:
            raise SystemExit  # the process ends here

        with monkeypatch.context() as patch:
            patch.setattr(os, "rmdir", ends)
            with pytest.raises(SystemExit):
                remove_abandoned(tmp_path)
        assert not (left / "copy0" / "file").exists()
        assert remove_abandoned(tmp_path) == [left]
    assert not left.exists()


def test_removing_a_folder_changes_nothing_behind_its_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("mine")
    outside.chmod(0o640)
    inside = tmp_path / "folder" / "link"
    inside.parent.mkdir()
    inside.symlink_to(outside)
    (tmp_path / "kept").mkdir()
    (tmp_path / "folder" / "to-a-folder").symlink_to(tmp_path / "kept")
    remove(inside.parent)
    assert not inside.parent.exists()
    assert outside.stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "kept").is_dir()


def test_a_nest_of_folders_deeper_than_any_path_is_removed(tmp_path: Path) -> None:
    top = tmp_path / "folder"
    top.mkdir()
    here = os.open(top, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("a-folder-in-a-folder", dir_fd=here)
        below = os.open("a-folder-in-a-folder", os.O_RDONLY, dir_fd=here)
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=below))
        os.fchmod(here, 0o500)
        os.close(here)
        here = below
    os.close(here)
    remove(top)
    assert not top.exists()


def test_removing_what_is_not_there_is_no_error(tmp_path: Path) -> None:
    remove(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    remove(tmp_path / "file")
    assert (tmp_path / "file").exists()


# ── a disk that is really full ────────────────────────────────────────────────────────────────

_FULL = r'''
import os, sys
from dataclasses import replace
from pathlib import Path

from test_task import CHECK, FIXED, Desk, call, in_turn, scripted
from keystroke.agent.loop import EndStatus, TaskStore
from keystroke.assist.edit import Journal
from keystroke.errors import InputError

small, large = Path(sys.argv[1]), Path(sys.argv[2])  # a file system of one megabyte, and one with room


def fill() -> Path:
    """Take all that is left."""
    ballast = small / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass
    return ballast


def refused(task, words, records=None):
    try:
        task.run(words, records)
    except InputError as error:
        assert "No space left on device" in str(error), error
        return str(error)
    raise AssertionError("a full disk was not told")


long = call("edit", path="more.py", old="", new="x = 1\n" * 200)

# The copies have no room: the workspace is larger than the disk they go to.
(large / "a").mkdir()
desk = Desk(large / "a")
(desk.project.root / "data.bin").write_bytes(os.urandom(3 << 20))
task = desk.task(scripted(in_turn(call("run", command="true"), "Done."), small=False), check=CHECK)
task._files = replace(task._files, scratch=small)
before = {p: p.read_bytes() for p in desk.project.root.rglob("*") if p.is_file()}
print(refused(task, "fix add"))
assert before == {p: p.read_bytes() for p in desk.project.root.rglob("*") if p.is_file()}
assert list(small.iterdir()) == [], "what was copied so far is gone"
assert desk.records.latest().status == "failed"

# The workspace has no room for the change, the records have: nothing lands, and it lands once there is room.
desk = Desk(small)
desk.records = TaskStore(large / "state", desk.project.root)
desk.project.journal = Journal(large / "journal", desk.project.workspace)
task = desk.task(scripted(in_turn(long, "Done."), small=False))
task._files = replace(task._files, scratch=large)
ballast = fill()
before = desk.project.tree()
print(refused(task, "add more.py"))
assert desk.project.tree() == before
ballast.unlink()
again = desk.task(scripted(lambda prompt: "Done.", small=False))
again._files = replace(again._files, scratch=large)
assert again.run("", desk.records.latest()).status is EndStatus.DONE
assert desk.project.tree()["more.py"] == "x = 1\n" * 200

# Everything on one full disk: a sentence, and the workspace is as it was.
(small / "project" / "more.py").unlink()
desk = Desk.__new__(Desk)
for path in small.iterdir():
    os.system(f"rm -rf '{path}'")
desk.__init__(small)
task = desk.task(scripted(in_turn(long, "Done."), small=False))
ballast = fill()
before = desk.project.tree()
print(refused(task, "add more.py"))
assert desk.project.tree() == before
print("held")
'''


def test_on_a_full_disk_a_task_says_so_and_changes_nothing(tmp_path: Path) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    small.mkdir()
    large.mkdir()
    mount = f"mount -t tmpfs -o size=1m tmpfs '{small}'"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here (needs unshare and user namespaces)")
    script = f'{mount} && exec "$0" -c "$1" "{small}" "{large}"'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, sys.executable, _FULL],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "held"

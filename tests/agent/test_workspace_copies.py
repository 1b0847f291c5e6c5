"""What a task changes stays in memory and in its copy until it lands as one edit."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from workspaces import EXCLUDE, Project

from keystroke.agent.sandbox import CommandLimits, Sandbox, SandboxKind, find_sandbox, is_effective
from keystroke.agent.tools import Runner
from keystroke.agent.workspace import Overlay, Replica, replica, replicas
from keystroke.agent.workspace.layered import LayeredReplica
from keystroke.agent.workspace.scratch import remove
from keystroke.assist.edit import Workspace
from keystroke.assist.edit.operations import Replacement, SearchReplace
from keystroke.errors import Forbidden, InputError

CHANGE = Replacement("calc.py", (SearchReplace(("    return a - b",), ("    return a + b",)),))


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


HOLDING = [kind for kind in SandboxKind if kind is not SandboxKind.NONE and is_effective(Sandbox(kind))]
LAYERED = [f"{kind} with layers" for kind in HOLDING if kind.can_mount]


@pytest.fixture(params=["found", "none", *LAYERED])
def sandbox(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    """Commands run in a plain copy, or, as in a large workspace, in layers."""
    if request.param in LAYERED:
        monkeypatch.setattr(replicas, "LAYERED_FILES", 0)
        return Sandbox(SandboxKind(request.param.split()[0]))
    return find_sandbox() if request.param == "found" else Sandbox(SandboxKind.NONE)


@pytest.fixture(params=["found", "none"])
def copying(request: pytest.FixtureRequest) -> Sandbox:
    """Commands run in a plain copy."""
    return find_sandbox() if request.param == "found" else Sandbox(SandboxKind.NONE)


def test_nothing_is_written_before_the_task_lands(project: Project) -> None:
    before = project.tree()
    overlay = project.overlay()
    overlay.resolve([CHANGE])
    overlay.write("new/file.py", "x = 1\n")
    overlay.write("notes/plan.txt", None)
    assert project.tree() == before
    assert overlay.read("calc.py") == "def add(a, b):\n    return a + b\n"
    assert overlay.read("notes/plan.txt") is None
    assert overlay.files() == [".env", "calc.py", "new/file.py", "test_calc.py"]


def test_a_whole_task_lands_as_one_edit_and_one_undo_takes_it_back(project: Project) -> None:
    before = project.tree()
    overlay = project.overlay()
    overlay.resolve([CHANGE])
    overlay.write("new/file.py", "x = 1\n")
    overlay.write("notes/plan.txt", None)
    overlay.plan("a task").apply(project.journal)
    assert project.tree() == {
        ".env": "TOKEN=hush\n",
        "calc.py": "def add(a, b):\n    return a + b\n",
        "new/file.py": "x = 1\n",
        "test_calc.py": before["test_calc.py"],
    }
    assert project.journal.undo().instruction == "a task"
    assert project.tree() == before


def test_a_file_changed_meanwhile_keeps_the_task_from_landing(project: Project) -> None:
    overlay = project.overlay()
    overlay.resolve([CHANGE])
    overlay.write("notes/plan.txt", "other\n")
    project.write("calc.py", "mine\n")
    before = project.tree()
    with pytest.raises(InputError, match="changed on disk"):
        overlay.plan("a task").apply(project.journal)
    assert project.tree() == before


def test_forks_do_not_see_each_other(project: Project) -> None:
    one = project.overlay()
    one.write("calc.py", "one\n")
    two = one.fork()
    two.write("calc.py", "two\n")
    assert (one.read("calc.py"), two.read("calc.py")) == ("one\n", "two\n")


def test_a_change_taken_back_by_hand_is_no_change(project: Project) -> None:
    overlay = project.overlay()
    text = overlay.read("calc.py")
    overlay.write("calc.py", "other\n")
    overlay.write("calc.py", text)
    assert not overlay.texts


@pytest.mark.parametrize(
    "path", ["../outside.py", "/etc/passwd", "link/x.py", ".env", ".git/config", "a\\b", "~/x", ""]
)
def test_paths_that_may_not_be_touched_are_refused(project: Project, path: str) -> None:
    (project.root / "link").symlink_to(project.folder)
    overlay = project.overlay()
    with pytest.raises(Forbidden):
        overlay.read(path)
    with pytest.raises(Forbidden):
        overlay.write(path, "x")


def test_a_file_named_by_a_link_inside_is_one_file(project: Project) -> None:
    (project.root / "alias").symlink_to(project.root / "notes")
    overlay = project.overlay()
    overlay.write("alias/plan.txt", "changed\n")
    assert overlay.read("notes/plan.txt") == "changed\n"
    assert list(overlay.texts) == ["notes/plan.txt"]


def test_a_record_brings_an_overlay_back(project: Project) -> None:
    overlay = project.overlay()
    overlay.resolve([CHANGE])
    overlay.write("new.py", "x\n")
    again = Overlay.restore(project.workspace, overlay.snapshot())
    assert again.texts == overlay.texts
    project.write("calc.py", "mine\n")
    with pytest.raises(InputError, match="changed since the task stopped"):
        Overlay.restore(project.workspace, overlay.snapshot())


# ── copies on disk ────────────────────────────────────────────────────────────────────────────


def run(runner: Runner, script: str) -> str:
    return runner.run_check(script).output


def test_a_command_sees_the_task_s_changes_under_the_user_s_path(project: Project, sandbox: Sandbox) -> None:
    overlay = project.overlay()
    overlay.resolve([CHANGE])
    runner = project.runner(sandbox, overlay)
    assert "a + b" in run(runner, "cat calc.py")
    if sandbox.kind.can_mount:
        assert run(runner, "pwd") == f"{project.root}\n"
    assert "a - b" in (project.root / "calc.py").read_text()


def test_a_check_changes_nothing_and_the_next_one_starts_afresh(project: Project, sandbox: Sandbox) -> None:
    before = project.tree()
    overlay = project.overlay()
    runner = project.runner(sandbox, overlay)
    run(runner, "rm -rf calc.py notes; echo spoilt > test_calc.py; mkdir -p calc.py/deep; touch litter")
    assert project.tree() == before
    assert not overlay.texts
    assert run(runner, "cat calc.py notes/plan.txt; ls") == (
        "def add(a, b):\n    return a - b\nfirst\nsecond\ncalc.py\nnotes\ntest_calc.py\n"
    )


def test_a_command_that_deletes_the_workspace_deletes_a_copy_and_undo_brings_all_back(
    project: Project, sandbox: Sandbox
) -> None:
    before = project.tree()
    overlay = project.overlay()
    runner = project.runner(sandbox, overlay)
    runner.run("find . -mindepth 1 -delete")
    assert project.tree() == before
    overlay.plan("a task").apply(project.journal)
    assert project.tree() == {".env": "TOKEN=hush\n"}
    project.journal.undo()
    assert project.tree() == before


def test_a_folder_replaced_by_a_link_out_is_not_written_through(project: Project, sandbox: Sandbox) -> None:
    outside = project.folder / "outside"
    outside.mkdir()
    overlay = project.overlay()
    overlay.write("notes/plan.txt", "mine\n")
    runner = project.runner(sandbox, overlay)
    run(runner, f"rm -rf notes; ln -s {outside} notes")
    assert run(runner, "cat notes/plan.txt") == "mine\n"
    assert not list(outside.iterdir())


def test_secrets_are_neither_copied_nor_seen(project: Project, sandbox: Sandbox) -> None:
    runner = project.runner(sandbox, project.overlay())
    told = run(runner, f"cat .env; cat {project.root}/.env; ls -a")
    if sandbox.confines:
        assert "hush" not in told
    assert ".env\n" not in told.replace("/.env", "")


def test_what_a_model_s_command_made_joins_the_task_and_litter_does_not(
    project: Project, sandbox: Sandbox
) -> None:
    subprocess.run(["git", "init", "-q", str(project.root)], check=True)
    project.write(".gitignore", "*.log\n")
    overlay = project.overlay()
    runner = project.runner(sandbox, overlay)
    runner.run(
        "sh -c 'echo made > made.txt; echo x > run.log; mkdir __pycache__; echo x > __pycache__/a.pyc'"
    )
    assert dict(overlay.texts) == {"made.txt": "made\n"}
    assert overlay.text_after_command("made.txt", "not changed") == "made\n"
    assert overlay.text_after_command("calc.py", "not changed") == "not changed"


def test_the_repository_and_installed_packages_cannot_be_written(project: Project) -> None:
    sandbox = find_sandbox()
    if not sandbox.confines:
        pytest.skip("no sandbox holds on this machine")
    subprocess.run(["git", "init", "-q", str(project.root)], check=True)
    project.write(".venv/lib/tool.py", "there\n")
    runner = project.runner(sandbox, project.overlay())
    told = run(
        runner, "git status --short | head -1; cat .venv/lib/tool.py; echo x > .git/hooks/post-checkout"
    )
    assert "?? " in told
    assert "there" in told
    run(runner, "rm -rf .git .venv")
    assert not (project.root / ".git" / "hooks" / "post-checkout").exists()
    assert (project.root / ".venv" / "lib" / "tool.py").exists()


def test_a_workspace_too_large_to_copy_says_what_to_do(
    project: Project, copying: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "MOST_FILES", 2)
    runner = project.runner(copying, project.overlay())
    with pytest.raises(InputError, match="run this in the folder that the task is about"):
        run(runner, "true")
    assert not (project.folder / "copies" / "copy0").exists()


def test_a_full_disk_is_one_sentence(
    project: Project, copying: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(replica, "_copy_bytes", full)
    with pytest.raises(InputError, match="No space left on device; free some room"):
        run(project.runner(copying, project.overlay()), "true")


def test_a_copy_is_gone_when_it_is_closed_whatever_was_done_to_it(project: Project, copying: Sandbox) -> None:
    copy = project.replica(copying, "other")
    copy.sync(project.overlay())
    copying.run(
        ["sh", "-c", "mkdir -p a/b; touch a/b/c; chmod -R 000 a; chmod 500 notes"],
        copy.sandbox_policy(),
        CommandLimits(),
    )
    copy.close()
    assert not copy.folder.exists()


def test_the_workspace_a_task_is_about_may_be_empty(tmp_path: Path, copying: Sandbox) -> None:
    root = tmp_path / "empty"
    root.mkdir()
    copy = replica.Replica(root, tmp_path / "copy", copying)
    copy.sync(Overlay(Workspace(root)))
    assert copying.run(["ls"], copy.sandbox_policy(), CommandLimits()).output == ""


def work(runner: Runner, script: str) -> str:
    """A command of the model, whose changes are taken over, and what the model sees of it."""
    return runner.run(f"sh -c {shlex.quote(script)}").output


def test_sparse_files_cost_no_memory(project: Project, sandbox: Sandbox) -> None:
    """Sizes are read before contents: a file too large to edit is never read, and user and model are told."""
    overlay = project.overlay()
    runner = project.runner(sandbox, overlay)
    shown: list[str] = []
    runner.on_output = shown.append
    tracemalloc.start()
    try:
        told = work(runner, "for i in 1 2 3 4; do truncate -s 900M big$i.txt; done; echo x = 1 > small.py")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert overlay.texts == {"small.py": "x = 1\n"}
    assert peak < 32 << 20
    assert "not kept after the command: big1.txt (larger than 8 MB), big2.txt" in told
    assert told in "".join(shown)


def test_what_is_not_text_is_said_to_be_lost(project: Project, sandbox: Sandbox) -> None:
    overlay = project.overlay()
    told = work(project.runner(sandbox, overlay), r"printf '\000\377\001' > picture.png; printf done")
    assert overlay.texts == {}
    assert told == "done\n[not kept after the command: picture.png (not text)]\n"


def test_more_text_than_a_task_may_change_is_refused_whole(project: Project, sandbox: Sandbox) -> None:
    overlay = project.overlay()
    runner = project.runner(sandbox, overlay)
    with pytest.raises(InputError, match="more than 64 MB"):
        work(runner, "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do truncate -s 7M big$i.txt; done")
    assert overlay.texts == {}


def test_too_many_changed_files_are_refused_whole(
    project: Project, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "MOST_CHANGED_FILES", 20)
    overlay = project.overlay()
    with pytest.raises(InputError, match="changed 30 files"):
        work(project.runner(sandbox, overlay), "for i in $(seq 30); do echo $i > $i.txt; done")
    assert overlay.texts == {}


def test_names_that_are_not_utf8_stay_in_the_copy(project: Project, sandbox: Sandbox) -> None:
    overlay = project.overlay()
    (project.root / os.fsdecode(b"\xff\xfe.txt")).write_text("mine")
    work(project.runner(sandbox, overlay), r"printf x > $(printf '\377\376new.txt'); printf y > plain.txt")
    assert overlay.texts == {"plain.txt": "y"}
    assert overlay.files() == [".env", "calc.py", "notes/plan.txt", "plain.txt", "test_calc.py"]
    overlay.plan("a task").apply(project.journal)
    assert (project.root / "plain.txt").read_text() == "y"


def test_folders_nested_deeper_than_python_recurses_do_not_end_a_task(
    project: Project, sandbox: Sandbox
) -> None:
    overlay = project.overlay()
    deep = "import os\nopen('found.txt', 'w').write('x')\nfor _ in range(1100): os.mkdir('d'); os.chdir('d')"
    runner = project.runner(sandbox, overlay)
    runner.run(f"{sys.executable} -c {shlex.quote(deep)}")
    assert overlay.texts == {"found.txt": "x"}
    assert "calc.py" in run(runner, "ls")
    remove(project.folder / "copies")  # pytest's own clean-up recurses


def test_a_workspace_too_large_is_not_begun_to_copy(
    project: Project, copying: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copied(*_: object) -> None:
        raise AssertionError("a file was copied")

    monkeypatch.setattr(replica, "MOST_FILES", 2)
    monkeypatch.setattr(replica, "_copy_file", copied)
    with pytest.raises(InputError, match="too much to copy"):
        run(project.runner(copying, project.overlay()), "true")


def test_a_rewritten_tree_is_compared_without_search(project: Project) -> None:
    """Three hundred files of repeated lines took a minute when each was searched for common lines."""
    overlay = project.overlay()
    for number in range(60):
        project.write(f"many/{number}.txt", f"old {number}\n" * 200)
        overlay.write(f"many/{number}.txt", f"new {number}\n" * 200)
    plan = overlay.plan("rewrite")
    assert overlay.plan("rewrite").changes[0] is plan.changes[0]  # compared once
    assert plan.diff().count("\n+new") == 60 * 200


# ── large workspaces ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", [*HOLDING, SandboxKind.NONE], ids=str)
def test_a_command_in_a_large_workspace_changes_its_own_view_only(
    project: Project, kind: SandboxKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is copied where the sandbox can mount layers; where it cannot, a copy serves."""
    files = 3_000 if kind is find_sandbox().kind else 300
    monkeypatch.setattr(replicas, "LAYERED_FILES", files - 100)
    for number in range(files):
        folder = project.root / f"f{number % 60}"
        folder.mkdir(exist_ok=True)
        (folder / f"{number}.py").write_text(f"x = {number}\n")
    overlay = project.overlay()
    overlay.resolve([CHANGE])
    runner = project.runner(Sandbox(kind), overlay)
    told = work(runner, "cat calc.py f1/1.py; echo y = 1 >> f1/1.py; echo z = 1 > f2/new.py; rm -r f3/3.py")
    assert told == "def add(a, b):\n    return a + b\nx = 1\n"
    assert overlay.texts == {
        "calc.py": "def add(a, b):\n    return a + b\n",
        "f1/1.py": "x = 1\ny = 1\n",
        "f2/new.py": "z = 1\n",
        "f3/3.py": None,
    }
    assert (project.root / "f1" / "1.py").read_text() == "x = 1\n"
    assert (project.root / "f3" / "3.py").exists()
    assert run(runner, "cat f1/1.py f2/new.py; ls f3/3.py calc.py 2>&1 | tail -1") == (
        "x = 1\ny = 1\nz = 1\ncalc.py\n"
    )
    stored = sum(path.is_file() for path in (project.folder / "copies").rglob("*"))
    assert stored < 10 if kind.can_mount else stored > files


_AT_RANDOM = r"""
import os, random, shutil, sys
choose = random.Random(int(sys.argv[1]))
names = "a b c d/a d/b d/e/a d/e d new new/x calc.py notes notes/plan.txt".split()
for _ in range(25):
    one, other = choose.choice(names), choose.choice(names)
    do = choose.choice(("write", "append", "remove", "move", "folder", "link", "mode", "hard", "copy"))
    try:
        if do in ("write", "append"):
            os.makedirs(os.path.dirname(one) or ".", exist_ok=True)
            open(one, "w" if do == "write" else "a").write(str(choose.random()) + "\n")
        elif do == "remove":
            shutil.rmtree(one) if os.path.isdir(one) and not os.path.islink(one) else os.unlink(one)
        elif do == "move":
            shutil.move(one, other)
        elif do == "folder":
            os.makedirs(one)
        elif do == "link":
            os.symlink(other, one)
        elif do == "mode":
            os.chmod(one, choose.choice((0o600, 0o755)) if os.path.isfile(one) else 0o755)
        elif do == "hard":
            os.link(one, other)
        elif do == "copy":
            shutil.copytree(one, other, symlinks=True) if os.path.isdir(one) else shutil.copy2(one, other)
    except (OSError, shutil.Error):
        pass
"""


@pytest.mark.parametrize("kind", [kind for kind in HOLDING if kind.can_mount], ids=str)
def test_layers_and_a_copy_find_the_same_changes(project: Project, kind: SandboxKind) -> None:
    for name in ("a", "b", "c", "d/a", "d/b", "d/e/a"):
        project.write(name, f"{name}\n")
        os.utime(project.root / name, (1, 1))
    before = project.tree()
    overlay = project.overlay()
    overlay.write("b", None)
    overlay.write("c", "of the task\n")
    overlay.write("new", "new\n")
    sandbox = Sandbox(kind)
    layered = LayeredReplica(project.root, project.folder / "layers", sandbox, exclude=EXCLUDE)
    assert layered.is_possible()
    changed = 0
    for seed in range(8):
        found = []
        for copy in (project.replica(sandbox, f"copy{seed}"), layered):
            copy.sync(overlay)
            ended = sandbox.run([sys.executable, "-c", _AT_RANDOM, str(seed)], copy.sandbox_policy())
            assert ended.ok, ended.output
            found.append(_differences(copy, {**before, **overlay.texts}))
        assert found[0] == found[1], f"seed {seed}"
        changed += len(found[0])
    assert changed > 30
    assert project.tree() == before


def _differences(copy: Replica, known: dict[str, str | None]) -> dict[str, str | None]:
    """A file that was rewritten with the same text may be reported or not."""
    changes, large = copy.changes()
    assert not large
    texts = {name: None if data is None else data.decode() for name, data in changes.items()}
    return {name: text for name, text in texts.items() if text != known.get(name)}


@pytest.mark.parametrize("kind", [kind for kind in HOLDING if kind.can_mount], ids=str)
def test_what_is_hidden_stays_hidden_in_layers(project: Project, kind: SandboxKind) -> None:
    """Also after the folder above was removed and made again, and for a secret of a moment ago."""
    project.write("deep/er/key.pem", "hush\n")
    project.write("deep/__pycache__/.env", "hush\n")
    sandbox = Sandbox(kind)
    layered = LayeredReplica(project.root, project.folder / "layers", sandbox, exclude=EXCLUDE)
    overlay = project.overlay()
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(project.root)
        try:
            server.bind("socket")
        finally:
            os.chdir(here)
        server.listen()
        script = (
            "find . -type f | xargs cat; test -e socket && echo SOCKET; rm -rf deep; mkdir -p deep/er; "
            "cat deep/er/key.pem deep/__pycache__/.env .env; echo mine > deep/er/key.pem; "
            "mknod deep/w c 0 0; setfattr -n user.overlay.opaque -v n deep; mv deep elsewhere; "
            "find . -type f | xargs cat; true"
        )
        for _ in range(2):
            layered.sync(overlay)
            told = sandbox.run(["sh", "-c", script], layered.sandbox_policy()).output
            assert "hush" not in told
            assert "SOCKET" not in told
            assert "mine" in told
            project.write("late/id.pem", "hush\n")
    assert (project.root / "deep" / "er" / "key.pem").read_text() == "hush\n"
    changes, _ = layered.changes()
    assert changes == {"elsewhere/er/key.pem": b"mine\n"}


def test_layers_are_not_used_where_the_kernel_refuses_them(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "LAYERED_FILES", 0)
    monkeypatch.setattr(os, "mknod", _refuse)
    assert run(project.runner(find_sandbox(), project.overlay()), "cat notes/plan.txt") == "first\nsecond\n"
    assert (project.folder / "copies" / "copy0" / "calc.py").exists()


def _refuse(*_: object) -> None:
    raise PermissionError(1, "Operation not permitted")

"""Hostile repositories: git is asked for changes and files, and no program that the repository names runs."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from installed import program
from keystroke.analysis.git import run_git
from keystroke.analysis.project_files import project_files
from keystroke.assist.edit import Workspace
from keystroke.assist.review.changes import changed_files
from keystroke.errors import InputError

pytestmark = pytest.mark.skipif(program("git") is None, reason="needs git")
Hostile = Callable[[Path, Path], None]


def plain_git(root: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *identity, *arguments], cwd=root, capture_output=True, check=False)


def repository(root: Path) -> None:
    root.mkdir(parents=True)
    plain_git(root, "init", "-q")
    (root / "a.py").write_text("x = 1\n")
    plain_git(root, "add", "-A")
    plain_git(root, "commit", "-qm", "first")


def content_filter(root: Path, mark: Path) -> None:
    (root / ".gitattributes").write_text("* filter=x.y\n")
    plain_git(root, "config", "filter.x.y.clean", f"sh -c 'touch {mark}; cat'")


def required_filter_process(root: Path, mark: Path) -> None:
    (root / ".gitattributes").write_text("* filter=x\n")
    plain_git(root, "config", "filter.x.process", f"touch {mark}")
    plain_git(root, "config", "filter.x.required", "true")


def text_conversion(root: Path, mark: Path) -> None:
    (root / ".gitattributes").write_text("* diff=x\n")
    plain_git(root, "config", "diff.x.textconv", f"sh -c 'touch {mark}; cat'")


def external_diff(root: Path, mark: Path) -> None:
    plain_git(root, "config", "diff.external", f"touch {mark}")


def file_system_monitor(root: Path, mark: Path) -> None:
    plain_git(root, "config", "core.fsmonitor", f"touch {mark}; false")


def index_hook(root: Path, mark: Path) -> None:
    hook = root / ".git" / "hooks" / "post-index-change"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {mark}\n")
    hook.chmod(0o755)
    (root / "b.py").write_text("y = 1\n")
    plain_git(root, "-c", "core.hooksPath=/dev/null", "add", "b.py")
    (root / "b.py").write_text("y = 1\n")  # the same text, so that only the index is out of date


def promised_objects(root: Path, mark: Path) -> None:
    for name, value in (
        ("extensions.partialClone", "origin"),
        ("remote.origin.url", str(root / "nowhere")),
        ("remote.origin.promisor", "true"),
        ("remote.origin.uploadpack", f"touch {mark}; false"),
        ("protocol.file.allow", "always"),
    ):
        plain_git(root, "config", name, value)
    found = subprocess.run(["git", "rev-parse", "HEAD:a.py"], cwd=root, capture_output=True, check=True)
    name = found.stdout.decode().strip()
    (root / ".git" / "objects" / name[:2] / name[2:]).unlink()


HOSTILE = (
    content_filter,
    required_filter_process,
    text_conversion,
    external_diff,
    file_system_monitor,
    index_hook,
    promised_objects,
)


@pytest.mark.parametrize("hostile", HOSTILE)
def test_no_program_of_a_repository_runs(hostile: Hostile, tmp_path: Path) -> None:
    root, mark = tmp_path / "repository", tmp_path / "mark"
    repository(root)
    hostile(root, mark)
    mark.unlink(missing_ok=True)
    (root / "a.py").write_text("x = 2\n")
    run_git(root, "diff", "HEAD", "--")
    run_git(root, "status", "--porcelain")
    project_files(root)
    if hostile is promised_objects:  # what is missing cannot be reviewed
        with pytest.raises(InputError):
            changed_files(Workspace(root))
    else:
        changed_files(Workspace(root))
    assert not mark.exists()
    plain_git(root, "status")
    plain_git(root, "diff", "HEAD", "--")
    assert mark.exists(), "the repository is harmless, so this test shows nothing"


def test_changes_are_seen_although_filters_are_off(tmp_path: Path) -> None:
    root = tmp_path / "repository"
    repository(root)
    required_filter_process(root, tmp_path / "mark")
    (root / "a.py").write_text("x = 2\n")
    done = run_git(root, "diff", "HEAD", "--")
    assert done.returncode == 0
    assert b"+x = 2" in done.stdout


def test_a_bare_repository_inside_a_clone_is_not_opened(tmp_path: Path) -> None:
    root = tmp_path / "clone" / "sub"
    root.mkdir(parents=True)
    plain_git(root, "init", "-q", "--bare", ".")
    plain_git(root, "config", "core.bare", "false")
    plain_git(root, "config", "core.worktree", str(root))
    assert run_git(root, "rev-parse", "--is-inside-work-tree").returncode != 0

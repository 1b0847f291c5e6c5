"""Runs git in a repository that may be hostile.

A repository's configuration can name programs: hooks, content filters, diff drivers, a file system monitor,
pagers, remotes that are asked for missing objects. None of them is started: each is switched off on the
command line or in the environment, which configuration cannot override.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_OFF = (
    "core.fsmonitor=false",
    "core.hooksPath=/dev/null",
    "core.pager=cat",
    "core.sshCommand=false",
    "core.quotepath=off",
    "credential.helper=",
    "diff.ignoreSubmodules=dirty",
    "gpg.program=false",
    "safe.bareRepository=explicit",
    "submodule.recurse=false",
)
_ENVIRONMENT = {
    "GIT_ALLOW_PROTOCOL": "none",  # the only protocol that may be used, and there is none of that name
    "GIT_ASKPASS": "false",
    "GIT_EDITOR": "false",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_PAGER": "cat",
    "GIT_TERMINAL_PROMPT": "0",
}
_FILTERING = frozenset({"diff", "status"})  # commands that would run content filters over the work tree


def run_git(
    root: Path, *arguments: str, stdin: bytes = b"", seconds: float = 60.0
) -> subprocess.CompletedProcess[bytes]:
    """Run `git arguments...` in `root` without starting any program that the repository names. Raises
    FileNotFoundError where git is not installed, and subprocess.TimeoutExpired."""
    options = [*_OFF, *(_filters_off(root, seconds) if arguments[0] in _FILTERING else ())]
    extra = ("--no-ext-diff", "--no-textconv") if arguments[0] == "diff" else ()
    return _run_git(root, options, (arguments[0], *extra, *arguments[1:]), stdin, seconds)


def _filters_off(root: Path, seconds: float) -> list[str]:
    """Settings that switch every content filter of the repository off. Reading the configuration runs
    nothing."""
    listed = _run_git(root, _OFF, ("config", "-z", "--name-only", "--get-regexp", r"^filter\."), b"", seconds)
    names = {name.rpartition(".")[0] for name in os.fsdecode(listed.stdout).split("\0") if name}
    return [
        f"{name}.{key}"
        for name in sorted(names)
        for key in ("clean=", "smudge=", "process=", "required=false")
    ]


def _run_git(
    root: Path, options: list[str] | tuple[str, ...], arguments: tuple[str, ...], stdin: bytes, seconds: float
) -> subprocess.CompletedProcess[bytes]:
    inherited = {name: value for name, value in os.environ.items() if name != "GIT_EXTERNAL_DIFF"}
    return subprocess.run(
        ["git", *(part for option in options for part in ("-c", option)), *arguments],
        cwd=root,
        input=stdin,
        capture_output=True,
        timeout=seconds,
        env={**inherited, **_ENVIRONMENT},
        check=False,
    )

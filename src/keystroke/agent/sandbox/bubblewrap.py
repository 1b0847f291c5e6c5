"""Builds the command line of bubblewrap: everything read-only, the workspace writable, homes and shared
folders empty, own processes and an own network."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from keystroke.agent.sandbox.policy import SandboxPolicy
from keystroke.agent.sandbox.view import SCRATCH, FileView


def bubblewrap(
    argv: Sequence[str], policy: SandboxPolicy, view: FileView, sizes: tuple[int, int]
) -> list[str]:
    """`argv` as bubblewrap runs it. `sizes` are the bytes of the scratch folder and of other empty ones."""
    command = [
        shutil.which("bwrap") or "bwrap",
        *("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        # Without --die-with-parent: where its own process is killed early, its child would wait for it for
        # ever. The launcher ends with its lifeline, and bubblewrap with the launcher. That is the first
        # process inside: a command could trace and stop bubblewrap's own, which has no filter.
        *("--unshare-net", "--as-pid-1", "--new-session", "--cap-drop", "ALL"),
        *("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"),
    ]
    for folder in view.emptied:
        command += ["--size", str(sizes[folder != SCRATCH]), "--tmpfs", str(folder)]
    command += ["--dir", str(view.home)]
    for path in view.lent:
        command += ["--ro-bind", str(path), str(path)]
    command += ["--bind", str(policy.root), str(policy.inside_path)]
    for shown, real in policy.readonly.items():
        command += ["--ro-bind", str(real), str(shown)]
    for hidden in (*view.hidden, *view.sockets(policy)):
        command += _mask(hidden)
    return [*command, "--chdir", str(policy.inside_path), "--", *argv]


def _mask(hidden: Path) -> Sequence[str]:
    if hidden.is_dir():
        return ("--size", "4096", "--tmpfs", str(hidden))
    return ("--ro-bind", "/dev/null", str(hidden))

"""Builds the command line of bubblewrap: everything read-only, the workspace writable, own processes and
network."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from keystroke.agent.sandbox.policy import CommandLimits, SandboxPolicy

SCRATCH = Path("/tmp")
_SCRATCH_BYTES = 1 << 30
_EMPTIED = ("/run", "/var/tmp", "/dev/shm")  # sockets of other programs, and what is shared between users


def bubblewrap(argv: Sequence[str], policy: SandboxPolicy, limits: CommandLimits) -> list[str]:
    """`argv` as bubblewrap runs it at `policy`."""
    size = str(min(_SCRATCH_BYTES, limits.memory))
    command = [
        shutil.which("bwrap") or "bwrap",
        *("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        *(() if policy.network else ("--unshare-net",)),
        *("--die-with-parent", "--new-session", "--cap-drop", "ALL"),
        *("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"),
        *("--size", size, "--tmpfs", str(SCRATCH)),
    ]
    for folder in _EMPTIED:
        if Path(folder).is_dir() and not Path(folder).is_symlink():
            command += ["--size", size, "--tmpfs", folder]
    command += ["--ro-bind-try", "/run/current-system", "/run/current-system"]
    if policy.network:  # some systems keep the resolver's configuration there
        command += ["--ro-bind-try", "/run/systemd/resolve", "/run/systemd/resolve"]
    command += ["--bind", str(policy.root), str(policy.inside_path)]
    for shown, real in policy.readonly.items():
        command += ["--ro-bind", str(real), str(shown)]
    for hidden in policy.hidden:
        if hidden.is_symlink() or not hidden.exists():
            continue
        mask = ("--size", "4096", "--tmpfs") if hidden.is_dir() else ("--ro-bind", "/dev/null")
        command += [*mask, str(hidden)]
    return [*command, "--chdir", str(policy.inside_path), "--", *argv]

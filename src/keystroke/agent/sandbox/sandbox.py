"""Finds the sandbox that works on this machine and runs commands in it.

A mechanism is used only after a probe has shown that it works: a command in it could write the workspace
and could neither write elsewhere nor reach the network. Where none works, `kind` is `none` and every
command needs the user's approval.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path

from keystroke.agent.sandbox import launcher
from keystroke.agent.sandbox.bubblewrap import SCRATCH, bubblewrap
from keystroke.agent.sandbox.environment import (
    command_environment,
    credential_paths,
    escape_sockets,
    paths_excluding,
    program_folders,
)
from keystroke.agent.sandbox.policy import CommandLimits, CompletedCommand, SandboxPolicy
from keystroke.agent.sandbox.processes import user_thread_count
from keystroke.agent.sandbox.seatbelt import seatbelt
from keystroke.agent.sandbox.supervise import OnOutput, supervise
from keystroke.engine.base import Interrupt
from keystroke.errors import InputError, KeystrokeError, UsageError

FORCE = "KEYSTROKE_SANDBOX"  # selects a mechanism, or none
_LONGEST_ARGUMENT = 100_000  # Linux takes 128 KiB; a longer policy is handed over in a file
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "shm")
_EMPTIED = ("/tmp", "/run", "/var/tmp", "/dev/shm")
_PROBE = """
import os, socket, sys
inside, outside, port = sys.argv[1:]
open(os.path.join(inside, "in"), "w").close()
try:
    open(outside, "w").close()  # whether it came to lie there is seen from without
except OSError:
    pass
try:
    socket.create_connection(("127.0.0.1", int(port)), 0.5)
except OSError:
    sys.exit(0)
sys.exit(3)
"""


class SandboxKind(StrEnum):
    """Mechanisms, best first."""

    BUBBLEWRAP = "bubblewrap"
    NAMESPACES = "namespaces"
    LANDLOCK = "landlock"
    SEATBELT = "seatbelt"
    NONE = "none"

    @property
    def can_mount(self) -> bool:
        """Whether a folder can be mounted at another path."""
        return self in (SandboxKind.BUBBLEWRAP, SandboxKind.NAMESPACES)


@dataclass(frozen=True, slots=True)
class Sandbox:
    kind: SandboxKind

    @property
    def confines(self) -> bool:
        return self.kind is not SandboxKind.NONE

    def run(
        self,
        argv: Sequence[str],
        policy: SandboxPolicy,
        limits: CommandLimits | None = None,
        interrupt: Interrupt | None = None,
        *,
        env: Mapping[str, str] | None = None,
        on_output: OnOutput | None = None,
    ) -> CompletedCommand:
        """Run a command until it ends or exceeds a limit; no process it starts outlives the call. `env` is
        added to the filtered environment. NotFound or InputError where it cannot start."""
        limits = limits or CommandLimits()
        policy = _without_program_folders(policy)
        if not argv:
            raise UsageError("there is no command to run; name one")
        if any("\0" in part for part in argv):
            raise InputError("a command cannot hold a NUL byte")
        if not policy.root.is_dir():
            raise InputError(f"the folder {policy.root} does not exist; a command needs one to run in")
        with self._scratch() as scratch:
            variables = {**command_environment(scratch), **(env or {})}
            command, own = self._confined(argv, policy, limits, scratch)
            ended = supervise(
                command,
                cwd=policy.root,
                env=variables,
                limits=limits,
                interrupt=interrupt,
                on_output=on_output,
                disk=policy.root,
                unused=own,
                namespace=self.kind.can_mount,
            )
        # The sandbox's own process reports a signal as a shell does.
        return replace(ended, code=128 - ended.code) if own and 128 < ended.code < 160 else ended

    def path_inside(self, policy: SandboxPolicy) -> Path:
        """The path of `policy.root` for a command."""
        return policy.inside_path if self.kind.can_mount else policy.root

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        """The command's temporary folder, as the command sees it."""
        if self.kind.can_mount:
            yield SCRATCH
            return
        with tempfile.TemporaryDirectory(prefix="keystroke-", ignore_cleanup_errors=True) as folder:
            yield Path(folder)

    def _confined(
        self, argv: Sequence[str], policy: SandboxPolicy, limits: CommandLimits, scratch: Path
    ) -> tuple[list[str], int]:
        """The command line, and how many of its processes belong to the sandbox."""
        # The system counts all processes of a user, so the existing ones are added.
        processes = limits.processes + user_thread_count() + 16
        if self.kind is SandboxKind.BUBBLEWRAP:
            return bubblewrap(_limited(argv, limits, processes), policy, limits), 2
        if self.kind is SandboxKind.SEATBELT:
            return seatbelt(argv, policy, scratch), 0
        if self.kind is SandboxKind.NONE and sys.platform != "linux":
            return list(argv), 0
        spec = {
            "kind": str(self.kind),
            "root": str(policy.root),
            "seen": str(policy.inside_path),
            "cwd": str(self.path_inside(policy)),
            "readonly": {str(shown): str(real) for shown, real in policy.readonly.items()},
            "hidden": [str(path) for path in policy.hidden if path.exists() and not path.is_symlink()],
            "network": policy.network,
            "file": limits.file,
            "memory": limits.memory,
            "processes": processes,
            "scratch_bytes": min(1 << 30, limits.memory),
            "emptied": [path for path in _EMPTIED if os.path.isdir(path) and not os.path.islink(path)],
            "unix": not escape_sockets(),
            "readable": [],
            "writable": [],
        }
        if self.kind is SandboxKind.LANDLOCK:
            spec["readable"] = [str(path) for path in paths_excluding(policy.hidden)]
            spec["writable"] = [str(policy.root), str(scratch), *(f"/dev/{name}" for name in _DEVICES)]
        own = 2 if self.kind is SandboxKind.NAMESPACES else 1
        given = json.dumps(spec)
        if len(given) > _LONGEST_ARGUMENT:
            handed = scratch / f".policy-{secrets.token_hex(8)}"
            handed.write_text(given, encoding="utf-8")
            given = f"@{handed}"
        return [sys.executable, "-I", "-S", launcher.__file__, given, *argv], own


def _without_program_folders(policy: SandboxPolicy) -> SandboxPolicy:
    """The policy with the program's own folders hidden, except one that holds the workspace or the
    interpreter."""
    seen = (policy.root.resolve(), policy.inside_path, *policy.readonly, Path(sys.prefix))
    own = tuple(path for path in program_folders() if not any(each.is_relative_to(path) for each in seen))
    return replace(policy, hidden=(*policy.hidden, *own))


def _limited(argv: Sequence[str], limits: CommandLimits, processes: int) -> list[str]:
    """The command with limits on files and memory, where `prlimit` is installed."""
    tool = shutil.which("prlimit")
    if tool is None:
        return list(argv)
    most = (f"--fsize={limits.file}", f"--data={limits.memory}", f"--nproc={processes}")
    return [tool, "--core=0", *most, "--", *argv]


@cache
def find_sandbox() -> Sandbox:
    """The best sandbox that works on this machine. Tries each once, in about a tenth of a second."""
    wanted = os.environ.get(FORCE, "")
    if wanted and wanted not in list(SandboxKind):
        raise UsageError(f"{FORCE} must be one of {', '.join(SandboxKind)}, not {wanted!r:.40}")
    for kind in SandboxKind:
        if wanted in ("", kind) and kind is not SandboxKind.NONE and is_effective(Sandbox(kind)):
            return Sandbox(kind)
    if wanted not in ("", SandboxKind.NONE):
        raise UsageError(f"{FORCE} asks for {wanted}, which does not work on this machine")
    return Sandbox(SandboxKind.NONE)


def is_effective(sandbox: Sandbox) -> bool:
    """Whether a command in this sandbox can write the workspace but nothing else, and reaches no network."""
    if not _is_present(sandbox.kind):
        return False
    with (
        tempfile.TemporaryDirectory(prefix="keystroke-probe-", dir=_probe_folder()) as folder,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        inside, outside = Path(folder, "inside"), Path(folder, "outside")
        inside.mkdir()
        policy = SandboxPolicy(inside, hidden=credential_paths())
        probe = [sys.executable, "-I", "-S", "-c", _PROBE, str(inside), str(outside)]
        try:
            ended = sandbox.run([*probe, str(listener.getsockname()[1])], policy, CommandLimits(seconds=20))
        except (KeystrokeError, OSError):
            return False
        return ended.ok and (inside / "in").exists() and not outside.exists()


def _probe_folder() -> str | None:
    """A folder that sandboxes do not replace, so that a probe applies to the user's files."""
    home = Path.home()
    return str(home) if os.access(home, os.W_OK) else None


def _is_present(kind: SandboxKind) -> bool:
    if kind is SandboxKind.BUBBLEWRAP:
        return sys.platform == "linux" and shutil.which("bwrap") is not None
    if kind is SandboxKind.SEATBELT:
        return sys.platform == "darwin" and Path("/usr/bin/sandbox-exec").exists()
    return sys.platform == "linux"

"""Runs commands in a sandbox of a given kind. `probe.py` finds the kind that works on this machine."""

from __future__ import annotations

import base64
import json
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from keystroke.agent.sandbox import launcher
from keystroke.agent.sandbox.bubblewrap import bubblewrap
from keystroke.agent.sandbox.channel import HostChannel, Lifeline
from keystroke.agent.sandbox.environment import command_environment
from keystroke.agent.sandbox.policy import CommandLimits, CompletedCommand, SandboxPolicy
from keystroke.agent.sandbox.processes import user_thread_count
from keystroke.agent.sandbox.proxy import NetworkProxy
from keystroke.agent.sandbox.seatbelt import seatbelt
from keystroke.agent.sandbox.seccomp import build_filter, this_architecture
from keystroke.agent.sandbox.supervise import OnOutput, supervise
from keystroke.agent.sandbox.view import SCRATCH, FileView
from keystroke.engine.base import Interrupt
from keystroke.errors import InputError, UsageError

_LONGEST_ARGUMENT = 100_000  # Linux takes 128 KiB; a longer policy is handed over in a file
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "shm")
_LAUNCH = (sys.executable, "-I", "-S", launcher.__file__)


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
        stdin: int | None = None,
        idle: Callable[[], bool] | None = None,
    ) -> CompletedCommand:
        """Run a command until it ends or exceeds a limit; no process it starts outlives the call. `env` is
        added to the filtered environment; `stdin` is its standard input (None: empty), for which it waits as
        long as `idle` returns True. NotFound or InputError where it cannot start."""
        limits = limits or CommandLimits()
        if not argv:
            raise UsageError("there is no command to run; name one")
        if any("\0" in part for part in argv):
            raise InputError("a command cannot hold a NUL byte")
        if not policy.root.is_dir():
            raise InputError(f"the folder {policy.root} does not exist; a command needs one to run in")
        with (
            self._scratch() as scratch,
            HostChannel((policy.root, scratch)) as channel,
            Lifeline() as lifeline,
        ):
            variables = {**command_environment(scratch), **(env or {})}
            command, own_processes = self._build_command(argv, policy, limits, scratch, channel, lifeline)
            ended = supervise(
                command,
                cwd=policy.root,
                env=variables,
                limits=limits,
                interrupt=interrupt,
                on_output=on_output,
                disk=policy.root,
                unused=own_processes,
                namespace=self.kind.can_mount,
                descriptors=(channel.descriptor, lifeline.descriptor),
                stdin=stdin,
                idle=idle,
            )
        # The sandbox's own process reports a signal as a shell does.
        return replace(ended, code=128 - ended.code) if own_processes and 128 < ended.code < 160 else ended

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

    def _build_command(
        self,
        argv: Sequence[str],
        policy: SandboxPolicy,
        limits: CommandLimits,
        scratch: Path,
        channel: HostChannel,
        lifeline: Lifeline,
    ) -> tuple[list[str], int]:
        """The command line, and how many of its processes belong to the sandbox."""
        view = FileView.of(policy)
        shared = policy.network and not self.kind.can_mount and self.confines  # this machine's network
        proxy = channel.start_proxy() if shared else None
        if self.kind is SandboxKind.SEATBELT:
            return seatbelt(argv, policy, view, scratch, proxy), 0
        if sys.platform != "linux":
            return list(argv), 0
        sizes = (min(1 << 30, limits.memory), min(128 << 20, limits.memory))
        spec: dict[str, object] = {
            "kind": str(self.kind),
            "cwd": str(self.path_inside(policy)),
            "lifeline": lifeline.descriptor,
            "network": policy.network,
            "file": limits.file,
            "memory": limits.memory,
            # The system counts all processes of a user, so the existing ones are added.
            "processes": limits.processes + user_thread_count() + 16,
        }
        layers = {"layers": _layer_paths(policy), "root": str(policy.root)}
        if self.confines:
            spec |= self._system_calls(policy, channel, proxy)
        if self.kind is SandboxKind.NAMESPACES:
            spec |= layers | {
                "seen": str(policy.inside_path),
                "readonly": {str(shown): str(real) for shown, real in policy.readonly.items()},
                "lent": [str(path) for path in view.lent],
                "hidden": [str(path) for path in (*view.hidden, *view.sockets(policy))],
                "emptied": {str(path): sizes[path != SCRATCH] for path in view.emptied},
                "home": str(view.home),
            }
        if self.kind is SandboxKind.LANDLOCK:
            writable = [str(policy.root), str(scratch), *(f"/dev/{name}" for name in _DEVICES)]
            spec |= {"readable": [str(path) for path in view.readable(policy)], "writable": writable}
        text = json.dumps(spec)
        if len(text) > _LONGEST_ARGUMENT:
            policy_file = scratch / f".policy-{secrets.token_hex(8)}"
            policy_file.write_text(text, encoding="utf-8")
            text = f"@{policy_file}"
        launch = [*_LAUNCH, text, *argv]
        if self.kind is SandboxKind.BUBBLEWRAP:
            command = bubblewrap(launch, policy, view, sizes)
            if policy.layers is not None:
                command = [*_LAUNCH, json.dumps({"kind": "layers"} | layers), *command]
            return command, 2
        return launch, 2 if self.kind is SandboxKind.NAMESPACES else 1

    def _system_calls(
        self, policy: SandboxPolicy, channel: HostChannel, proxy: NetworkProxy | None
    ) -> dict[str, object]:
        machine = this_architecture()
        broker = not self.kind.can_mount
        calls = build_filter(machine, own_network=self.kind.can_mount, tcp=policy.network, broker=broker)
        return {
            "channel": channel.descriptor,
            "filter": base64.b64encode(calls).decode(),
            "broker": broker,
            "capset": machine.capset,
            "seccomp": machine.seccomp,
            "proxy": proxy.url if proxy else "",
            "proxy_port": proxy.port if proxy else 0,
        }


def _layer_paths(policy: SandboxPolicy) -> dict[str, str]:
    """By the names of the overlay file system's options."""
    if policy.layers is None:
        return {}
    return {name: str(getattr(policy.layers, name)) for name in ("lower", "upper", "work")}

"""Finds the sandbox that works on this machine.

A mechanism is used only after a probe: a command in it tried every attempt of `attempts.py` and none
succeeded, and it could write its workspace. Where no mechanism holds, the kind is `none` and every command
needs the user's approval.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from keystroke.agent.sandbox import attempts
from keystroke.agent.sandbox.policy import CommandLimits, Layers, SandboxPolicy
from keystroke.agent.sandbox.sandbox import Sandbox, SandboxKind
from keystroke.errors import KeystrokeError, UsageError

FORCE = "KEYSTROKE_SANDBOX"  # selects a mechanism, or none


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
    """Whether a command in this sandbox can write its workspace and no attempt to reach beyond succeeds."""
    if not _is_present(sandbox.kind):
        return False
    try:
        return find_escapes(sandbox) == []
    except (KeystrokeError, OSError, ValueError):
        return False


def find_escapes(sandbox: Sandbox, *, network: bool = False, layered: bool = False) -> list[str]:
    """The names of the attempts that succeed; `layered`: in a workspace of two layers. InputError, OSError or
    ValueError where none could be made."""
    mark = f"keystroke-{secrets.token_hex(8)}"
    with contextlib.ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="keystroke-probe-", dir=_probe_folder()))
        )
        workspace, shown, secret = folder / "workspace", folder / "shown", folder / "secret"
        layers = Layers(workspace, folder / "upper", folder / "work")
        for path in (workspace, shown, folder / "root", layers.upper, layers.work):
            path.mkdir()
        secret.write_text(mark)
        for name in ("file", "other", "removable", "movable"):
            (shown / name).write_text("unchanged")
            (shown / name).chmod(0o600)
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        datagrams = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        datagrams.bind(("127.0.0.1", 0))
        datagrams.setblocking(False)
        for address in (_socket_address(shown / "socket", stack), "\0" + mark):
            server = stack.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(address)
            server.listen()
        victim = subprocess.Popen(["sleep", "600"], env={"MARK": mark, "PATH": os.environ.get("PATH", "")})
        stack.callback(victim.wait)
        stack.callback(victim.kill)
        before = (shown / "file").stat()
        targets = {
            "workspace": str(workspace),
            "shown": str(shown),
            "secret": str(secret),
            "mark": mark,
            "victim": victim.pid,
            "tcp": listener.getsockname()[1],
            "udp": datagrams.getsockname()[1],
        }
        program = Path(attempts.__file__).read_text(encoding="utf-8")
        sandbox.run(
            [sys.executable, "-I", "-S", "-c", program, json.dumps(targets)],
            SandboxPolicy(folder / "root", workspace, {shown: shown}, network=network, layers=layers)
            if layered
            else SandboxPolicy(workspace, readonly={shown: shown}, network=network),
            CommandLimits(seconds=60),
        )
        found = set(json.loads(((layers.upper if layered else workspace) / "result").read_text()))
        if layered and any(workspace.iterdir()):
            found.add("file: below the layers")
        return sorted(found | _find_traces(shown, before, datagrams, victim))


def _find_traces(
    shown: Path, before: os.stat_result, datagrams: socket.socket, victim: subprocess.Popen[bytes]
) -> set[str]:
    """Attempts that left something outside."""
    file = shown / "file"
    now = file.stat()
    with contextlib.suppress(BlockingIOError):
        datagrams.recv(100)
        return {"network: datagram"} | _find_traces(shown, before, datagrams, victim)
    signs = {
        "file: create outside": (shown / "created").exists(),
        "file: overwrite outside": file.read_text() != "unchanged",
        "file: write through a link": (shown / "through-link").exists(),
        "file: remove outside": not (shown / "removable").exists(),
        "file: move outside": not (shown / "movable").exists(),
        "metadata: mode": now.st_mode != before.st_mode,
        "metadata: by descriptor": (shown / "other").stat().st_mode != before.st_mode,
        "metadata: times": now.st_mtime == 1,
        "process: signal": victim.poll() is not None,
    }
    return {name for name, is_there in signs.items() if is_there}


def _socket_address(path: Path, stack: contextlib.ExitStack) -> str:
    """A path that fits into the address of a socket, whatever the length of a home."""
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    stack.callback(os.close, descriptor)
    return str(path) if len(os.fsencode(path)) < 100 else f"/proc/self/fd/{descriptor}/{path.name}"


def _probe_folder() -> str | None:
    """A folder of the user, so that a probe applies to the user's files."""
    home = Path.home()
    return str(home) if os.access(home, os.W_OK) else None


def _is_present(kind: SandboxKind) -> bool:
    if kind is SandboxKind.BUBBLEWRAP:
        return sys.platform == "linux" and shutil.which("bwrap") is not None
    if kind is SandboxKind.SEATBELT:
        return sys.platform == "darwin" and Path("/usr/bin/sandbox-exec").exists()
    return sys.platform == "linux"

"""The sandbox that works on this machine, found by trying, and commands run in it.

A mechanism counts only after a probe has shown that it holds: a command in it could write the workspace
and could neither write elsewhere nor reach the network. A tool that is present and broken is absent. Where
nothing holds, `kind` is `none` and whoever runs a command must ask the user first, each time.
"""

from __future__ import annotations

import json
import os
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
from keystroke.agent.sandbox.policy import Ended, Limits, Place
from keystroke.agent.sandbox.processes import owned
from keystroke.agent.sandbox.seatbelt import seatbelt
from keystroke.agent.sandbox.supervise import OnOutput, supervise
from keystroke.agent.sandbox.surroundings import around, doors, environment, secrets
from keystroke.engine.base import Interrupt
from keystroke.errors import InputError, KeystrokeError, UsageError

FORCE = "KEYSTROKE_SANDBOX"  # names one mechanism, for those who want another or none
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


class Kind(StrEnum):
    """Ways to confine a command, best first."""

    BUBBLEWRAP = "bubblewrap"
    NAMESPACES = "namespaces"
    LANDLOCK = "landlock"
    SEATBELT = "seatbelt"
    NONE = "none"

    @property
    def mounts(self) -> bool:
        """Whether a folder can be shown under another path."""
        return self in (Kind.BUBBLEWRAP, Kind.NAMESPACES)


@dataclass(frozen=True, slots=True)
class Sandbox:
    kind: Kind

    @property
    def confines(self) -> bool:
        return self.kind is not Kind.NONE

    def run(
        self,
        argv: Sequence[str],
        place: Place,
        limits: Limits | None = None,
        interrupt: Interrupt | None = None,
        *,
        env: Mapping[str, str] | None = None,
        on_output: OnOutput | None = None,
    ) -> Ended:
        """Run a command at `place` to its end or to a limit; nothing it starts outlives the call. `env` is
        added to what a command may know of our environment. NotFound or InputError where it cannot start."""
        limits = limits or Limits()
        if not argv:
            raise UsageError("there is no command to run; name one")
        if any("\0" in part for part in argv):
            raise InputError("a command cannot hold a NUL byte")
        if not place.root.is_dir():
            raise InputError(f"the folder {place.root} does not exist; a command needs one to run in")
        with self._scratch() as scratch:
            known = {**environment(scratch), **(env or {})}
            command, own = self._confined(argv, place, limits, scratch)
            ended = supervise(
                command,
                cwd=place.root,
                env=known,
                limits=limits,
                interrupt=interrupt,
                on_output=on_output,
                disk=place.root,
                unused=own,
                namespace=self.kind.mounts,
            )
        # The process that stands between tells a signal as a shell does.
        return replace(ended, code=128 - ended.code) if own and 128 < ended.code < 160 else ended

    def see(self, place: Place) -> Path:
        """Where a command finds `place.root`."""
        return place.seen if self.kind.mounts else place.root

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        """Where the command keeps temporary files, as it sees it."""
        if self.kind.mounts:
            yield SCRATCH
            return
        with tempfile.TemporaryDirectory(prefix="keystroke-", ignore_cleanup_errors=True) as folder:
            yield Path(folder)

    def _confined(
        self, argv: Sequence[str], place: Place, limits: Limits, scratch: Path
    ) -> tuple[list[str], int]:
        """What to execute, and how many processes of it are the sandbox's own."""
        # The system counts a user's processes wherever they run, so those there are come on top.
        processes = limits.processes + owned() + 16
        if self.kind is Kind.BUBBLEWRAP:
            return bubblewrap(_limited(argv, limits, processes), place, limits), 2
        if self.kind is Kind.SEATBELT:
            return seatbelt(argv, place, scratch), 0
        if self.kind is Kind.NONE and sys.platform != "linux":
            return list(argv), 0
        spec = {
            "kind": str(self.kind),
            "root": str(place.root),
            "seen": str(place.seen),
            "cwd": str(self.see(place)),
            "readonly": {str(shown): str(real) for shown, real in place.readonly.items()},
            "hidden": [str(path) for path in place.hidden if path.exists() and not path.is_symlink()],
            "network": place.network,
            "file": limits.file,
            "memory": limits.memory,
            "processes": processes,
            "scratch_bytes": min(1 << 30, limits.memory),
            "emptied": [path for path in _EMPTIED if os.path.isdir(path) and not os.path.islink(path)],
            "unix": not doors(),
            "readable": [],
            "writable": [],
        }
        if self.kind is Kind.LANDLOCK:
            spec["readable"] = [str(path) for path in around(place.hidden)]
            spec["writable"] = [str(place.root), str(scratch), *(f"/dev/{name}" for name in _DEVICES)]
        own = 2 if self.kind is Kind.NAMESPACES else 1
        return [sys.executable, "-I", "-S", launcher.__file__, json.dumps(spec), *argv], own


def _limited(argv: Sequence[str], limits: Limits, processes: int) -> list[str]:
    """The command with limits of its own on files and memory, where the system has the tool for it."""
    tool = shutil.which("prlimit")
    if tool is None:
        return list(argv)
    most = (f"--fsize={limits.file}", f"--data={limits.memory}", f"--nproc={processes}")
    return [tool, "--core=0", *most, "--", *argv]


@cache
def find_sandbox() -> Sandbox:
    """The best sandbox that holds on this machine. Tries each once; takes a tenth of a second."""
    wanted = os.environ.get(FORCE, "")
    if wanted and wanted not in list(Kind):
        raise UsageError(f"{FORCE} must be one of {', '.join(Kind)}, not {wanted!r:.40}")
    for kind in Kind:
        if wanted in ("", kind) and kind is not Kind.NONE and holds(Sandbox(kind)):
            return Sandbox(kind)
    if wanted not in ("", Kind.NONE):
        raise UsageError(f"{FORCE} asks for {wanted}, which does not hold on this machine")
    return Sandbox(Kind.NONE)


def holds(sandbox: Sandbox) -> bool:
    """Whether a command in this sandbox can write the workspace, nothing else, and reaches no network."""
    if not _present(sandbox.kind):
        return False
    with (
        tempfile.TemporaryDirectory(prefix="keystroke-probe-", dir=_probing()) as folder,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        inside, outside = Path(folder, "inside"), Path(folder, "outside")
        inside.mkdir()
        place = Place(inside, hidden=secrets())
        probe = [sys.executable, "-I", "-S", "-c", _PROBE, str(inside), str(outside)]
        try:
            ended = sandbox.run([*probe, str(listener.getsockname()[1])], place, Limits(seconds=20))
        except (KeystrokeError, OSError):
            return False
        return ended.ok and (inside / "in").exists() and not outside.exists()


def _probing() -> str | None:
    """A folder outside of what sandboxes empty, so that a probe shows what holds for the user's own files."""
    home = Path.home()
    return str(home) if os.access(home, os.W_OK) else None


def _present(kind: Kind) -> bool:
    if kind is Kind.BUBBLEWRAP:
        return sys.platform == "linux" and shutil.which("bwrap") is not None
    if kind is Kind.SEATBELT:
        return sys.platform == "darwin" and Path("/usr/bin/sandbox-exec").exists()
    return sys.platform == "linux"

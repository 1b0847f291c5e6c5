"""The access rights of a command, its limits, and its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

OUTPUT_BYTES = 64 * 1024  # of output that are kept: the first quarter and the last three quarters


@dataclass(frozen=True, slots=True)
class CommandLimits:
    """Limits of a command and all processes it starts, together."""

    seconds: float = 300.0
    memory: int = 4 << 30  # bytes; enough for a build, too little to exhaust a laptop
    output: int = 32 << 20  # bytes; more is probably a loop
    processes: int = 512  # threads count too
    file: int = 1 << 30  # bytes of any single file
    spare_disk: int = 1 << 30  # bytes that must stay free on the disk


@dataclass(frozen=True, slots=True)
class Layers:
    """A folder in two layers: `lower` is never written, `upper` holds what differs from it. `work` is an
    empty folder beside `upper`, for the kernel."""

    lower: Path
    upper: Path
    work: Path


@dataclass(frozen=True, slots=True)
class SandboxPolicy:
    """What a command may access. `root` is the folder it may write; where the sandbox can mount, it
    appears at `mount_point`, so that absolute paths mean the same as for the user. `readonly` are paths
    below `mount_point` that are mounted from elsewhere; `hidden` paths are inaccessible. `layers` are mounted
    at `root` while the command runs, in a sandbox that can mount."""

    root: Path
    mount_point: Path | None = None
    readonly: Mapping[Path, Path] = field(default_factory=dict)  # path inside the sandbox -> real path
    hidden: tuple[Path, ...] = ()
    network: bool = False
    layers: Layers | None = None

    @property
    def inside_path(self) -> Path:
        """The path of `root` inside a sandbox that can mount."""
        return self.mount_point or self.root


class ExitReason(StrEnum):
    EXITED = "exited"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    OUTPUT = "output"
    PROCESSES = "processes"
    DISK = "disk"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class CompletedCommand:
    """`code` is the exit code, negative for a signal. `output` omits the middle of long output; `printed`
    counts all bytes."""

    code: int
    output: str
    exit_reason: ExitReason = ExitReason.EXITED
    seconds: float = 0.0
    printed: int = 0

    @property
    def ok(self) -> bool:
        return self.exit_reason is ExitReason.EXITED and self.code == 0

    def describe(self, limits: CommandLimits) -> str:
        """How the command ended, as a clause for the user or a model."""
        if self.exit_reason is ExitReason.EXITED:
            if self.code >= 0:
                return f"ended with exit code {self.code}"
            return f"was ended by signal {-self.code}"
        return {
            ExitReason.TIMEOUT: f"did not end within {limits.seconds:g} seconds and was stopped",
            ExitReason.MEMORY: f"took more than {limits.memory >> 20:,} MB of memory and was stopped",
            ExitReason.OUTPUT: f"printed more than {limits.output >> 20:,} MB and was stopped",
            ExitReason.PROCESSES: f"started more than {limits.processes:,} processes and was stopped",
            ExitReason.DISK: "filled the disk and was stopped",
            ExitReason.INTERRUPTED: "was interrupted",
        }[self.exit_reason]


class OutputBuffer:
    """Collects output: all of it while short, else its head and its tail."""

    def __init__(self, size: int = OUTPUT_BYTES) -> None:
        self._first, self._last = size // 4, size - size // 4
        self._head, self._tail = bytearray(), bytearray()
        self.printed = 0

    def add(self, data: bytes) -> None:
        self.printed += len(data)
        room = self._first - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self._last:
            del self._tail[: -self._last]

    def text(self) -> str:
        tail = bytes(self._tail[-self._last :])
        left_out = self.printed - len(self._head) - len(tail)
        middle = f"\n… {left_out:,} bytes left out …\n".encode() if left_out > 0 else b""
        return (bytes(self._head) + middle + tail).decode("utf-8", "replace")

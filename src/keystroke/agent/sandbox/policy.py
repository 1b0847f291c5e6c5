"""What a command may do, for how long, and how it ended.

Values only. A `Place` says which folder a command may write and what it must not see; `Limits` bound
time, memory, output, processes and disk of the whole tree of processes; `Ended` says what became of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

KEPT = 64 * 1024  # bytes of output that are kept: the first quarter and the last three


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one command and everything it starts, together."""

    seconds: float = 300.0
    memory: int = 4 << 30  # bytes; enough for a build, too little to bring a laptop down
    output: int = 32 << 20  # bytes; more is a loop, and reading it costs what the user waits for
    processes: int = 512  # threads count too
    file: int = 1 << 30  # bytes of any single file
    spare_disk: int = 1 << 30  # bytes that stay free on the disk


@dataclass(frozen=True, slots=True)
class Place:
    """Where a command runs. `root` is the folder it may write; where the sandbox can mount, the command sees
    it as `shown`, so that absolute paths mean what they mean to the user. `readonly` are entries of `shown`
    that come from elsewhere and cannot be written; `hidden` are never seen."""

    root: Path
    shown: Path | None = None
    readonly: Mapping[Path, Path] = field(default_factory=dict)  # as shown -> where it really lies
    hidden: tuple[Path, ...] = ()
    network: bool = False

    @property
    def seen(self) -> Path:
        """The path of `root` inside a sandbox that can mount."""
        return self.shown or self.root


class Ending(StrEnum):
    EXITED = "exited"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    OUTPUT = "output"
    PROCESSES = "processes"
    DISK = "disk"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Ended:
    """`code` is the exit code, negative for a signal. `output` is what was printed, its middle left out where
    it was long; `printed` counts all bytes."""

    code: int
    output: str
    ending: Ending = Ending.EXITED
    seconds: float = 0.0
    printed: int = 0

    @property
    def ok(self) -> bool:
        return self.ending is Ending.EXITED and self.code == 0

    def sentence(self, limits: Limits) -> str:
        """How it ended, for a person or a model."""
        if self.ending is Ending.EXITED:
            if self.code >= 0:
                return f"ended with exit code {self.code}"
            return f"was ended by signal {-self.code}"
        return {
            Ending.TIMEOUT: f"did not end within {limits.seconds:g} seconds and was stopped",
            Ending.MEMORY: f"took more than {limits.memory >> 20:,} MB of memory and was stopped",
            Ending.OUTPUT: f"printed more than {limits.output >> 20:,} MB and was stopped",
            Ending.PROCESSES: f"started more than {limits.processes:,} processes and was stopped",
            Ending.DISK: "filled the disk and was stopped",
            Ending.INTERRUPTED: "was interrupted",
        }[self.ending]


class Kept:
    """Output as it comes: all of it while short, else its head and its tail."""

    def __init__(self, size: int = KEPT) -> None:
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

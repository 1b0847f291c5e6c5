"""Finds failures in a program's output: tracebacks and stack traces.

`find_failures` reads complete output; `FailureWatcher` reads streams as they arrive and returns each failure
once, when it is complete.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from keystroke.analysis.failures.failure import Failure
from keystroke.analysis.failures.stack_traces import other_failures
from keystroke.analysis.failures.tracebacks import python_failures

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)|\x1b[@-_]")
QUIET = 0.15  # seconds without output after which a failure counts as complete
LATEST = 1.0  # seconds after which a stream that never pauses is parsed
KEPT = 512 * 1024  # bytes that are parsed together
_MOST = 20  # failures of one output
_CONTEXT = 16 * 1024  # bytes kept before a possible failure, which may start there
# Every supported format contains one of these; the search for them is cheap.
_SIGNS = (b"Traceback (", b"rror", b"ERROR", b"xception", b"panic", b"\nE  ", b"_test.go:", b".go:")


def find_failures(output: str) -> tuple[Failure, ...]:
    """The last failures in a program's output, each once, in order. The last of a chain stopped it."""
    return tuple(dict.fromkeys(item for _, item in _locate_failures(_split_lines(output))))[-_MOST:]


def _split_lines(output: str) -> list[str]:
    return [line.rstrip("\r") for line in _ESCAPES.sub("", output).split("\n")]


def _locate_failures(lines: list[str]) -> list[tuple[int, Failure]]:
    return sorted([*python_failures(lines), *other_failures(lines)], key=lambda item: item[0])


@dataclass
class _Stream:
    data: bytearray = field(default_factory=bytearray)
    since: float | None = None  # when a possible failure was first seen
    last: float = 0.0


class FailureWatcher:
    """Finds failures in the output streams of a running program. Times are readings of the caller's clock, in
    seconds."""

    def __init__(self) -> None:
        self._streams: dict[int, _Stream] = {}

    def feed(self, stream: int, data: bytes, now: float) -> None:
        state = self._streams.setdefault(stream, _Stream())
        start = max(0, len(state.data) - 16)  # a sign may be cut in two
        state.data += data
        state.last = now
        if state.since is None:
            if any(state.data.find(sign, start) >= 0 for sign in _SIGNS):
                state.since = now
            elif len(state.data) > 4 * _CONTEXT:
                del state.data[:-_CONTEXT]
        elif len(state.data) > 2 * KEPT:
            del state.data[:-KEPT]

    def seconds_until_due(self, now: float) -> float | None:
        """Seconds until `take_completed` should be called; None while there is no possible failure."""
        times = [
            min(stream.last + QUIET, stream.since + LATEST)
            for stream in self._streams.values()
            if stream.since is not None
        ]
        return max(0.0, min(times) - now) if times else None

    def take_completed(self, now: float, *, ended: bool = False) -> list[Failure]:
        """The failures that are complete. `ended`: the program has ended."""
        found: list[Failure] = []
        for stream in self._streams.values():
            if stream.since is None:
                continue
            if ended or now >= stream.last + QUIET or now >= stream.since + LATEST:
                found += self._parse(stream)
        return found

    def _parse(self, stream: _Stream) -> list[Failure]:
        raw = bytes(stream.data).split(b"\n")
        found = _locate_failures(_split_lines(b"\n".join(raw).decode("utf-8", "replace")))
        if found:
            last = max(at for at, _ in found)
            stream.data = bytearray(b"\n".join(raw[last + 1 :]))
        if len(stream.data) > _CONTEXT:
            del stream.data[:-_CONTEXT]
        stream.since = None
        return list(dict.fromkeys(item for _, item in found))

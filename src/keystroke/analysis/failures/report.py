"""What a program said when it failed: tracebacks and stack traces in its output, as values.

Reads text, knows formats through its parsers, touches no file. `find_failures` reads what is there;
`FailureWatcher` hears a stream while it comes and tells each failure once, when it is complete.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from keystroke.analysis.failures.failure import Failure
from keystroke.analysis.failures.stack_traces import other_failures
from keystroke.analysis.failures.tracebacks import python_failures

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)|\x1b[@-_]")
QUIET = 0.15  # seconds without output after which a failure is taken to be complete: chains come at once
LATEST = 1.0  # seconds after which a stream that never rests is looked at all the same
KEPT = 512 * 1024  # bytes that are looked at together
_CONTEXT = 16 * 1024  # bytes kept before something that looks like a failure: its beginning may be there
# One of these is in every format that is read; finding none costs next to nothing.
_SIGNS = (b"Traceback (", b"rror", b"ERROR", b"xception", b"panic", b"\nE  ", b"_test.go:", b".go:")


def find_failures(output: str, limit: int = 20) -> tuple[Failure, ...]:
    """Every failure in a program's output, in order, each once. Of a chain the last is what stopped it."""
    return tuple(dict.fromkeys(item for _, item in _located(_lines(output))))[-limit:]


def _lines(output: str) -> list[str]:
    return [line.rstrip("\r") for line in _ESCAPES.sub("", output).split("\n")]


def _located(lines: list[str]) -> list[tuple[int, Failure]]:
    return sorted([*python_failures(lines), *other_failures(lines)], key=lambda item: item[0])


@dataclass
class _Stream:
    data: bytearray = field(default_factory=bytearray)
    since: float | None = None  # when something that looks like a failure was first heard
    last: float = 0.0


class FailureWatcher:
    """Hears the output of a program, stream by stream, and tells its failures as they become complete. Times
    are the caller's clock, in seconds."""

    def __init__(self) -> None:
        self._streams: dict[int, _Stream] = {}

    def feed(self, stream: int, data: bytes, now: float) -> None:
        heard = self._streams.setdefault(stream, _Stream())
        start = max(0, len(heard.data) - 16)  # a sign may be cut in two
        heard.data += data
        heard.last = now
        if heard.since is None:
            if any(heard.data.find(sign, start) >= 0 for sign in _SIGNS):
                heard.since = now
            elif len(heard.data) > 4 * _CONTEXT:
                del heard.data[:-_CONTEXT]
        elif len(heard.data) > 2 * KEPT:
            del heard.data[:-KEPT]

    def seconds_until_due(self, now: float) -> float | None:
        """In how many seconds `told` has something to look at; None while nothing looks like a failure."""
        times = [
            min(stream.last + QUIET, stream.since + LATEST)
            for stream in self._streams.values()
            if stream.since is not None
        ]
        return max(0.0, min(times) - now) if times else None

    def completed(self, now: float, *, ended: bool = False) -> list[Failure]:
        """The failures that are complete. `ended`: the program is gone and nothing more will come."""
        found: list[Failure] = []
        for stream in self._streams.values():
            if stream.since is None:
                continue
            if ended or now >= stream.last + QUIET or now >= stream.since + LATEST:
                found += self._looked_at(stream)
        return found

    def _looked_at(self, stream: _Stream) -> list[Failure]:
        raw = bytes(stream.data).split(b"\n")
        found = _located(_lines(b"\n".join(raw).decode("utf-8", "replace")))
        if found:
            last = max(at for at, _ in found)
            stream.data = bytearray(b"\n".join(raw[last + 1 :]))
        if len(stream.data) > _CONTEXT:
            del stream.data[:-_CONTEXT]
        stream.since = None
        return list(dict.fromkeys(item for _, item in found))

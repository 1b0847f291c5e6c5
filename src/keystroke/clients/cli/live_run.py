"""Diagnoses failures in a command's output while it runs, for `keystroke run`.

Diagnosis runs on its own thread, so the output never waits for it. On a terminal a message is printed only
while the command is silent, between two lines or at a prompt (which is printed again), and never over a
full-screen program; remaining messages are printed at the end.
"""

from __future__ import annotations

import queue
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from keystroke.analysis.failures.report import QUIET, FailureWatcher
from keystroke.clients.cli.command_runner import OutputListener

if TYPE_CHECKING:
    from keystroke.analysis.failures.diagnose import Diagnosis
    from keystroke.analysis.failures.failure import Failure

_MAX_PLACES = 100  # distinct locations diagnosed in one run; a server may fail at one for hours
_MAX_COMPILED = 3  # compiler errors reported: later ones often follow from the first
_POLL = 0.05
_FULL_SCREEN = re.compile(rb"\x1b\[\?(?:1049|1047|47)([hl])")
_HARMLESS = re.compile(
    rb"\x1b\[[0-9;]*[mK]|\x1b\[\?(?:25|2004|1)[hl]|\x1b[=>]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"
)
_MAX_LINE = 500  # bytes of an unfinished line that are printed again


class TerminalLine:
    """Follows the bytes sent to a terminal, to tell whether another line may be printed now."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._full_screen = False

    def feed(self, data: bytes) -> None:
        if b"\x1b[?" in data:
            for change in _FULL_SCREEN.finditer(data):
                self._full_screen = change[1] == b"h"
        before, newline, rest = data.rpartition(b"\n")
        if newline:
            self._line.clear()
        self._line += (rest if newline else before + rest)[-2 * _MAX_LINE :]
        del self._line[: -2 * _MAX_LINE]

    def unfinished_line(self) -> bytes | None:
        """The unfinished line, to be printed again; None if nothing may be printed now."""
        if self._full_screen or len(self._line) > _MAX_LINE:
            return None
        line = bytes(self._line)
        bare = _HARMLESS.sub(b"", line)
        if bare in (b"", b"\r"):
            return b""
        # A line that moves the cursor (a progress bar, an edited line) cannot be printed again.
        return line if not re.search(rb"[\x00-\x08\x0b-\x1f\x7f]", bare) else None


class LiveRun(OutputListener):
    """`diagnose` runs on another thread; `describe` returns the text to print."""

    def __init__(
        self, diagnose: Callable[[Failure], Diagnosis | None], describe: Callable[[Diagnosis], str]
    ) -> None:
        self._diagnose, self._describe = diagnose, describe
        self._watch = FailureWatcher()
        self._one_terminal = sys.stdout.isatty() and sys.stderr.isatty()  # one terminal shows both
        self._lines = {1: TerminalLine(), 2: TerminalLine()}
        self._seen: set[tuple[str, str, int]] = set()
        self._compiled = 0
        self._failures: queue.SimpleQueue[Failure | None] = queue.SimpleQueue()
        self._diagnoses: queue.SimpleQueue[Diagnosis | None] = queue.SimpleQueue()
        self._waiting = 0  # failures queued and not yet diagnosed
        self._pending: list[Diagnosis] = []
        self._found: list[Diagnosis] = []
        self._last = 0.0
        self._worker: threading.Thread | None = None

    def on_output(self, stream: int, data: bytes) -> None:
        self._last = time.monotonic()
        self._watch.feed(stream, data, self._last)
        self._lines[2 if self._one_terminal else stream].feed(data)

    def poll_delay(self) -> float | None:
        if self._waiting or self._pending:
            return _POLL
        return self._watch.seconds_until_due(time.monotonic())

    def on_poll(self) -> None:
        now = time.monotonic()
        if self._watch.seconds_until_due(now) == 0.0:
            self._enqueue(self._watch.take_completed(now))
        self._collect()
        if self._pending and now - self._last >= QUIET:
            line = self._lines[2].unfinished_line()
            # On a terminal an unfinished line (a prompt) is printed again; in a file its end is awaited.
            if line is not None and (not line or sys.stderr.isatty()):
                self._print_pending(line)

    def finish(self) -> list[Diagnosis]:
        """Print the remaining messages; return all diagnoses, the latest last."""
        self._enqueue(self._watch.take_completed(time.monotonic(), ended=True))
        while self._waiting:
            self._collect(block=True)
        if self._worker is not None:
            self._failures.put(None)
            self._worker.join()
        self._print_pending(b"")
        return self._found

    def _enqueue(self, failures: list[Failure]) -> None:
        for failure in failures:
            if failure.place in self._seen or len(self._seen) >= _MAX_PLACES:
                continue
            self._seen.add(failure.place)
            self._compiled += failure.compiled
            if failure.compiled and self._compiled > _MAX_COMPILED:
                continue
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="diagnosis", daemon=True)
                self._worker.start()
            self._waiting += 1
            self._failures.put(failure)

    def _work(self) -> None:
        while (failure := self._failures.get()) is not None:
            try:
                self._diagnoses.put(self._diagnose(failure))
            except Exception:  # a failed diagnosis must not block the command
                self._diagnoses.put(None)

    def _collect(self, *, block: bool = False) -> None:
        while self._waiting:
            try:
                found = self._diagnoses.get(block)
            except queue.Empty:
                return
            self._waiting -= 1
            block = False
            if found is not None:
                self._found.append(found)
                self._pending.append(found)

    def _print_pending(self, line: bytes) -> None:
        """Print the pending messages. `line`: the unfinished line on the screen, to be printed again."""
        if not self._pending:
            return
        text = "\n".join(filter(None, map(self._describe, self._pending)))
        self._pending.clear()
        if not text:
            return
        try:
            if sys.stderr.isatty():
                text = text.replace("\n", "\r\n")  # while keys pass through, the terminal is raw
                end = "\r\n"
            else:
                end = "\n"
            sys.stderr.write(f"{end if line else ''}{text}{end}")
            sys.stderr.flush()
            if line and sys.stderr.isatty():
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()
        except (OSError, ValueError):
            pass  # the reader is gone

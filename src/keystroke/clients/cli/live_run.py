"""What `keystroke run` does while its command runs: hears, diagnoses, and says so when it disturbs nobody.

Diagnosing happens on a thread of its own, so the command's output never waits for it. On a terminal
something is said only while the command is silent, between two lines or at a prompt (which is then shown
again), and never over a program that fills the screen; what could not be said is said at the end.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from keystroke.analysis.failures.report import QUIET, FailureWatcher
from keystroke.clients.cli.screen import TerminalLine

if TYPE_CHECKING:
    from keystroke.analysis.failures.diagnose import Diagnosis
    from keystroke.analysis.failures.failure import Failure

_PLACES = 100  # different places of one run that are diagnosed; a server may fail in the same one for hours
_COMPILED = 3  # errors of compilers that are told: the first ones count, the others often follow from them
_POLL = 0.05


class LiveRun:
    """A listener of the runner. `diagnose` runs on another thread, `told` gives the text to print."""

    def __init__(
        self, diagnose: Callable[[Failure], Diagnosis | None], told: Callable[[Diagnosis], str]
    ) -> None:
        self._diagnose, self._told = diagnose, told
        self._watch = FailureWatcher()
        self._shared = sys.stdout.isatty() and sys.stderr.isatty()  # one terminal shows both
        self._screens = {1: TerminalLine(), 2: TerminalLine()}
        self._seen: set[tuple[str, str, int]] = set()
        self._compiled = 0
        self._asked: queue.SimpleQueue[Failure | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Diagnosis | None] = queue.SimpleQueue()
        self._waiting = 0  # failures asked about and not yet answered
        self._unsaid: list[Diagnosis] = []
        self._found: list[Diagnosis] = []
        self._last = 0.0
        self._worker: threading.Thread | None = None

    # ── the runner's side ─────────────────────────────────────────────────────────────────────

    def on_output(self, stream: int, data: bytes) -> None:
        self._last = time.monotonic()
        self._watch.feed(stream, data, self._last)
        self._screens[2 if self._shared else stream].feed(data)

    def poll_delay(self) -> float | None:
        if self._waiting or self._unsaid:
            return _POLL
        return self._watch.seconds_until_due(time.monotonic())

    def on_poll(self) -> None:
        now = time.monotonic()
        if self._watch.seconds_until_due(now) == 0.0:
            self._ask(self._watch.completed(now))
        self._collect()
        if self._unsaid and now - self._last >= QUIET:
            line = self._screens[2].unfinished()
            # A prompt on a terminal is shown again; in a file a line that was begun is waited for.
            if line is not None and (not line or sys.stderr.isatty()):
                self._say(line)

    def finish(self) -> list[Diagnosis]:
        """Everything that is left to say, and all that was found, the latest last."""
        self._ask(self._watch.completed(time.monotonic(), ended=True))
        while self._waiting:
            self._collect(block=True)
        if self._worker is not None:
            self._asked.put(None)
            self._worker.join()
        self._say(b"")
        return self._found

    # ── how ───────────────────────────────────────────────────────────────────────────────────

    def _ask(self, failures: list[Failure]) -> None:
        for failure in failures:
            if failure.place in self._seen or len(self._seen) >= _PLACES:
                continue
            self._seen.add(failure.place)
            self._compiled += failure.compiled
            if failure.compiled and self._compiled > _COMPILED:
                continue
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="diagnosis", daemon=True)
                self._worker.start()
            self._waiting += 1
            self._asked.put(failure)

    def _work(self) -> None:
        while (failure := self._asked.get()) is not None:
            try:
                self._answers.put(self._diagnose(failure))
            except Exception:  # a diagnosis that fails must not keep its command waiting
                self._answers.put(None)

    def _collect(self, *, block: bool = False) -> None:
        while self._waiting:
            try:
                found = self._answers.get(block)
            except queue.Empty:
                return
            self._waiting -= 1
            block = False
            if found is not None:
                self._found.append(found)
                self._unsaid.append(found)

    def _say(self, line: bytes) -> None:
        """Say what is unsaid. `line`: what stands on the screen's last line, to be shown again below."""
        if not self._unsaid:
            return
        text = "\n".join(said for found in self._unsaid if (said := self._told(found)))
        self._unsaid.clear()
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
            pass  # nobody reads it

"""A command that is started ahead of its work: it waits in its sandbox for one line of standard input.

Each does its work once, in a sandbox of its own, so that nothing is shared between two runs. Time, and the
limits that are measured, count from the moment the line is sent.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from keystroke.agent.sandbox.policy import CommandLimits, CompletedCommand, ExitReason, SandboxPolicy
from keystroke.agent.sandbox.sandbox import Sandbox
from keystroke.agent.sandbox.supervise import OnOutput
from keystroke.engine.base import Interrupt

_PATIENCE = 3600.0  # seconds that a command waits for its line


class StandbyCommand:
    """Starts at once, on a thread of its own. `ended` resolves when its last process has gone."""

    def __init__(
        self, sandbox: Sandbox, argv: Sequence[str], policy: SandboxPolicy, limits: CommandLimits
    ) -> None:
        self.ended: Future[CompletedCommand] = Future()
        self.stop = Interrupt()
        self._limits = limits
        self._on_output: OnOutput | None = None
        self._resumed = self._unread = self._closed = False
        self._lock = threading.Lock()
        self._input, self._line = os.pipe()
        arguments = sandbox, list(argv), policy
        threading.Thread(target=self._work, args=arguments, name="standby", daemon=True).start()

    def resume(
        self,
        line: str,
        interrupt: Interrupt | None = None,
        on_output: OnOutput | None = None,
        *,
        seconds: float | None = None,
    ) -> CompletedCommand | None:
        """Send the line and wait for the end, at most `seconds` (None: those of the limits). None where the
        command ended before it could read the line. Raises what starting the command raised."""
        began = time.monotonic()
        self._on_output = on_output
        self._resumed = True
        stop: Callable[[], None] = self.stop.set
        timer = threading.Timer(self._limits.seconds if seconds is None else seconds, stop)
        timer.daemon = True
        try:
            if not self._send(line):
                return None
            timer.start()
            if interrupt is not None:
                interrupt.add_callback(stop)
            ended = self.ended.result()
        finally:
            timer.cancel()
            if interrupt is not None:
                interrupt.remove_callback(stop)
            self.stop.set()
        if self._unread and ended.exit_reason is ExitReason.EXITED:
            return None
        if ended.exit_reason is ExitReason.INTERRUPTED and (interrupt is None or not interrupt.is_set):
            ended = replace(ended, exit_reason=ExitReason.TIMEOUT)
        return replace(ended, seconds=time.monotonic() - began)

    def close(self) -> None:
        """End the command and wait for its end. Idempotent."""
        self.stop.set()
        self.ended.exception()

    def _send(self, line: str) -> bool:
        with self._lock:
            if not self._closed:
                os.write(self._line, line.encode() + b"\n")
            return not self._closed

    def _show(self, text: str) -> None:
        if self._on_output is not None:
            self._on_output(text)

    def _work(self, sandbox: Sandbox, argv: list[str], policy: SandboxPolicy) -> None:
        limits = replace(self._limits, seconds=_PATIENCE)
        result: CompletedCommand | BaseException
        try:
            result = sandbox.run(
                argv,
                policy,
                limits,
                self.stop,
                on_output=self._show,
                stdin=self._input,
                idle=lambda: not self._resumed,
            )
        except BaseException as error:  # raised where the result is read
            result = error
        with self._lock:
            self._unread = bool(select.select([self._input], [], [], 0)[0])
            self._closed = True
            os.close(self._input)
            os.close(self._line)
        if isinstance(result, BaseException):
            self.ended.set_exception(result)
        else:
            self.ended.set_result(result)

"""Python interpreters that wait in their sandboxes for a program.

Each runs one program and ends. Starting one takes longer than most programs, so several wait, and the next is
started while the model generates. None outlives `close`.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from keystroke.agent.sandbox import CommandLimits, CompletedCommand, Sandbox, SandboxPolicy, StandbyCommand
from keystroke.engine.base import Interrupt

_WAIT = """\
import os, sys
sys.stdin.readline()
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
"""


class _WaitingInterpreter(StandbyCommand):
    """A standby command with a folder of its own."""

    def __init__(self, sandbox: Sandbox, start: str, limits: CommandLimits) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="keystroke-", ignore_cleanup_errors=True)
        argv = [sys.executable, "-I", "-B", "-S", "-c", _WAIT + start]
        super().__init__(sandbox, argv, SandboxPolicy(Path(self.folder.name)), limits)

    def close(self) -> None:
        super().close()
        self.folder.cleanup()


class InterpreterPool:
    """`start` is the code that each interpreter executes once `program.py` is in its folder."""

    def __init__(self, sandbox: Sandbox, start: str, limits: CommandLimits, size: int) -> None:
        self._sandbox, self._start, self._limits, self._size = sandbox, start, limits, size
        self._lock = threading.Lock()
        self._ready: list[_WaitingInterpreter] = []
        self._closed = False
        self._pool = ThreadPoolExecutor(size, "standby")  # cleans up ended interpreters
        for _ in range(size):
            self._ready.append(self._start_one())

    def __enter__(self) -> InterpreterPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, program: str, seconds: float, interrupt: Interrupt | None = None) -> CompletedCommand:
        """Run a program until it ends, its time is up, or it is interrupted. Time counts from this call,
        not from the start of the interpreter."""
        interpreter = self._take()
        try:
            code = Path(interpreter.folder.name, "program.py")
            code.write_text(program, encoding="utf-8", errors="surrogatepass")
            return interpreter.resume("", interrupt, seconds=seconds) or interpreter.ended.result()
        finally:
            self._pool.submit(interpreter.close)

    def close(self) -> None:
        """End all waiting interpreters and wait for their end. Idempotent."""
        with self._lock:
            self._closed = True
            waiting, self._ready = self._ready, []
        for interpreter in waiting:
            interpreter.stop.set()
        for interpreter in waiting:
            interpreter.close()
        self._pool.shutdown()

    def _take(self) -> _WaitingInterpreter:
        """Take a waiting interpreter and start another in its place."""
        with self._lock:
            if self._closed:
                raise RuntimeError("no program can be run after close")
            while self._ready:
                interpreter = self._ready.pop(0)
                if not interpreter.ended.done():
                    break
                self._pool.submit(interpreter.close)  # it timed out or was killed
            else:
                interpreter = self._start_one()
            self._ready.append(self._start_one())
        return interpreter

    def _start_one(self) -> _WaitingInterpreter:
        return _WaitingInterpreter(self._sandbox, self._start, self._limits)

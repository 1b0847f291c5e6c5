"""Python interpreters that wait in their sandboxes for a program.

Each runs one program and ends. Starting one takes longer than most programs, so several wait, and the next is
started while the model generates. None outlives `close`.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from keystroke.agent.sandbox import CommandLimits, CompletedCommand, ExitReason, Sandbox, SandboxPolicy
from keystroke.engine.base import Interrupt

_PATIENCE = 600.0  # seconds that an interpreter waits for a program
_WAIT = """\
import os, time
while not os.path.exists("program.py"):
    time.sleep(0.002)
"""


@dataclass(slots=True)
class _WaitingInterpreter:
    folder: tempfile.TemporaryDirectory[str]
    ended: Future[CompletedCommand]
    stop: Interrupt = field(default_factory=Interrupt)


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
        began = time.monotonic()
        stop: Callable[[], None] = interpreter.stop.set
        timer = threading.Timer(seconds, stop)
        timer.daemon = True
        try:
            root = Path(interpreter.folder.name)
            (root / "program.tmp").write_text(program, encoding="utf-8", errors="surrogatepass")
            (root / "program.tmp").rename(root / "program.py")
            timer.start()
            if interrupt is not None:
                interrupt.add_callback(stop)
            ended = interpreter.ended.result()
        finally:
            timer.cancel()
            if interrupt is not None:
                interrupt.remove_callback(stop)
            interpreter.stop.set()
            self._pool.submit(_clean_up, interpreter)
        if ended.exit_reason is ExitReason.INTERRUPTED and (interrupt is None or not interrupt.is_set):
            ended = replace(ended, exit_reason=ExitReason.TIMEOUT)
        return replace(ended, seconds=time.monotonic() - began)

    def close(self) -> None:
        """End all waiting interpreters and wait for their end. Idempotent."""
        with self._lock:
            self._closed = True
            waiting, self._ready = self._ready, []
        for interpreter in waiting:
            interpreter.stop.set()
        for interpreter in waiting:
            _clean_up(interpreter)
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
                self._pool.submit(_clean_up, interpreter)  # it timed out or was killed
            else:
                interpreter = self._start_one()
            self._ready.append(self._start_one())
        return interpreter

    def _start_one(self) -> _WaitingInterpreter:
        folder = tempfile.TemporaryDirectory(prefix="keystroke-", ignore_cleanup_errors=True)
        interpreter = _WaitingInterpreter(folder, Future())
        limits = replace(self._limits, seconds=_PATIENCE)
        argv = [sys.executable, "-I", "-B", "-S", "-c", _WAIT + self._start]

        def work() -> None:
            try:
                interpreter.ended.set_result(
                    self._sandbox.run(argv, SandboxPolicy(Path(folder.name)), limits, interpreter.stop)
                )
            except BaseException as error:  # raised where the result is read
                interpreter.ended.set_exception(error)

        threading.Thread(target=work, name="standby", daemon=True).start()
        return interpreter


def _clean_up(interpreter: _WaitingInterpreter) -> None:
    interpreter.ended.exception()  # waits for its end
    interpreter.folder.cleanup()

"""Interpreters that already wait in their sandboxes when there is a program for them.

Each runs one program and ends. Starting one takes longer than most programs, so as many as are checked
at a time stand ready, and the next is started while the model writes. None outlives `close`.
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
from types import TracebackType

from keystroke.agent.sandbox import Ended, Ending, Limits, Place, Sandbox
from keystroke.engine.base import Interrupt

_PATIENCE = 600.0  # seconds that one waits for a program before it is taken for forgotten
_WAIT = """\
import os, time
while not os.path.exists("program.py"):
    time.sleep(0.002)
"""


@dataclass(slots=True)
class _Waiting:
    folder: tempfile.TemporaryDirectory[str]
    ended: Future[Ended]
    stop: Interrupt = field(default_factory=Interrupt)


class Standby:
    """`start` is what each interpreter executes once `program.py` lies in its folder."""

    def __init__(self, sandbox: Sandbox, start: str, limits: Limits, size: int) -> None:
        self._sandbox, self._start, self._limits, self._size = sandbox, start, limits, size
        self._lock = threading.Lock()
        self._ready: list[_Waiting] = []
        self._closed = False
        self._pool = ThreadPoolExecutor(size, "standby")  # takes away what has ended
        for _ in range(size):
            self._ready.append(self._begun())

    def __enter__(self) -> Standby:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, program: str, seconds: float, interrupt: Interrupt | None = None) -> Ended:
        """Run a program to its end, to its time or to an interrupt. What it may take is bounded as always;
        time counts from here, not from when its interpreter was started."""
        one = self._taken()
        began = time.monotonic()
        stop: Callable[[], None] = one.stop.set
        timer = threading.Timer(seconds, stop)
        timer.daemon = True
        try:
            root = Path(one.folder.name)
            (root / "program.tmp").write_text(program, encoding="utf-8", errors="surrogatepass")
            (root / "program.tmp").rename(root / "program.py")
            timer.start()
            if interrupt is not None:
                interrupt.add_callback(stop)
            ended = one.ended.result()
        finally:
            timer.cancel()
            if interrupt is not None:
                interrupt.remove_callback(stop)
            one.stop.set()
            self._pool.submit(_gone, one)
        if ended.ending is Ending.INTERRUPTED and (interrupt is None or not interrupt.is_set):
            ended = replace(ended, ending=Ending.TIMEOUT)
        return replace(ended, seconds=time.monotonic() - began)

    def close(self) -> None:
        """End all that wait, and wait for that. Idempotent."""
        with self._lock:
            self._closed = True
            waiting, self._ready = self._ready, []
        for one in waiting:
            one.stop.set()
        for one in waiting:
            _gone(one)
        self._pool.shutdown()

    def _taken(self) -> _Waiting:
        """One that waits, and another begun in its place."""
        with self._lock:
            if self._closed:
                raise RuntimeError("no program can be run after close")
            while self._ready:
                one = self._ready.pop(0)
                if not one.ended.done():
                    break
                self._pool.submit(_gone, one)  # it waited too long, or was killed
            else:
                one = self._begun()
            self._ready.append(self._begun())
        return one

    def _begun(self) -> _Waiting:
        folder = tempfile.TemporaryDirectory(prefix="keystroke-", ignore_cleanup_errors=True)
        one = _Waiting(folder, Future())
        limits = replace(self._limits, seconds=_PATIENCE)
        argv = [sys.executable, "-I", "-B", "-S", "-c", _WAIT + self._start]

        def work() -> None:
            try:
                one.ended.set_result(self._sandbox.run(argv, Place(Path(folder.name)), limits, one.stop))
            except BaseException as error:  # whoever waits for it hears of it
                one.ended.set_exception(error)

        threading.Thread(target=work, name="standby", daemon=True).start()
        return one


def _gone(one: _Waiting) -> None:
    one.ended.exception()  # waits for its end
    one.folder.cleanup()

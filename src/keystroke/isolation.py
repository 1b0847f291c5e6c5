"""Runs a function on untrusted input in a process of its own, with limits on time and memory.

A process that exceeds a limit is killed, the call raises LimitExceeded, and the next call starts a new one.
Arguments and results are plain values in MessagePack; nothing is unpickled. macOS does not limit address
space, so there only the time is limited.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from importlib import import_module
from typing import Any, BinaryIO

import msgspec

from keystroke.errors import EngineError

START = 60.0  # seconds a process may take to start on a busy machine
_GRACE = 2.0  # seconds after which an overdue process ends itself, if its parent does not


class LimitExceeded(EngineError):
    """The call exceeded its time or memory limit and was stopped."""

    code = "over_limit"


class IsolatedFunction:
    """Calls `target` ("module:function") in a worker process, one call at a time; thread-safe. The process
    starts with the first call and is reused; after it was killed, the next call starts a new one."""

    def __init__(self, target: str, *, seconds: float, memory: int) -> None:
        self._target, self._seconds, self._memory = target, seconds, memory
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._watch: weakref.finalize[Any, IsolatedFunction]
        self._closed = False

    def call(self, *arguments: Any) -> Any:
        """The function's result. Blocks; raises LimitExceeded, or EngineError if the function raises."""
        with self._lock:
            if self._closed:
                raise EngineError("The worker process was closed.")
            process = self._started()
            deadline = time.monotonic() + self._seconds
            try:
                _send(process.stdin, msgspec.msgpack.encode(arguments), deadline)
                kind, value = msgspec.msgpack.decode(_receive(process.stdout, deadline))
            except (OSError, EOFError, TimeoutError, msgspec.DecodeError):
                self._end()
                raise LimitExceeded(
                    f"It took more than {self._seconds:g} s or {self._memory >> 20} MB and was stopped."
                ) from None
        if kind == "memory":
            raise LimitExceeded(f"It took more than {self._memory >> 20} MB and was stopped.")
        if kind == "error":
            raise EngineError(str(value))
        return value

    def close(self) -> None:
        """Kill the process. A running call raises LimitExceeded."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        command = [sys.executable, "-P", "-m", "keystroke.isolation", self._target]
        self._process = subprocess.Popen(
            [*command, str(self._seconds), str(self._memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # Ctrl-C at a terminal reaches only the parent
        )
        self._watch = weakref.finalize(self, self._process.kill)  # also at interpreter exit
        try:
            _receive(self._process.stdout, time.monotonic() + START)
        except (OSError, EOFError, TimeoutError):
            self._end()
            raise EngineError("A worker process could not be started; is memory or disk short?") from None
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        self._watch.detach()
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _send(pipe: Any, payload: bytes, deadline: float) -> None:
    left = memoryview(len(payload).to_bytes(8, "big") + payload)
    os.set_blocking(pipe.fileno(), False)
    while left:
        _wait(pipe, deadline, write=True)
        try:
            left = left[os.write(pipe.fileno(), left[: 1 << 16]) :]
        except BlockingIOError:
            continue


def _receive(pipe: Any, deadline: float) -> bytes:
    size = int.from_bytes(_exactly(pipe, 8, deadline), "big")
    return _exactly(pipe, size, deadline)


def _exactly(pipe: Any, size: int, deadline: float) -> bytes:
    parts: list[bytes] = []
    while size:
        _wait(pipe, deadline, write=False)
        part = os.read(pipe.fileno(), min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _wait(pipe: Any, deadline: float, *, write: bool) -> None:
    left = deadline - time.monotonic()
    ready = select.poll()  # select() fails for descriptors above 1023
    ready.register(pipe.fileno(), select.POLLOUT if write else select.POLLIN)
    if left <= 0 or not ready.poll(left * 1000):
        raise TimeoutError


# The worker process


def _serve(target: str, seconds: float, memory: int) -> None:
    """Serve calls from standard input until it closes."""
    module, _, name = target.partition(":")
    function = getattr(import_module(module), name)
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of the function goes to standard error
    _limit_memory(memory)
    _write(answers, b"")
    while head := requests.read(8):
        arguments = msgspec.msgpack.decode(requests.read(int.from_bytes(head, "big")))
        signal.setitimer(signal.ITIMER_REAL, seconds + _GRACE)  # SIGALRM kills this process
        try:
            reply = msgspec.msgpack.encode(("value", function(*arguments)))
        except MemoryError:
            reply = msgspec.msgpack.encode(("memory", None))
        except Exception as error:
            reply = msgspec.msgpack.encode(("error", f"{type(error).__name__}: {error}"[:2000]))
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(answers, reply)


def _write(pipe: BinaryIO, payload: bytes) -> None:
    pipe.write(len(payload).to_bytes(8, "big") + payload)
    pipe.flush()


def _limit_memory(more: int) -> None:
    """Limit the address space to `more` bytes above its current size."""
    try:
        import resource

        with open("/proc/self/statm", "rb") as about:
            held = int(about.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (held + more, held + more))
    except (ImportError, OSError, ValueError):
        return


if __name__ == "__main__":
    _serve(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))

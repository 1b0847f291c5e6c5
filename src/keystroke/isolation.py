"""A function in a process of its own, so that what a stranger wrote can be given up on.

A call is bounded in time and memory. A process over its bounds is ended, the call raises OverLimit, and
the next one finds a fresh process. Arguments and results are plain values (MessagePack): nothing that comes
back is unpickled. It knows nothing of what the function does. Where the system does not bound address space
(macOS), only time does.
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

START = 60.0  # seconds a process may take to say that it is there: a cold disk, a busy machine
_GRACE = 2.0  # seconds after which an overdue process ends itself, should nobody be left to end it


class LimitExceeded(EngineError):
    """The work took more time or memory than it may, and was ended."""

    code = "over_limit"


class IsolatedFunction:
    """Calls `target` ("module:function") elsewhere, one call at a time; safe to use from many threads. The
    process starts with the first call, stays for the next ones, and is started anew after it was ended."""

    def __init__(self, target: str, *, seconds: float, memory: int) -> None:
        self._target, self._seconds, self._memory = target, seconds, memory
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._watch: weakref.finalize[Any, IsolatedFunction]
        self._closed = False

    def call(self, *arguments: Any) -> Any:
        """What the function returned. Blocks; raises OverLimit, or EngineError for an exception of its
        own."""
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
        """End the process. A call under way raises OverLimit."""
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
            start_new_session=True,  # Ctrl-C at a terminal is its parent's to act upon
        )
        self._watch = weakref.finalize(self, self._process.kill)  # also when the interpreter ends
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
    ready = select.poll()  # select() knows no descriptor above 1023, and a server has many
    ready.register(pipe.fileno(), select.POLLOUT if write else select.POLLIN)
    if left <= 0 or not ready.poll(left * 1000):
        raise TimeoutError


# The other side


def _serve(target: str, seconds: float, memory: int) -> None:
    """Answer calls from standard input until it ends."""
    module, _, name = target.partition(":")
    function = getattr(import_module(module), name)
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the function prints is nobody's answer
    _limit_memory(memory)
    _write(answers, b"")
    while head := requests.read(8):
        arguments = msgspec.msgpack.decode(requests.read(int.from_bytes(head, "big")))
        signal.setitimer(signal.ITIMER_REAL, seconds + _GRACE)  # ends this process by its default action
        try:
            said = msgspec.msgpack.encode(("value", function(*arguments)))
        except MemoryError:
            said = msgspec.msgpack.encode(("memory", None))
        except Exception as error:
            said = msgspec.msgpack.encode(("error", f"{type(error).__name__}: {error}"[:2000]))
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(answers, said)


def _write(pipe: BinaryIO, payload: bytes) -> None:
    pipe.write(len(payload).to_bytes(8, "big") + payload)
    pipe.flush()


def _limit_memory(more: int) -> None:
    """So much beyond what the process has by now."""
    try:
        import resource

        with open("/proc/self/statm", "rb") as about:
            held = int(about.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (held + more, held + more))
    except (ImportError, OSError, ValueError):
        return


if __name__ == "__main__":
    _serve(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))

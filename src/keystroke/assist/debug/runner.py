"""A command run as if we were not there: its output passes through untouched, and its end is kept to read.

Law: no byte is added, dropped or held back. Where our own output is a terminal the command gets one too, with
its size, its signals and its job control. How it ended is told exactly, a signal as a signal.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import tty
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from keystroke.errors import InputError, NotFound

KEPT = 512 * 1024  # bytes of output kept; a traceback stands near the end
_PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, slots=True)
class Ended:
    """`code` as `subprocess` tells it: negative for a signal. `output`: the last part of what was printed."""

    code: int
    output: str
    timed_out: bool = False


class Tail:
    """The last bytes of a stream."""

    def __init__(self, size: int = KEPT) -> None:
        self._size = size
        self._data = bytearray()

    def add(self, data: bytes) -> None:
        self._data += data
        if len(self._data) > 2 * self._size:
            del self._data[: len(self._data) - self._size]

    def text(self) -> str:
        return bytes(self._data[-self._size :]).decode("utf-8", "replace")


def run_command(command: Sequence[str], cwd: Path | None = None) -> Ended:
    """Run a command in the foreground, its input and output ours."""
    terminals = [fd for fd in (1, 2) if os.isatty(fd)]
    try:
        if terminals and os.isatty(0):
            return _on_terminal(command, terminals, cwd)
        return _through_pipes(command, cwd)
    except FileNotFoundError:
        if cwd is not None and not cwd.is_dir():
            raise NotFound(f"the folder {cwd} does not exist; run the command where it does") from None
        raise NotFound(f"there is no command {command[0]!r}; check its spelling and your PATH") from None
    except PermissionError:
        raise InputError(
            f"{command[0]} is not a program; make it executable, or name its interpreter"
        ) from None
    except OSError as error:
        raise InputError(f"{command[0]} cannot be run: {error.strerror}") from None


def _through_pipes(command: Sequence[str], cwd: Path | None) -> Ended:
    child = subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stderr is not None
    tail = Tail()
    routes = {child.stdout.fileno(): 1, child.stderr.fileno(): 2}
    with child, _signals(child.pid, shared=True):
        while routes:
            ready, _, _ = select.select(list(routes), [], [])
            for source in ready:
                data = os.read(source, 65536)
                if not data:
                    del routes[source]
                    continue
                tail.add(data)
                _write(routes[source], data)
        return Ended(child.wait(), tail.text())


def _on_terminal(command: Sequence[str], terminals: list[int], cwd: Path | None) -> Ended:
    """The command on a terminal of its own; an output that is not one of ours stays where it leads."""
    main, side = pty.openpty()
    pipe = os.pipe() if len(terminals) == 1 else None
    streams: dict[str, Any] = {"stdout": side, "stderr": side}
    if pipe is not None:
        streams["stderr" if terminals == [1] else "stdout"] = pipe[1]
    with contextlib.suppress(termios.error):
        termios.tcsetattr(side, termios.TCSANOW, termios.tcgetattr(0))
    _copy_size(main)
    try:
        child = subprocess.Popen(
            command, cwd=cwd, stdin=side, start_new_session=True, preexec_fn=_own_terminal, **streams
        )
    except OSError:
        for fd in (main, side, *(pipe or ())):
            os.close(fd)
        raise
    os.close(side)
    if pipe is not None:
        os.close(pipe[1])
    other = 3 - terminals[0]
    tail = Tail()
    try:
        with _signals(child.pid, shared=False), _resized(main), _raw(0):
            code = _ferry(child, main, pipe[0] if pipe else None, terminals[0], other, tail)
    finally:
        os.close(main)
        if pipe is not None:
            os.close(pipe[0])
    return Ended(code, tail.text())


def _own_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _ferry(
    child: subprocess.Popen[bytes], main: int, pipe: int | None, screen: int, other: int, tail: Tail
) -> int:
    """Carry bytes between our terminal and the command's until it is gone and all it wrote was read."""
    sources = [main, 0] + ([pipe] if pipe is not None else [])
    while True:
        ready, _, _ = select.select(sources, [], [], 0.2)
        if 0 in ready:
            typed = os.read(0, 65536)
            if typed:
                _write(main, typed)
            else:
                sources.remove(0)
        if pipe is not None and pipe in ready:
            data = os.read(pipe, 65536)
            if data:
                tail.add(data)
                _write(other, data)
            else:
                sources.remove(pipe)
        if main in ready:
            try:
                data = os.read(main, 65536)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                data = b""  # the last writer closed the terminal
            if not data:
                if pipe is not None and pipe in sources:
                    _drain(pipe, other, tail)
                return child.wait()
            tail.add(data)
            _write(screen, data)
        if not ready and (ended := _state(child)) is not None:
            return ended


def _drain(source: int, target: int, tail: Tail) -> None:
    while data := os.read(source, 65536):
        tail.add(data)
        _write(target, data)


def _state(child: subprocess.Popen[bytes]) -> int | None:
    """The exit code of a command that is gone, though something it left behind may hold its terminal. One
    that stopped itself (Ctrl-Z) stops us with it, and goes on with us."""
    try:
        pid, status = os.waitpid(child.pid, os.WNOHANG | os.WUNTRACED)
    except ChildProcessError:
        return child.wait()
    if not pid:
        return None
    if os.WIFSTOPPED(status):
        with _cooked(0):
            os.kill(os.getpid(), signal.SIGSTOP)
        os.killpg(child.pid, signal.SIGCONT)
        return None
    child.returncode = os.waitstatus_to_exitcode(status)
    return child.returncode


_before: list[Any] = []


@contextlib.contextmanager
def _raw(fd: int) -> Iterator[None]:
    """Keys go to the command as they are typed; its own terminal gives them their meaning."""
    try:
        _before.append(termios.tcgetattr(fd))
    except termios.error:
        yield
        return
    try:
        tty.setraw(fd, termios.TCSANOW)
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, _before.pop())


@contextlib.contextmanager
def _cooked(fd: int) -> Iterator[None]:
    if _before:
        termios.tcsetattr(fd, termios.TCSADRAIN, _before[-1])
    yield
    if _before:
        tty.setraw(fd, termios.TCSANOW)


def _copy_size(main: int) -> None:
    with contextlib.suppress(OSError):
        size = fcntl.ioctl(0, termios.TIOCGWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
        fcntl.ioctl(main, termios.TIOCSWINSZ, size)


@contextlib.contextmanager
def _resized(main: int) -> Iterator[None]:
    before = signal.signal(signal.SIGWINCH, lambda *_: _copy_size(main))
    try:
        yield
    finally:
        signal.signal(signal.SIGWINCH, before)


@contextlib.contextmanager
def _signals(pid: int, *, shared: bool) -> Iterator[None]:
    """Signals sent to us reach the command. `shared`: it hears Ctrl-C by itself, for it is in our group."""

    def pass_on(number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def interrupt(number: int, _frame: FrameType | None) -> None:
        if not shared or not _in_foreground():
            pass_on(number, None)

    handlers: dict[signal.Signals, Any] = dict.fromkeys(_PASSED_ON, pass_on)
    handlers[signal.SIGINT] = interrupt
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_foreground() -> bool:
    """Whether Ctrl-C on our terminal reaches our whole group, the command included."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _write(fd: int, data: bytes) -> None:
    """All of it; a reader that went away is the command's business, not ours."""
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            select.select([], [fd], [])
        except OSError:
            return


def run_quietly(command: str | Sequence[str], cwd: Path, seconds: float) -> Ended:
    """Run a command that the user named as a check: its output kept, its time limited, its children ended."""
    shell = isinstance(command, str)
    try:
        child = subprocess.Popen(
            command,
            cwd=cwd,
            shell=shell,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise NotFound(f"there is no command {command[0]!r}; check its spelling and your PATH") from None
    except OSError as error:
        raise InputError(f"the command cannot be run: {error.strerror}") from None
    late = False
    try:
        output, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        late = True
        _end(child)
        output, _ = child.communicate()
    except BaseException:
        _end(child)
        child.wait()
        raise
    return Ended(child.returncode, output[-KEPT:].decode("utf-8", "replace"), late)


def _end(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)

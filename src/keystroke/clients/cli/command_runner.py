"""A command run as if we were not there: its output passes through untouched, and a listener hears it.

No byte is added, dropped or held back. Where our own output is a terminal the command gets one too, with
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
from typing import Any, Protocol

from keystroke.errors import InputError, NotFound

KEPT = 512 * 1024  # bytes of a check's output that are kept; what matters stands near its end
_PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_GLANCE = 0.2  # seconds between two looks at whether the command is gone


@dataclass(frozen=True, slots=True)
class CommandResult:
    """`code` as `subprocess` tells it: negative for a signal. `output`: the last part of what was printed."""

    code: int
    output: str
    timed_out: bool = False


class OutputListener(Protocol):
    """Who hears what a command prints while it runs. Every call comes from the thread that runs it, and must
    return quickly: meanwhile the command's output waits."""

    def on_output(self, stream: int, data: bytes) -> None:
        """`data` was written to our stream 1 or 2."""

    def poll_delay(self) -> float | None:
        """In how many seconds `turn` is wanted; None if there is no hurry."""

    def on_poll(self) -> None:
        """Something passed, or the time is over."""


class Deaf:
    """A listener that wants nothing."""

    def heard(self, stream: int, data: bytes) -> None:
        pass

    def wait(self) -> float | None:
        return None

    def turn(self) -> None:
        pass


def run_command(
    command: Sequence[str], cwd: Path | None = None, listener: OutputListener | None = None
) -> int:
    """Run a command in the foreground, its input and output ours. Its code as `subprocess` tells it."""
    try:
        return _Foreground(listener or Deaf()).run(command, cwd)
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


class _Foreground:
    """A command and the ways its bytes take. Each of our outputs that is a terminal is one for the command
    too; the others are pipes. Keys go to the command's terminal if they come from ours; any other input it
    reads itself."""

    def __init__(self, listener: OutputListener) -> None:
        self.listener = listener
        self.terminals = [fd for fd in (1, 2) if os.isatty(fd)]
        self.own = bool(self.terminals) and os.isatty(0)  # the command gets a session of its own
        self.routes: dict[int, int] = {}  # what we read -> where it goes
        self.main = -1

    def run(self, command: Sequence[str], cwd: Path | None) -> int:
        given: list[int] = []  # the command's ends
        try:
            streams = self._open(given)
            child = subprocess.Popen(
                command,
                cwd=cwd,
                stdin=streams.pop(0, None) if self.own else None,
                stdout=streams[1],
                stderr=streams[2],
                start_new_session=self.own,
                preexec_fn=_own_terminal if self.own else None,
            )
            while given:
                os.close(given.pop())
            alone = contextlib.nullcontext()
            resized = _resized(self.main, None if self.own else child.pid) if self.main >= 0 else alone
            with _signals(child.pid, shared=not self.own), resized, _raw(0) if self.own else alone:
                return self._ferry(child)
        finally:
            for fd in (*given, *self.routes):
                os.close(fd)

    def _open(self, given: list[int]) -> dict[int, int]:
        streams: dict[int, int] = {}
        if self.terminals:
            self.main, side = pty.openpty()
            self.routes[self.main] = self.terminals[0]
            given.append(side)
            streams |= dict.fromkeys((*self.terminals, *([0] if self.own else [])), side)
            with contextlib.suppress(termios.error):
                like = termios.tcgetattr(self.terminals[0])
                if not self.own:
                    like[1] &= ~termios.OPOST  # our own terminal ends the lines
                termios.tcsetattr(side, termios.TCSANOW, like)
            _copy_size(self.main)
        for fd in (1, 2):
            if fd not in streams:
                read, streams[fd] = os.pipe()
                self.routes[read] = fd
                given.append(streams[fd])
        return streams

    def _ferry(self, child: subprocess.Popen[bytes]) -> int:
        """Carry bytes until the command is gone and all it wrote was read."""
        keys = [0] if self.own else []
        while self.routes:
            wait = self.listener.poll_delay()
            ready, _, _ = select.select([*self.routes, *keys], [], [], min(_GLANCE, wait or _GLANCE))
            for source in ready:
                if source == 0:
                    typed = os.read(0, 65536)
                    if typed:
                        _write(self.main, typed)
                    else:
                        keys.clear()
                    continue
                data = _read(source)
                if data:
                    self.listener.on_output(self.routes[source], data)
                # Where nobody reads any more the command shall notice, as if it had written there itself.
                if not data or not _write(self.routes[source], data):
                    del self.routes[source]
                    os.close(source)
            self.listener.on_poll()
            if not ready and (ended := self._state(child)) is not None:
                return ended
        return child.wait()

    def _state(self, child: subprocess.Popen[bytes]) -> int | None:
        """The exit code of a command that is gone, though something it left behind may hold its streams. One
        with a terminal of its own that stopped itself (Ctrl-Z) stops us with it, and goes on with us."""
        if not self.own:
            return child.poll()
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


def _own_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _read(source: int) -> bytes:
    try:
        return os.read(source, 65536)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return b""  # the last writer closed the terminal


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
    ours = next((fd for fd in (0, 1, 2) if os.isatty(fd)), 0)
    with contextlib.suppress(OSError):
        size = fcntl.ioctl(ours, termios.TIOCGWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
        fcntl.ioctl(main, termios.TIOCSWINSZ, size)


@contextlib.contextmanager
def _resized(main: int, pid: int | None) -> Iterator[None]:
    """Its terminal changes with ours. `pid`: a command whose session is ours is not told by the system."""

    def changed(number: int, _frame: FrameType | None) -> None:
        _copy_size(main)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    before = signal.signal(signal.SIGWINCH, changed)
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


def _write(fd: int, data: bytes) -> bool:
    """All of it; False where the reader went away."""
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            select.select([], [fd], [])
        except OSError:
            return False
    return True


def run_captured(command: str | Sequence[str], cwd: Path, seconds: float) -> CommandResult:
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
    return CommandResult(child.returncode, output[-KEPT:].decode("utf-8", "replace"), late)


def _end(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)

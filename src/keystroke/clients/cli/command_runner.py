"""Runs a command transparently: its output passes through unchanged while a listener receives a copy.

No byte is added, dropped or delayed. Where our own output is a terminal, the command gets a pseudo-terminal
with its size, signals and job control. Its exit code or signal is returned as `subprocess` reports it.
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
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from keystroke.clients.cli.interruption import signal_handlers
from keystroke.errors import InputError, NotFound

MAX_OUTPUT = 512 * 1024  # bytes kept of a check's output, from its end
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_POLL = 0.2  # seconds between checks whether the command has ended


@dataclass(frozen=True, slots=True)
class CommandResult:
    """`code` as `subprocess` reports it: negative for a signal. `output`: the end of what was printed."""

    code: int
    output: str
    timed_out: bool = False


class OutputListener:
    """Receives a copy of a command's output; this base class ignores it. All calls come from the thread that
    runs the command and must return quickly, because the output waits for them."""

    def on_output(self, stream: int, data: bytes) -> None:
        """`data` was written to stream 1 or 2."""

    def poll_delay(self) -> float | None:
        """The number of seconds until `on_poll` should be called; None for no particular time."""
        return None

    def on_poll(self) -> None:
        """Called after output, and after `poll_delay`."""


def run_command(command: Sequence[str], listener: OutputListener | None = None) -> int:
    """Run a command in the foreground with our input and output. Returns its code as `subprocess` does."""
    try:
        return _Foreground(listener or OutputListener()).run(command)
    except FileNotFoundError:
        raise NotFound(f"there is no command {command[0]!r}; check its spelling and your PATH") from None
    except PermissionError:
        raise InputError(
            f"{command[0]} is not executable; make it executable, or run it with its interpreter"
        ) from None
    except OSError as error:
        raise InputError(f"{command[0]} cannot be run: {error.strerror}") from None


class _Foreground:
    """Copies bytes between a command and our streams. Each output that is a terminal is a pseudo-terminal for
    the command; the others are pipes. Keys from our terminal go to the command's; it reads any other input
    itself."""

    def __init__(self, listener: OutputListener) -> None:
        self.listener = listener
        self.terminals = [fd for fd in (1, 2) if os.isatty(fd)]
        self.own_session = bool(self.terminals) and os.isatty(0)  # the command gets its own session
        self.routes: dict[int, int] = {}  # descriptor we read -> descriptor we write
        self.main = -1

    def run(self, command: Sequence[str]) -> int:
        child_ends: list[int] = []  # the command's ends
        try:
            streams = self._open(child_ends)
            child = subprocess.Popen(
                command,
                stdin=streams.pop(0, None) if self.own_session else None,
                stdout=streams[1],
                stderr=streams[2],
                start_new_session=self.own_session,
                preexec_fn=_own_terminal if self.own_session else None,
            )
            while child_ends:
                os.close(child_ends.pop())
            unchanged = contextlib.nullcontext()
            signalled = None if self.own_session else child.pid
            resized = _forward_size(self.main, signalled) if self.main >= 0 else unchanged
            with (
                _forward_signals(child.pid, shared=not self.own_session),
                resized,
                _raw_mode() if self.own_session else unchanged,
            ):
                return self._copy(child)
        finally:
            for fd in (*child_ends, *self.routes):
                os.close(fd)

    def _open(self, child_ends: list[int]) -> dict[int, int]:
        streams: dict[int, int] = {}
        if self.terminals:
            self.main, side = pty.openpty()
            self.routes[self.main] = self.terminals[0]
            child_ends.append(side)
            streams |= dict.fromkeys((*self.terminals, *([0] if self.own_session else [])), side)
            with contextlib.suppress(termios.error):
                mode = termios.tcgetattr(self.terminals[0])
                if not self.own_session:
                    mode[1] &= ~termios.OPOST  # our own terminal ends the lines
                termios.tcsetattr(side, termios.TCSANOW, mode)
            _copy_size(self.main)
        for fd in (1, 2):
            if fd not in streams:
                read, streams[fd] = os.pipe()
                self.routes[read] = fd
                child_ends.append(streams[fd])
        return streams

    def _copy(self, child: subprocess.Popen[bytes]) -> int:
        """Copy bytes until the command has ended and all its output was read."""
        keys = [0] if self.own_session else []
        while self.routes:
            wait = self.listener.poll_delay()
            ready, _, _ = select.select([*self.routes, *keys], [], [], min(_POLL, wait or _POLL))
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
                # If our reader is gone, close the command's end, so that it gets the same error.
                if not data or not _write(self.routes[source], data):
                    del self.routes[source]
                    os.close(source)
            self.listener.on_poll()
            if not ready and (ended := self._poll_child(child)) is not None:
                return ended
        return child.wait()

    def _poll_child(self, child: subprocess.Popen[bytes]) -> int | None:
        """The exit code if the command has ended, even if a process it started still holds its streams. If it
        stopped itself (Ctrl-Z), stop this process too, and resume both together."""
        if not self.own_session:
            return child.poll()
        try:
            pid, status = os.waitpid(child.pid, os.WNOHANG | os.WUNTRACED)
        except ChildProcessError:
            return child.wait()
        if not pid:
            return None
        if os.WIFSTOPPED(status):
            with _original_mode():
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


_saved_modes: list[Any] = []


@contextlib.contextmanager
def _raw_mode() -> Iterator[None]:
    """Raw mode: keys go to the command unprocessed, and its own terminal interprets them."""
    try:
        _saved_modes.append(termios.tcgetattr(0))
    except termios.error:
        yield
        return
    try:
        tty.setraw(0, termios.TCSANOW)
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, _saved_modes.pop())


@contextlib.contextmanager
def _original_mode() -> Iterator[None]:
    if _saved_modes:
        termios.tcsetattr(0, termios.TCSADRAIN, _saved_modes[-1])
    yield
    if _saved_modes:
        tty.setraw(0, termios.TCSANOW)


def _copy_size(main: int) -> None:
    ours = next((fd for fd in (0, 1, 2) if os.isatty(fd)), 0)
    with contextlib.suppress(OSError):
        size = fcntl.ioctl(ours, termios.TIOCGWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
        fcntl.ioctl(main, termios.TIOCSWINSZ, size)


def _forward_size(main: int, pid: int | None) -> AbstractContextManager[None]:
    """Keep its terminal's size equal to ours. `pid`: a command in our session, which needs the signal too."""

    def on_resize(number: int, _frame: FrameType | None) -> None:
        _copy_size(main)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    return signal_handlers({signal.SIGWINCH: on_resize})


def _forward_signals(pid: int, *, shared: bool) -> AbstractContextManager[None]:
    """Forward signals to the command. `shared`: it is in our process group and gets Ctrl-C itself."""

    def forward(number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def interrupt(number: int, _frame: FrameType | None) -> None:
        if not shared or not _in_foreground():
            forward(number, None)

    handlers: dict[signal.Signals, Any] = dict.fromkeys(_FORWARDED, forward)
    handlers[signal.SIGINT] = interrupt
    return signal_handlers(handlers)


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
    """Write all of `data`; False if the reader is gone."""
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            select.select([], [fd], [])
        except OSError:
            return False
    return True


def run_captured(command: str | Sequence[str], cwd: Path, seconds: float) -> CommandResult:
    """Run a command with a time limit and capture its output; at the limit its process group is killed."""
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
    timed_out = False
    try:
        output, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        timed_out = True
        _kill_group(child)
        output, _ = child.communicate()
    except BaseException:
        _kill_group(child)
        child.wait()
        raise
    return CommandResult(child.returncode, output[-MAX_OUTPUT:].decode("utf-8", "replace"), timed_out)


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)

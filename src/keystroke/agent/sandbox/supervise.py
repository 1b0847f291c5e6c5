"""Runs one command, reads its output and enforces its limits.

However it ends (a limit, an interrupt, an error here), no process of the command outlives the call.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from keystroke.agent.sandbox.cgroup import ControlGroup, process_limit
from keystroke.agent.sandbox.policy import CommandLimits, CompletedCommand, ExitReason, OutputBuffer
from keystroke.agent.sandbox.processes import end_group, end_namespace, end_tree, process_tree
from keystroke.engine.base import Interrupt
from keystroke.errors import InputError, NotFound

_MEASURE_SECONDS = 0.05  # between two measurements of the command
_POLL_SECONDS = 0.02  # between two looks at the machine's task count
_IDLE_SECONDS = 0.25  # between two looks at a command that waits for its input
_DRAIN_SECONDS = 2.0  # to wait for the last output of an ended tree

OnOutput = Callable[[str], None]


def supervise(
    argv: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    limits: CommandLimits,
    interrupt: Interrupt | None = None,
    on_output: OnOutput | None = None,
    disk: Path | None = None,
    unused: int = 0,
    namespace: bool = False,
    descriptors: Sequence[int] = (),
    stdin: int | None = None,
    idle: Callable[[], bool] | None = None,
) -> CompletedCommand:
    """Run `argv` until it ends or exceeds a limit. `disk` is a folder whose file system must keep free
    space; `unused` processes of the tree belong to the sandbox; with `namespace` its only child is the
    first process of a namespace; it inherits `descriptors`. `stdin` is its standard input; while `idle`
    returns True it waits there and is not measured. NotFound or InputError where it cannot be started."""
    with process_limit(limits.processes + unused) as group:
        child = _start([*group.prefix, *argv], argv[0], cwd, env, descriptors, stdin)
        watch = _Watch(child, group, limits, interrupt, on_output, disk or cwd, unused, idle)
        return _supervise(child, watch, namespace)


def _start(
    argv: Sequence[str],
    name: str,
    cwd: Path,
    env: Mapping[str, str],
    descriptors: Sequence[int],
    stdin: int | None,
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            argv,
            cwd=cwd,
            env=dict(env),
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=descriptors,
        )
    except FileNotFoundError:
        raise NotFound(f"there is no command {name!r}; check its spelling and your PATH") from None
    except OSError as error:
        raise InputError(f"{name} cannot be run: {error.strerror}") from None


def _supervise(child: subprocess.Popen[bytes], watch: _Watch, namespace: bool) -> CompletedCommand:
    started = time.monotonic()
    try:
        ending = watch.wait_for_end(started)
    finally:
        if child.poll() is None and namespace and end_namespace(child.pid):
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_DRAIN_SECONDS)
        if child.poll() is None:
            end_tree(child.pid)
        child.wait()
        end_group(child.pid)
        watch.close()
    return CompletedCommand(
        child.returncode, watch.output.text(), ending, time.monotonic() - started, watch.output.printed
    )


class _Watch:
    def __init__(
        self,
        child: subprocess.Popen[bytes],
        group: ControlGroup,
        limits: CommandLimits,
        interrupt: Interrupt | None,
        on_output: OnOutput | None,
        disk: Path,
        unused: int,
        idle: Callable[[], bool] | None,
    ) -> None:
        self.output = OutputBuffer()
        self._idle = idle or (lambda: False)
        self._child, self._group = child, group
        self._limits, self._interrupt = limits, interrupt
        self._on_output, self._disk, self._unused = on_output, disk, unused
        assert child.stdout is not None
        self._pipe = child.stdout.fileno()
        self._free_bytes = _free_bytes(disk)
        self._next_measurement = time.monotonic() + _MEASURE_SECONDS  # nothing uses much before that
        self._count_tasks = _count_tasks()
        # An interrupt from another thread ends the wait at once.
        self._waker, self._wake = os.pipe()
        self._lock, self._closed = threading.Lock(), False
        if interrupt is not None:
            interrupt.add_callback(self._on_interrupt)

    def close(self) -> None:
        if self._interrupt is not None:
            self._interrupt.remove_callback(self._on_interrupt)
        if self._child.stdout is not None:
            self._child.stdout.close()
        with self._lock:  # an interrupting thread must not write to a reused descriptor
            self._closed = True
            os.close(self._wake)
            os.close(self._waker)

    def wait_for_end(self, started: float) -> ExitReason:
        end = started + self._limits.seconds
        open_pipe, ended_at = True, 0.0
        while True:
            now = time.monotonic()
            if self._interrupt is not None and self._interrupt.is_set:
                return ExitReason.INTERRUPTED
            if now >= end:
                return ExitReason.TIMEOUT
            wait = min(_IDLE_SECONDS if self._idle() else _POLL_SECONDS, end - now)
            ready, _, _ = select.select([self._waker, *([self._pipe] if open_pipe else [])], [], [], wait)
            if self._pipe in ready:
                open_pipe = self._read()
                if self.output.printed > self._limits.output:
                    return ExitReason.OUTPUT
            if self._child.poll() is not None:
                # A remaining process may hold the pipe: only what is already written is read.
                ended_at = ended_at or now
                if (
                    not open_pipe
                    or (not ready and now - ended_at > _MEASURE_SECONDS)
                    or now - ended_at > _DRAIN_SECONDS
                ):
                    return ExitReason.PROCESSES if self._group.limit_reached() else ExitReason.EXITED
            elif (reason := self._exceeded_limit(now)) is not None:
                return reason

    def _read(self) -> bool:
        data = os.read(self._pipe, 1 << 16)
        self.output.add(data)
        if data and self._on_output is not None:
            self._on_output(data.decode("utf-8", "replace"))
        return bool(data)

    def _exceeded_limit(self, now: float) -> ExitReason | None:
        """The limit that the process tree exceeds, if any."""
        if self._idle():
            return None
        # A growing tree shows in the machine's task count, which is cheap to read.
        if now < self._next_measurement and _count_tasks() - self._count_tasks <= self._limits.processes:
            return None
        began = time.monotonic()
        living = process_tree(self._child.pid, _MEASURE_SECONDS / 2)
        threads = sum(process.threads for process in living) - self._unused
        if threads > self._limits.processes or self._group.limit_reached():
            return ExitReason.PROCESSES
        if sum(process.memory for process in living) > self._limits.memory:
            return ExitReason.MEMORY
        free = _free_bytes(self._disk)
        if free < self._limits.spare_disk and free < self._free_bytes - (16 << 20):
            return ExitReason.DISK
        # Measuring may take a tenth of the time, however many processes there are.
        self._next_measurement = now + max(_MEASURE_SECONDS, 10 * (time.monotonic() - began))
        return None

    def _on_interrupt(self) -> None:
        with self._lock:
            if not self._closed:
                os.write(self._wake, b"!")


def _count_tasks() -> int:
    """The machine's number of tasks; 0 where unknown."""
    try:
        with open("/proc/loadavg", "rb") as file:
            return int(file.read().split()[3].partition(b"/")[2])
    except (OSError, ValueError, IndexError):
        return 0


def _free_bytes(folder: Path) -> int:
    try:
        state = os.statvfs(folder)
    except OSError:  # the command may have removed it
        return 1 << 62
    return state.f_bavail * state.f_frsize

"""One command under watch: its output read, its limits kept, its whole tree ended.

Knows no sandbox. It is given what to execute and returns how that ended; whatever happens (a limit, an
interrupt, an error here) no process of the command outlives the call.
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

from keystroke.agent.sandbox.cgroup import Group, process_limit
from keystroke.agent.sandbox.policy import Ended, Ending, Kept, Limits
from keystroke.agent.sandbox.processes import end_namespace, end_tree, tree
from keystroke.engine.base import Interrupt
from keystroke.errors import InputError, NotFound

_GLANCE = 0.05  # seconds between two looks at what the command takes
_BLINK = 0.02  # seconds between two looks at how many tasks the whole machine has
_LINGER = 2.0  # seconds that the last output of an ended tree is waited for

OnOutput = Callable[[str], None]


def supervise(
    argv: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    limits: Limits,
    interrupt: Interrupt | None = None,
    on_output: OnOutput | None = None,
    disk: Path | None = None,
    unused: int = 0,
    namespace: bool = False,
) -> Ended:
    """Run `argv` to its end or to a limit. `disk` is a folder whose file system must keep room; `unused`
    processes of the tree are the sandbox's own, and with `namespace` its only child is the first process of a
    namespace. NotFound or InputError where it cannot be started."""
    with process_limit(limits.processes + unused) as group:
        child = _started([*group.prefix, *argv], argv[0], cwd, env)
        watch = _Watch(child, group, limits, interrupt, on_output, disk or cwd, unused)
        return _watched(child, watch, namespace)


def _started(argv: Sequence[str], name: str, cwd: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            argv,
            cwd=cwd,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise NotFound(f"there is no command {name!r}; check its spelling and your PATH") from None
    except OSError as error:
        raise InputError(f"{name} cannot be run: {error.strerror}") from None


def _watched(child: subprocess.Popen[bytes], watch: _Watch, namespace: bool) -> Ended:
    started = time.monotonic()
    try:
        ending = watch.until_end(started)
    finally:
        if child.poll() is None and namespace:
            end_namespace(child.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_LINGER)
        if child.poll() is None:
            end_tree(child.pid)
        child.wait()
        watch.close()
    return Ended(child.returncode, watch.kept.text(), ending, time.monotonic() - started, watch.kept.printed)


class _Watch:
    def __init__(
        self,
        child: subprocess.Popen[bytes],
        group: Group,
        limits: Limits,
        interrupt: Interrupt | None,
        on_output: OnOutput | None,
        disk: Path,
        unused: int,
    ) -> None:
        self.kept = Kept()
        self._child, self._group = child, group
        self._limits, self._interrupt = limits, interrupt
        self._on_output, self._disk, self._unused = on_output, disk, unused
        assert child.stdout is not None
        self._pipe = child.stdout.fileno()
        self._free = _free(disk)
        self._glance = time.monotonic() + _GLANCE  # nothing takes much before
        self._tasks = _tasks()
        # An interrupt from another thread ends the wait at once, not at the next look.
        self._waker, self._wake = os.pipe()
        self._lock, self._closed = threading.Lock(), False
        if interrupt is not None:
            interrupt.add_callback(self._woken)

    def close(self) -> None:
        if self._interrupt is not None:
            self._interrupt.remove_callback(self._woken)
        if self._child.stdout is not None:
            self._child.stdout.close()
        with self._lock:  # a thread that interrupts just now must not write to a number given anew
            self._closed = True
            os.close(self._wake)
            os.close(self._waker)

    def until_end(self, started: float) -> Ending:
        end = started + self._limits.seconds
        open_pipe, ended_at = True, 0.0
        while True:
            now = time.monotonic()
            if self._interrupt is not None and self._interrupt.is_set:
                return Ending.INTERRUPTED
            if now >= end:
                return Ending.TIMEOUT
            wait = min(_BLINK, end - now)
            ready, _, _ = select.select([self._waker, *([self._pipe] if open_pipe else [])], [], [], wait)
            if self._pipe in ready:
                open_pipe = self._read()
                if self.kept.printed > self._limits.output:
                    return Ending.OUTPUT
            if self._child.poll() is not None:
                # Something it left behind may hold the pipe: what is already written is read, no more.
                ended_at = ended_at or now
                if not open_pipe or (not ready and now - ended_at > _GLANCE) or now - ended_at > _LINGER:
                    return Ending.PROCESSES if self._group.reached() else Ending.EXITED
            elif (over := self._over(now)) is not None:
                return over

    def _read(self) -> bool:
        data = os.read(self._pipe, 1 << 16)
        self.kept.add(data)
        if data and self._on_output is not None:
            self._on_output(data.decode("utf-8", "replace"))
        return bool(data)

    def _over(self, now: float) -> Ending | None:
        """The limit that the tree as a whole is over, if any."""
        # A tree that multiplies shows in the count of all tasks, which costs nothing to read.
        if now < self._glance and _tasks() - self._tasks <= self._limits.processes:
            return None
        looked = time.monotonic()
        living = tree(self._child.pid, _GLANCE / 2)
        threads = sum(process.threads for process in living) - self._unused
        if threads > self._limits.processes or self._group.reached():
            return Ending.PROCESSES
        if sum(process.memory for process in living) > self._limits.memory:
            return Ending.MEMORY
        free = _free(self._disk)
        if free < self._limits.spare_disk and free < self._free - (16 << 20):
            return Ending.DISK
        # Looking may take a tenth of the time, however many processes this machine has.
        self._glance = now + max(_GLANCE, 10 * (time.monotonic() - looked))
        return None

    def _woken(self) -> None:
        with self._lock:
            if not self._closed:
                os.write(self._wake, b"!")


def _tasks() -> int:
    """How many tasks the machine has; 0 where it does not say."""
    try:
        with open("/proc/loadavg", "rb") as file:
            return int(file.read().split()[3].partition(b"/")[2])
    except (OSError, ValueError, IndexError):
        return 0


def _free(folder: Path) -> int:
    try:
        state = os.statvfs(folder)
    except OSError:  # the command may have removed it
        return 1 << 62
    return state.f_bavail * state.f_frsize

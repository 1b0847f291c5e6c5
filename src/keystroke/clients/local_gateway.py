"""The gateway of this machine: found where one runs, started where none does.

Editors and commands that would start the same gateway (same program, same settings, same models) share
one. It announces itself in a file of the state folder that only its user can read (address, process, key),
is not found any more once another program is installed, and ends itself some time after its last visitor
left, so nobody has to count. Starting holds a lock: two that come together start one gateway. Waiting is done
in small sleeps, on the caller's thread or beside a loop.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import re
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from filelock import FileLock, Timeout

from keystroke.clients.gateway_address import GatewayAddress
from keystroke.errors import Interrupted, KeystrokeError, Unavailable

OnProgress = Callable[[str, int, int], None]
"""Told what a gateway that starts is doing, how much of it is done, and of how much (0: unknown)."""

_LOOK = 0.03  # seconds between looks at a file or a process
_PATIENCE = 2.0  # seconds a healthy gateway takes at most to say so
_PROGRESS = re.compile(r"^(?P<what>[^\n]{1,120}): (?P<percent>\d+) %$", re.MULTILINE)


class Announcement(msgspec.Struct, frozen=True):
    """What a gateway says about itself in its file. `program` is the state of the program that it was started
    from; older ones do not say."""

    url: str
    pid: int
    token: str | None = None
    version: str = ""
    program: str = ""


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """How a gateway is started: `arguments` is the program with everything but the announcement's file;
    `key_variable` is the environment variable that gives it its key. `identity` is all that makes two of them
    the same gateway, and `program` says what is installed at the moment: an editor may outlive an upgrade."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    key_variable: str
    identity: tuple[str, ...]
    program: Callable[[], str]

    def name(self, program: str) -> str:
        """The same for all who would start the same gateway from the same state of the program."""
        return hashlib.sha256(repr((*self.identity, program)).encode()).hexdigest()[:12]


class LocalGateway:
    def __init__(self, command: ServeCommand, state: Path) -> None:
        self._command = command
        self._folder = state / "gateways"
        self._child: subprocess.Popen[bytes] | None = None

    async def locate(self) -> GatewayAddress:
        """The gateway's place, after starting one if need be; the loop goes on meanwhile. Raises as
        `locate_now` does."""
        import asyncio

        stop = threading.Event()
        try:
            return await asyncio.to_thread(self.locate_blocking, stop=stop)
        except asyncio.CancelledError:
            stop.set()  # the thread ends soon; a gateway that it started finds nobody and leaves
            raise

    def locate_blocking(
        self, *, stop: threading.Event | None = None, on_progress: OnProgress | None = None
    ) -> GatewayAddress:
        """The gateway's place, after starting one if need be. Raises Unavailable where trying again may help,
        KeystrokeError with its own words where it could not start, Interrupted once `stop` is set."""
        stop = stop or threading.Event()
        program = self._command.program()
        if found := self._running(program):
            return found
        file = self._file(program)
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(file.with_suffix(".lock"), stop):
            return self._running(program) or self._start(file, stop, on_progress)

    def announced_address(self) -> GatewayAddress | None:
        """Where a gateway of this program says it is, and its process lives. Whether it answers is another
        question."""
        return self._said(self._command.program())

    def _file(self, program: str) -> Path:
        """Where a gateway of that state of the program announces itself; its log lies beside."""
        return self._folder / f"{self._command.name(program)}.json"

    def _said(self, program: str) -> GatewayAddress | None:
        if self._child is not None:
            self._child.poll()  # a child that died is not left a zombie
        said = read_announcement(self._file(program))
        if said is None or said.program != program or not process_exists(said.pid):
            return None
        return GatewayAddress(said.url, said.token)

    def _running(self, program: str) -> GatewayAddress | None:
        """The gateway's place, where one of that state runs and answers."""
        place = self._said(program)
        return place if place is not None and _healthy(place.url) else None

    def _start(self, file: Path, stop: threading.Event, watch: OnProgress | None) -> GatewayAddress:
        file.unlink(missing_ok=True)
        log = file.with_suffix(".log")
        environment = {**self._command.environment, self._command.key_variable: secrets.token_urlsafe(32)}
        with open(log, "wb", opener=_private) as output:
            self._child = subprocess.Popen(
                [*self._command.arguments, "--announce", str(file)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                cwd=self._folder,  # no project's settings: it serves them all
                start_new_session=True,  # outlives whoever started it while others use it
            )
        while (said := read_announcement(file)) is None:
            if (code := self._child.poll()) is not None:
                raise _failure(code, log)
            if watch is not None:
                watch(*_told(log))
            if stop.wait(_LOOK):
                raise Interrupted("stopped while the gateway was starting")
        return GatewayAddress(said.url, said.token)


def running_gateways(state: Path) -> list[Announcement]:
    """Every gateway of this user that says it runs, and does."""
    found = [read_announcement(file) for file in sorted((state / "gateways").glob("*.json"))]
    return [said for said in found if said is not None and process_exists(said.pid) and _healthy(said.url)]


def read_announcement(file: Path) -> Announcement | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Announcement)
    except (OSError, msgspec.DecodeError, msgspec.ValidationError):
        return None


def _told(log: Path) -> tuple[str, int, int]:
    """What a gateway that starts last said it was doing."""
    try:
        found = list(_PROGRESS.finditer(log.read_text(encoding="utf-8", errors="replace")))
    except OSError:
        found = []
    return (found[-1]["what"], int(found[-1]["percent"]), 100) if found else ("starting the gateway", 0, 0)


def _failure(code: int, log: Path) -> KeystrokeError:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        lines = []
    words = lines[-1].removeprefix("keystroke: ").rstrip(".") if lines else f"it ended with code {code}"
    message = f"The gateway could not start: {words}; its log is {log}."
    return KeystrokeError(message) if code > 0 else Unavailable(message)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def process_exists(pid: int) -> bool:
    """Whether a process exists; where that cannot be asked, it is taken to."""
    if sys.platform == "win32":
        return True  # there, signal 0 is Ctrl-C
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # someone else's
    return True


def _healthy(url: str) -> bool:
    where = urlsplit(url)
    asked = http.client.HTTPConnection(where.hostname or "", where.port, timeout=_PATIENCE)
    try:
        asked.request("GET", "/health")
        return asked.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        asked.close()


@contextlib.contextmanager
def _locked(path: Path, stop: threading.Event) -> Iterator[None]:
    lock = FileLock(path, mode=0o600, blocking=False)
    while True:
        try:
            lock.acquire()
            break
        except Timeout:
            if stop.wait(_LOOK):
                raise Interrupted("stopped while the gateway was starting") from None
    try:
        yield
    finally:
        lock.release()

"""Finds the gateway of this machine, or starts one.

Editors and commands that would start the same gateway (same program, settings and models) share one. It
announces itself in a file of the state folder that only its user can read (address, process id, key), is
ignored once another version of the program is installed, and ends itself some time after its last client
disconnects. A lock file ensures that concurrent callers start only one gateway.
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
"""Receives what a starting gateway is doing, how much is done, and of how much (0: unknown)."""

_POLL_INTERVAL = 0.03  # seconds
_HEALTH_TIMEOUT = 10.0  # seconds; a gateway that is slow on a busy machine must not get a twin
_PROGRESS = re.compile(r"^(?P<what>[^\n]{1,120}): (?P<percent>\d+) %$", re.MULTILINE)


class Announcement(msgspec.Struct, frozen=True):
    """The content of a gateway's announcement file. `program` is the fingerprint of the program that it was
    started from; old versions leave it empty."""

    url: str
    pid: int
    token: str | None = None
    version: str = ""
    program: str = ""


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """How a gateway is started. `arguments` is the command line without the announcement file; `key_variable`
    is the environment variable that holds its key. Gateways with equal `identity` are the same; `program`
    returns the fingerprint of what is installed now, since an editor may outlive an upgrade."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    key_variable: str
    identity: tuple[str, ...]
    program: Callable[[], str]

    def name(self, program: str) -> str:
        """A name that is equal for equal gateways of the same program."""
        return hashlib.sha256(repr((*self.identity, program)).encode()).hexdigest()[:12]


class LocalGateway:
    def __init__(self, command: ServeCommand, state: Path) -> None:
        self._command = command
        self._folder = state / "gateways"
        self._child: subprocess.Popen[bytes] | None = None

    async def locate(self) -> GatewayAddress:
        """Like `locate_blocking`, on a thread."""
        import asyncio

        stop = threading.Event()
        try:
            return await asyncio.to_thread(self.locate_blocking, stop=stop)
        except asyncio.CancelledError:
            stop.set()  # a gateway that was just started ends by itself without clients
            raise

    def locate_blocking(
        self, *, stop: threading.Event | None = None, on_progress: OnProgress | None = None
    ) -> GatewayAddress:
        """The address of the gateway, which is started if necessary. Raises Unavailable if a retry may help,
        KeystrokeError with the gateway's message if it cannot start, Interrupted once `stop` is set."""
        stop = stop or threading.Event()
        program = self._command.program()
        if found := self._find_running(program):
            return found
        file = self._file(program)
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _lock(file.with_suffix(".lock"), stop):
            return self._find_running(program) or self._start(file, stop, on_progress)

    def announced_address(self) -> GatewayAddress | None:
        """The announced address of a gateway of this program whose process exists; it may not answer."""
        return self._find_announced(self._command.program())

    def _file(self, program: str) -> Path:
        """The announcement file of a gateway of that program; its log has the same name with .log."""
        return self._folder / f"{self._command.name(program)}.json"

    def _find_announced(self, program: str) -> GatewayAddress | None:
        if self._child is not None:
            self._child.poll()  # reap a dead child
        announcement = read_announcement(self._file(program))
        if announcement is None or announcement.program != program or not process_exists(announcement.pid):
            return None
        return GatewayAddress(announcement.url, announcement.token)

    def _find_running(self, program: str) -> GatewayAddress | None:
        """The address of a gateway of that program that runs and answers."""
        address = self._find_announced(program)
        return address if address is not None and _is_healthy(address.url) else None

    def _start(self, file: Path, stop: threading.Event, on_progress: OnProgress | None) -> GatewayAddress:
        file.unlink(missing_ok=True)
        log = file.with_suffix(".log")
        environment = {**self._command.environment, self._command.key_variable: secrets.token_urlsafe(32)}
        with open(log, "wb", opener=_open_private) as output:
            self._child = subprocess.Popen(
                [*self._command.arguments, "--announce", str(file)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                cwd=self._folder,  # outside every project, so that no project's settings apply
                start_new_session=True,  # the gateway outlives the process that started it
            )
        while (announcement := read_announcement(file)) is None:
            if (code := self._child.poll()) is not None:
                raise _start_error(code, log)
            if on_progress is not None:
                on_progress(*startup_progress(log))
            if stop.wait(_POLL_INTERVAL):
                raise Interrupted("stopped while the gateway was starting")
        return GatewayAddress(announcement.url, announcement.token)


def running_gateways(state: Path) -> list[Announcement]:
    """Every announced gateway of this user that runs and answers."""
    found = [read_announcement(file) for file in sorted((state / "gateways").glob("*.json"))]
    return [one for one in found if one is not None and process_exists(one.pid) and _is_healthy(one.url)]


def read_announcement(file: Path) -> Announcement | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Announcement)
    except (OSError, msgspec.DecodeError, msgspec.ValidationError):
        return None


def startup_progress(log: Path) -> tuple[str, int, int]:
    """The last progress line in the log of a starting gateway."""
    try:
        found = list(_PROGRESS.finditer(log.read_text(encoding="utf-8", errors="replace")))
    except OSError:
        found = []
    return (found[-1]["what"], int(found[-1]["percent"]), 100) if found else ("starting the gateway", 0, 0)


def _start_error(code: int, log: Path) -> KeystrokeError:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        lines = []
    reason = lines[-1].removeprefix("keystroke: ").rstrip(".") if lines else f"it ended with code {code}"
    message = f"The gateway could not start: {reason}; its log is {log}."
    return KeystrokeError(message) if code > 0 else Unavailable(message)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def process_exists(pid: int) -> bool:
    """Whether a process exists; True where that cannot be determined."""
    if sys.platform == "win32":
        return True  # signal 0 is Ctrl-C on Windows
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # another user's process
    return True


def _is_healthy(url: str) -> bool:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_HEALTH_TIMEOUT)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


@contextlib.contextmanager
def _lock(path: Path, stop: threading.Event) -> Iterator[None]:
    lock = FileLock(path, mode=0o600, blocking=False)
    while True:
        try:
            lock.acquire()
            break
        except Timeout:
            if stop.wait(_POLL_INTERVAL):
                raise Interrupted("stopped while the gateway was starting") from None
    try:
        yield
    finally:
        lock.release()

"""The gateway of this machine: found where one runs, started where none does.

Law: editors with the same options share one gateway. It announces itself in a file of the state folder that
only its user can read (address, process, key), and ends itself some time after its last editor left, so
nobody has to count. Starting holds a lock: two editors opened together start one gateway. Nothing here
blocks: waiting is done in small sleeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from filelock import FileLock, Timeout

from keystroke.clients.lsp.place import Place
from keystroke.errors import KeystrokeError, Unavailable

_LOOK = 0.03  # seconds between looks at a file or a process
_PATIENCE = 2.0  # seconds a healthy gateway takes at most to say so


class Announcement(msgspec.Struct, frozen=True):
    """What a gateway says about itself in its file."""

    url: str
    pid: int
    token: str | None = None


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """How a gateway is started: `arguments` is the program with everything but the announcement's file;
    `key_variable` is the environment variable that gives it its key."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    key_variable: str

    @property
    def name(self) -> str:
        """The same for all who would start the same gateway."""
        ours = sorted(item for item in self.environment.items() if item[0].startswith("KEYSTROKE"))
        told = [item for item in ours if item[0] != self.key_variable]
        return hashlib.sha256(repr((list(self.arguments), told)).encode()).hexdigest()[:12]


class LocalGateway:
    def __init__(self, command: ServeCommand, state: Path) -> None:
        self._command = command
        self._folder = state / "gateways"
        self._file = self._folder / f"{command.name}.json"
        self._child: subprocess.Popen[bytes] | None = None

    async def locate(self) -> Place:
        """The gateway's place, after starting one if need be. Raises Unavailable where trying again may
        help, and KeystrokeError with its own words where it could not start."""
        if found := await self._running():
            return found
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        async with _locked(self._file.with_suffix(".lock")):
            return await self._running() or await self._start()

    async def _running(self) -> Place | None:
        if self._child is not None:
            self._child.poll()  # a child that died is not left a zombie
        said = read_announcement(self._file)
        if said is None or not alive(said.pid) or not await _healthy(said.url):
            return None
        return Place(said.url, said.token)

    async def _start(self) -> Place:
        self._file.unlink(missing_ok=True)
        environment = {**self._command.environment, self._command.key_variable: secrets.token_urlsafe(32)}
        log = self._file.with_suffix(".log")
        with open(log, "wb", opener=_private) as output:  # noqa: ASYNC230 a file on a local disk
            self._child = subprocess.Popen(  # noqa: ASYNC220 returns at once
                [*self._command.arguments, "--announce", str(self._file)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                cwd=self._folder,  # no project's settings: it serves them all
                start_new_session=True,  # outlives this editor while others use it
            )
        while (said := read_announcement(self._file)) is None:
            if (code := self._child.poll()) is not None:
                raise _failure(code, log)
            await asyncio.sleep(_LOOK)
        return Place(said.url, said.token)


def read_announcement(file: Path) -> Announcement | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Announcement)
    except (OSError, msgspec.DecodeError, msgspec.ValidationError):
        return None


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


def alive(pid: int) -> bool:
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


async def _healthy(url: str) -> bool:
    return await asyncio.to_thread(_answers, url)


def _answers(url: str) -> bool:
    """Whether `GET /health` says 200. By the standard library's client: a tenth of the import time of httpx,
    which counts before an editor's first keystroke, and it asks no proxy."""
    where = urlsplit(url)
    connection = HTTPConnection(where.hostname or "", where.port, timeout=_PATIENCE)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == HTTPStatus.OK
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


@contextlib.asynccontextmanager
async def _locked(path: Path) -> AsyncIterator[None]:
    lock = FileLock(path, mode=0o600, blocking=False)
    while True:
        try:
            lock.acquire()
            break
        except Timeout:
            await asyncio.sleep(_LOOK)
    try:
        yield
    finally:
        lock.release()

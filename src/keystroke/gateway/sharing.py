"""A gateway that editors and commands share: it says where it is, and leaves when the last of them has gone.

A visitor is a socket or a request, counted while it is open; running answers count too, and asking for
its health does not. The announcement holds the key, so it is written for its owner alone, whole or not at
all, and it goes when the gateway goes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from starlette.types import Scope

from keystroke.gateway.app import Gateway

_FIRST = 30.0  # seconds the first visitor may take to come


def announce(file: Path, url: str, token: str | None, version: str, program: str) -> None:
    """Write the announcement, readable by this user only. `program`: the state of the program that runs here,
    so that those who have another one do not use it."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = file.with_suffix(f".{os.getpid()}.tmp")
    body = msgspec.json.encode(
        {"url": url, "pid": os.getpid(), "token": token, "version": version, "program": program}
    )
    with open(draft, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as out:
        out.write(body)
    os.replace(draft, file)


def withdraw(file: Path) -> None:
    """Take one's own announcement away; that of a successor stays."""
    try:
        if msgspec.json.decode(file.read_bytes())["pid"] == os.getpid():
            file.unlink()
    except (OSError, msgspec.DecodeError, KeyError, TypeError):
        return


class IdleShutdown:
    """Counts a gateway's visitors, and calls `leave` once none was there for `patience` seconds."""

    def __init__(self, gateway: Gateway, patience: float, leave: Callable[[], None]) -> None:
        self._gateway, self._patience, self._leave = gateway, patience, leave
        self._present = 0
        self._timer: asyncio.TimerHandle | None = None
        gateway.visit = self._visit

    def begin(self) -> None:
        """Call once the gateway listens."""
        self._wait(max(self._patience, _FIRST))

    @contextmanager
    def _visit(self, scope: Scope) -> Iterator[None]:
        if scope["type"] == "lifespan" or scope["path"] == "/health":
            yield
            return
        self._present += 1
        if self._timer is not None:
            self._timer.cancel()
        try:
            yield
        finally:
            self._present -= 1
            if not self._present:
                self._wait(self._patience)

    def _wait(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        if self._present:
            return
        gateway = self._gateway
        if gateway.service.under_way or gateway.service.registry.loads or gateway.tasks.under_way:
            self._wait(max(self._patience, 1.0))
            return
        self._leave()

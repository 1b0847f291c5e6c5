"""A gateway shared by editors and commands: it announces its address and stops when nobody uses it.

A visit is an open socket or request; running answers, loads and tasks keep the gateway alive too, health
checks do not. The announcement contains the key, so only its owner can read it; it is written atomically and
removed when the gateway ends.
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
from keystroke.replacing import replace_file

_FIRST = 30.0  # seconds to wait for the first visit
_REMOVAL_INTERVAL = 5.0  # seconds between two looks at the program's own files
_PROGRAM = Path(__file__)


def announce(file: Path, url: str, token: str | None, version: str, program: str) -> None:
    """Write the announcement, readable by this user only. `program` identifies the installed program, so that
    clients of another version do not use this gateway."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    body = {"url": url, "pid": os.getpid(), "token": token, "version": version, "program": program}
    replace_file(file, msgspec.json.encode(body))


def withdraw(file: Path) -> None:
    """Remove this process's announcement; that of a successor stays."""
    try:
        if msgspec.json.decode(file.read_bytes())["pid"] == os.getpid():
            file.unlink()
    except (OSError, msgspec.DecodeError, KeyError, TypeError):
        return


class IdleShutdown:
    """Counts a gateway's visits, and calls `on_idle` after `idle_s` seconds without one, or soon after the
    program was uninstalled."""

    def __init__(self, gateway: Gateway, idle_s: float, on_idle: Callable[[], None]) -> None:
        self._gateway, self._idle_s, self._on_idle = gateway, idle_s, on_idle
        self._visits = 0
        self._timer: asyncio.TimerHandle | None = None
        gateway.request_context = self._count_visit

    def start(self) -> None:
        """Call once the gateway listens."""
        self._start_timer(max(self._idle_s, _FIRST))
        self._look_for_removal()

    def _look_for_removal(self) -> None:
        if _PROGRAM.exists():
            asyncio.get_running_loop().call_later(_REMOVAL_INTERVAL, self._look_for_removal)
        else:
            self._on_idle()

    @contextmanager
    def _count_visit(self, scope: Scope) -> Iterator[None]:
        if scope["type"] == "lifespan" or scope["path"] == "/health":
            yield
            return
        self._visits += 1
        if self._timer is not None:
            self._timer.cancel()
        try:
            yield
        finally:
            self._visits -= 1
            if not self._visits:
                self._start_timer(self._idle_s)

    def _start_timer(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._on_timer)

    def _on_timer(self) -> None:
        if self._visits:
            return
        gateway = self._gateway
        if gateway.service.active_work or gateway.service.registry.loads or gateway.tasks.active_count:
            self._start_timer(max(self._idle_s, 1.0))
            return
        self._on_idle()

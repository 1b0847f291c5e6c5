"""Faults of the soak: a store that cannot be written, a clock that is set, a server that is killed.

The store fails for real: SQLite meets a limit on the size of files, a lock of another connection, or a
connection that may only read. The killed server is a process of its own, killed while it stores responses
and started again on the same files.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import signal
import socket
import sqlite3
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import sqlalchemy as sa

from keystroke.gateway.record.store import Store

_START = 60.0  # seconds that a server may compute until it has started; a busy machine takes longer
_CLIENTS = 4


@contextlib.contextmanager
def full_disk(_store: Store) -> Iterator[None]:
    """No file of this process grows beyond a kilobyte; SQLite's log needs four."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def locked(store: Store) -> Iterator[None]:
    """Another connection holds the write lock."""
    other = sqlite3.connect(str(store.engine.url.database), isolation_level=None)
    with contextlib.closing(other):
        with contextlib.suppress(sqlite3.OperationalError):  # busy: then it is locked by a commit
            other.execute("BEGIN IMMEDIATE")
        yield


class ReadOnly:
    """While it is entered, every connection of a store refuses to write."""

    def __init__(self, store: Store) -> None:
        self._entered = False
        # Registered once: listeners must not change while another thread begins a transaction.
        sa.event.listen(store.engine, "begin", self._set)

    def _set(self, connection: sa.Connection) -> None:
        connection.exec_driver_sql(f"PRAGMA query_only={int(self._entered)}")

    @contextlib.contextmanager
    def enter(self, _store: Store) -> Iterator[None]:
        self._entered = True
        try:
            yield
        finally:
            self._entered = False


@contextlib.contextmanager
def moved_clock(seconds: float) -> Iterator[None]:
    """The wall clock of this process is set ahead or back; the monotonic clock goes on."""
    real = time.time
    setattr(time, "time", lambda: real() + seconds)  # noqa: B010 - a clock has no other switch
    try:
        yield
    finally:
        setattr(time, "time", real)  # noqa: B010


def _computed(process: int) -> float:
    """Seconds that a process computed."""
    try:
        spent = psutil.Process(process).cpu_times()
    except psutil.Error:
        return 0.0
    return float(spent.user + spent.system)


class KilledServer:
    """A server that is killed and started again. What it acknowledged as stored must be there."""

    def __init__(self, home: Path, chance: random.Random) -> None:
        self.pid = 0  # of the process that runs now; 0 for none, -1 while one is created
        self.acknowledged, self.lost = 0, 0
        self._home, self._random = home, chance
        home.mkdir(mode=0o700, exist_ok=True)

    async def round(self) -> None:
        """Start, store, kill, start again, compare, end."""
        url, process = await self._start()
        kept: dict[str, object] = {}  # what was said by the id of the response
        asking = [asyncio.create_task(self._ask(url, kept)) for _ in range(_CLIENTS)]
        for _ in range(600):  # a busy machine takes long for the first
            if kept:
                break
            await asyncio.sleep(0.1)
        await asyncio.sleep(self._random.uniform(0.0, 2.0))
        process.kill()
        await process.wait()
        await asyncio.gather(*asking)
        url, process = await self._start()
        try:
            async with httpx.AsyncClient(timeout=60, verify=False) as http:
                for identity, output in kept.items():
                    found = await http.get(f"{url}/v1/responses/{identity}")
                    self.lost += found.status_code != 200 or found.json()["output"] != output
        finally:
            process.send_signal(signal.SIGTERM)
            await process.wait()
            self.pid = 0
        self.acknowledged += len(kept)

    async def _start(self) -> tuple[str, asyncio.subprocess.Process]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.pid = -1
        env = {**os.environ, "HOME": str(self._home), "XDG_STATE_HOME": str(self._home / "state")}
        command = ("-m", "keystroke", "serve", "--echo", "--port", str(port))
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, cwd=self._home, env=env, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (hard, hard))  # this disk is never full
        self.pid, url = process.pid, f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(timeout=60, verify=False) as http:
            while process.returncode is None and _computed(process.pid) < _START:
                with contextlib.suppress(httpx.HTTPError):
                    if (await http.get(f"{url}/health")).status_code == 200:
                        return url, process
                await asyncio.sleep(0.1)
        if process.returncode is None:
            process.kill()
        await process.wait()
        self.pid = 0
        raise RuntimeError("the server that is killed did not start")

    @staticmethod
    async def _ask(url: str, kept: dict[str, object]) -> None:
        """Store responses until the server is gone."""
        body = {"input": "keep this", "store": True, "max_output_tokens": 3}
        with contextlib.suppress(httpx.HTTPError):
            async with httpx.AsyncClient(timeout=60, verify=False) as http:
                while True:
                    answer = await http.post(f"{url}/v1/responses", json=body)
                    if answer.status_code == 200 and answer.json()["store"]:
                        kept[answer.json()["id"]] = answer.json()["output"]

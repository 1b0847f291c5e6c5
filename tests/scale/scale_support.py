"""What tests on a real Ray share: a local one, an application on it, clients that come back as editors do."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
from bench.free_port import free_port
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from keystroke.config import NamedModel, Settings, load_settings

HANG = 600.0  # seconds that only something that hangs takes: starting Ray took 240 on a starved machine
PAUSE = 0.2  # seconds between two turns of a conversation: the engines are to be busy, not the cores
ENDS = ("response.completed", "response.incomplete", "response.failed", "response.cancelled")


def settings_for(folder: Path, **flags: Any) -> Settings:
    told = {
        "paths.state": str(folder),
        "server.port": free_port(),
        "server.drain_s": 10,
        "server.max_queue": 512,
        **{key.replace("__", "."): value for key, value in flags.items()},
    }
    return load_settings(told, cwd=folder, environ={"KEYSTROKE_CONFIG": str(folder)})


def with_table(settings: Settings, name: str, table: NamedModel) -> Settings:
    return replace(settings, models={**settings.models, name: table})


def descendants() -> list[tuple[psutil.Process, str]]:
    """The processes below this one with their titles. Another Ray on this machine is none of ours."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            found.append((process, " ".join(process.cmdline())))
    return found


def replica_pids(kind: str) -> list[int]:
    """The processes of a deployment's replicas, as Ray titles them."""
    return [
        p.pid for p, title in descendants() if title.startswith("ray::ServeReplica") and f":{kind}" in title
    ]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@contextmanager
def until(what: str) -> Iterator[Any]:
    """A check to call until it returns True."""
    deadline = time.monotonic() + HANG

    def wait(check: Any) -> None:
        while not check():
            assert time.monotonic() < deadline, f"{what} did not come about"
            time.sleep(0.1)

    yield wait


@dataclass
class Load:
    """Conversations that go on until told to stop: each turn is asked for until it has been answered, as a
    client does that comes back after a broken connection."""

    url: str
    keys: list[str]  # each conversation has its own, so that no budget is in its way
    answered: dict[str, str] = field(default_factory=dict)  # what was asked, by the response that answered it
    terminal: dict[str, int] = field(default_factory=dict)  # terminal events seen, by what was asked
    failures: list[str] = field(default_factory=list)  # answers with an error in them
    again: int = 0  # turns asked for again because the connection broke
    stop: bool = False

    def headers(self, who: int) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.keys[who % len(self.keys)]}"}

    def owner(self, asked: str) -> dict[str, str]:
        """The headers of whoever asked."""
        return self.headers(int(asked.partition("-")[0]))

    async def reaches(self, turns: int) -> None:
        """Wait until that many turns were answered, or one failed."""
        while len(self.answered) < turns and not self.failures:  # noqa: ASYNC110 - turns end in many places
            await asyncio.sleep(0.05)

    async def converse(self, who: int, words: int = 4) -> None:
        """Over HTTP, or over a socket that stays open where `who` is odd."""
        if who % 2:
            await self._converse_by_socket(who, words)
            return
        turn = 0
        async with httpx.AsyncClient(base_url=self.url, headers=self.headers(who), timeout=HANG) as client:
            while not self.stop:
                turn += 1
                asked = f"{who}-{turn} " + "word " * words
                await asyncio.sleep(PAUSE)
                while True:
                    try:
                        await self._turn(client, asked.strip())
                        break
                    except (httpx.TransportError, ConnectionError):
                        self.again += 1
                        await asyncio.sleep(0.05)

    async def _converse_by_socket(self, who: int, words: int) -> None:
        url = self.url.replace("http://", "ws://") + "/v1/responses"
        turn, asked = 0, ""
        while not self.stop or asked:
            try:
                async with connect(url, additional_headers=self.headers(who)) as socket:
                    while not self.stop or asked:
                        if not asked:
                            turn += 1
                            asked = f"{who}-{turn} " + "word " * words
                        await self._turn_by_socket(socket, asked.strip())
                        asked = ""
                        await asyncio.sleep(PAUSE)
            except (ConnectionClosed, OSError, InvalidHandshake):
                self.again += bool(asked)
                await asyncio.sleep(0.05)

    async def _turn_by_socket(self, socket: ClientConnection, asked: str) -> None:
        body = {"type": "response.create", "model": "auto", "input": asked}
        await socket.send(json.dumps(body))
        said = ""
        async for frame in socket:
            event = json.loads(frame)
            kind = event["type"]
            if kind == "response.output_text.delta":
                said += event["delta"]
            elif kind == "error" or kind in ENDS:
                self._ended(asked, said, event)
                return
        raise ConnectionResetError("closed in the middle of a turn")

    def _ended(self, asked: str, said: str, event: Any) -> None:
        if event["type"] != "response.completed":
            self.failures.append(f"{event['type']}: {event.get('error') or event['response'].get('error')}")
            return
        self.terminal[asked] = self.terminal.get(asked, 0) + 1
        self.answered[event["response"]["id"]] = asked
        if said != f"You said: {asked}":
            self.failures.append(f"asked {asked!r}, was told {said!r}")

    async def _turn(self, client: httpx.AsyncClient, asked: str) -> None:
        """One streamed turn. Raises TransportError or ConnectionError where the connection breaks before its
        terminal event. What breaks behind that event is no loss, and asking again would ask twice."""
        body = {"model": "auto", "input": asked, "stream": True}
        said, ended = "", False
        try:
            async with client.stream("POST", "/v1/responses", json=body) as response:
                if response.status_code != 200:
                    self.failures.append(f"{response.status_code} {(await response.aread()).decode()[:200]}")
                    return
                async for line in response.aiter_lines():
                    if not line.startswith("data: "):
                        continue
                    event = json.loads(line[6:])
                    if event["type"] == "response.output_text.delta":
                        said += event["delta"]
                    elif event["type"] in ENDS:
                        ended = True
                        self._ended(asked, said, event)
        except (httpx.TransportError, ConnectionError):
            if not ended:
                raise
        if not ended:
            raise httpx.ReadError("the stream ended early")

"""Ten minutes of bad manners: connects, cancels, steers, drops, slow readers and malformed frames.

Every client counts what it sent and what ended it; a request that was answered twice, or by nothing while its
connection lived, is a failure. At the end the server must hold no answer, no engine session, no task and no
file handle that it did not hold after a warm-up, and its memory must have stopped growing.

`python bench/soak.py [--seconds 600] [--clients 12]`; last line JSON, exit code 1 where something leaked.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
import uvicorn
import websockets

from keystroke.config import NamedModel, ServerSettings, Settings
from keystroke.engine.echo import EchoEngine
from keystroke.engine.echo_model import echo_model
from keystroke.gateway.app import Gateway, uvicorn_config
from keystroke.gateway.transport.socket import SocketLimits
from keystroke.gateway.work.registry import Registry, local_entry

TERMINAL = {"response.completed", "response.incomplete", "response.failed", "response.cancelled"}
GARBAGE = [
    "{",
    "[]",
    '{"type":"nope"}',
    '{"type":"response.create","temperature":99}',
    "\x00",
    '{"type":"response.create","model":"none","input":"x"}',
]


@dataclass
class Tally:
    """What the clients saw."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def fault(self, words: str) -> None:
        if len(self.faults) < 20:
            self.faults.append(words)
        self.counts["faults"] += 1


class Soak:
    """One server in this process, and clients that misbehave until the time is over."""

    def __init__(self, seconds: float, clients: int, seed: int = 1) -> None:
        self.seconds, self.clients = seconds, clients
        self.random = random.Random(seed)
        self.tally = Tally()
        model = echo_model(step_cost=0.0005)
        assert isinstance(model.engine, EchoEngine)
        self.engine = model.engine
        entry = local_entry("echo", model, named=NamedModel(concurrent=8), max_queue=256)
        settings = Settings(server=ServerSettings(port=0, drain_s=0.1, max_frame_bytes=100_000))
        self.gateway = Gateway(Registry([entry]), settings, socket_limits=SocketLimits(patience=2.0))
        self.entry = entry

    async def run(self) -> dict[str, Any]:
        config = uvicorn_config(self.gateway)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 - uvicorn offers no event to wait for
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.ws = f"ws://127.0.0.1:{port}/v1/responses"
        await self._play(min(3.0, self.seconds / 5))
        before = await self._settle()
        samples = [before["rss_mb"]]
        began = time.monotonic()
        while (left := self.seconds - (time.monotonic() - began)) > 0:
            await self._play(min(left, max(2.0, self.seconds / 10)))
            samples.append((await self._settle())["rss_mb"])
        after = await self._settle()
        server.should_exit = True
        await serving
        return self._verdict(before, after, samples)

    async def _play(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        await asyncio.gather(*(self._client(deadline) for _ in range(self.clients)))

    async def _settle(self) -> dict[str, float]:
        """What is held once nothing is asked for."""
        for _ in range(1000):
            busy = self.gateway.service.under_way or self.engine.live or self.entry.scheduler.waiting
            if not busy and not self.gateway._connections and not self.entry.scheduler.running:
                break
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        gc.collect()
        process = psutil.Process()
        return {
            "live": len(self.gateway.service.under_way),
            "sessions": len(self.engine.live),
            "connections": len(self.gateway._connections),
            "tasks": len(asyncio.all_tasks()),
            "files": process.num_fds(),
            "rss_mb": process.memory_info().rss / 2**20,
        }

    def _verdict(
        self, before: dict[str, float], after: dict[str, float], samples: list[float]
    ) -> dict[str, Any]:
        for name in ("live", "sessions", "connections"):
            if after[name]:
                self.tally.fault(f"{after[name]:.0f} {name} left behind")
        for name in ("tasks", "files"):
            if after[name] > before[name] + 2:
                self.tally.fault(f"{name} grew from {before[name]:.0f} to {after[name]:.0f}")
        half = len(samples) // 2
        growth = max(samples[half:]) - max(samples[: half + 1])
        if growth > 30:
            self.tally.fault(f"memory grew by {growth:.0f} MB in the second half")
        return {
            "seconds": self.seconds,
            "counts": dict(sorted(self.tally.counts.items())),
            "faults": self.tally.faults,
            "before": {k: round(v, 1) for k, v in before.items()},
            "after": {k: round(v, 1) for k, v in after.items()},
            "memory_growth_mb": round(growth, 1),
        }

    # Clients

    async def _client(self, deadline: float) -> None:
        kinds: list[Callable[[], Any]] = [
            self._chatter, self._chatter, self._canceller, self._steerer, self._dropper, self._closer,
            self._babbler, self._slow_reader, self._sse_dropper, self._plain, self._ghost,
        ]  # fmt: skip
        while time.monotonic() < deadline:
            kind = self.random.choice(kinds)
            try:
                async with asyncio.timeout(30):
                    await kind()
                self.tally.counts[kind.__name__.strip("_")] += 1
            except TimeoutError:
                self.tally.fault(f"{kind.__name__} hung")
            except (OSError, websockets.WebSocketException, httpx.HTTPError) as error:
                self.tally.fault(f"{kind.__name__}: {type(error).__name__} {error}")

    def _connect(self) -> Any:
        return websockets.connect(self.ws, compression=None, max_size=None, open_timeout=20)

    async def _create(self, socket: Any, text: str, **more: Any) -> None:
        body = {"type": "response.create", "input": text, "store": False, **more}
        await socket.send(json.dumps(body))
        self.tally.counts["requests"] += 1

    async def _until_end(self, socket: Any) -> tuple[str, dict[str, Any]]:
        """The terminal event; more than one for the same response is a fault."""
        while True:
            event = json.loads(await socket.recv())
            kind = event["type"]
            if kind in TERMINAL:
                self.tally.counts["terminal"] += 1
                identity = event["response"]["id"]
                if identity in self._ended_on(socket):
                    self.tally.fault(f"{identity} ended twice")
                self._ended_on(socket).add(identity)
                return kind, event["response"]
            if kind == "error":
                self.tally.counts["errors"] += 1
                return kind, event["error"]

    @staticmethod
    def _ended_on(socket: Any) -> set[str]:
        if not hasattr(socket, "ended_responses"):
            socket.ended_responses = set()
        found: set[str] = socket.ended_responses
        return found

    async def _chatter(self) -> None:
        async with self._connect() as socket:
            previous: dict[str, Any] = {}
            for turn in range(self.random.randint(1, 5)):
                text = f"turn {turn} " * self.random.randint(1, 20)
                await self._create(socket, text, **previous)
                kind, response = await self._until_end(socket)
                if kind != "response.completed":
                    self.tally.fault(f"a turn ended with {kind}: {response}")
                    return
                previous = {"previous_response_id": response["id"]}

    async def _canceller(self) -> None:
        async with self._connect() as socket:
            await self._create(socket, "cancel me " * 200)
            created = json.loads(await socket.recv())
            await asyncio.sleep(self.random.random() * 0.05)
            await socket.send(
                json.dumps({"type": "response.cancel", "response_id": created["response"]["id"]})
            )
            kind, _ = await self._until_end(socket)
            if kind not in ("response.cancelled", "response.completed"):
                self.tally.fault(f"a cancelled response ended with {kind}")

    async def _steerer(self) -> None:
        async with self._connect() as socket:
            await self._create(socket, "a long story " * 100)
            identity = json.loads(await socket.recv())["response"]["id"]
            await asyncio.sleep(self.random.random() * 0.05)
            steer = {"type": "response.steer", "previous_response_id": identity, "input": "be brief"}
            await socket.send(json.dumps(steer))
            kind, response = await self._until_end(socket)
            steered = (response.get("incomplete_details") or {}).get("reason") == "steered"
            if kind == "response.incomplete" and steered:
                kind, response = await self._until_end(socket)
                if kind != "response.completed":
                    self.tally.fault(f"a successor ended with {kind}")

    async def _dropper(self) -> None:
        """Leaves as Codex does: the TCP connection is gone, without a close frame."""
        socket = await self._connect()
        for priority in range(self.random.randint(1, 4)):
            await self._create(socket, "never read " * 200, stream_id=f"l{priority}")
        await asyncio.sleep(self.random.random() * 0.05)
        socket.transport.abort()

    async def _closer(self) -> None:
        async with self._connect() as socket:
            await self._create(socket, "left in the middle " * 100)
            await asyncio.sleep(self.random.random() * 0.02)

    async def _babbler(self) -> None:
        async with self._connect() as socket:
            for frame in self.random.sample(GARBAGE, 3):
                await socket.send(frame)
                kind, _ = await self._until_end(socket)
                if kind != "error":
                    self.tally.fault(f"garbage was answered with {kind}")
            await self._create(socket, "still here?")
            kind, _ = await self._until_end(socket)
            if kind != "response.completed":
                self.tally.fault("garbage ended the connection")

    async def _slow_reader(self) -> None:
        async with self._connect() as socket:
            await self._create(socket, "slowly " * 100)
            for _ in range(20):
                await socket.recv()
                await asyncio.sleep(0.005)
            await self._until_end(socket)

    async def _sse_dropper(self) -> None:
        body = {"input": "dropped " * 100, "stream": True, "store": False}
        async with (
            httpx.AsyncClient() as http,
            http.stream("POST", f"{self.url}/v1/responses", json=body) as a,
        ):
            count = 0
            async for _ in a.aiter_lines():
                count += 1
                if count > 20:
                    break

    async def _plain(self) -> None:
        async with httpx.AsyncClient(timeout=25) as http:
            answer = await http.post(f"{self.url}/v1/responses", json={"input": "hello", "store": False})
            if answer.status_code != 200 or answer.json()["status"] != "completed":
                self.tally.fault(f"a plain request was answered with {answer.status_code}")

    async def _ghost(self) -> None:
        """Completions for one buffer that supersede each other, as an editor sends them."""
        async with httpx.AsyncClient(timeout=25) as http:
            body = {
                "prompt": "x = ",
                "suffix": "\n",
                "max_tokens": 30,
                "buffer": f"f{self.random.randint(0, 3)}",
            }
            asked = [http.post(f"{self.url}/v1/completions", json=body) for _ in range(3)]
            for answer in await asyncio.gather(*asked):
                if answer.status_code not in (200, 409):
                    self.tally.fault(f"a completion was answered with {answer.status_code}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=12)
    options = parser.parse_args()
    result = asyncio.run(Soak(options.seconds, options.clients).run())
    for name, count in result["counts"].items():
        print(f"{count:>8}  {name}")
    for fault in result["faults"]:
        print(f"   fault  {fault}")
    print(json.dumps(result))
    sys.stdout.flush()
    os._exit(1 if result["faults"] else 0)


if __name__ == "__main__":
    main()

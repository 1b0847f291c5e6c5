"""Soak test with faults: cancels, steers, drops, slow readers, garbage, tasks, kills, a store that fails.

Regime: one server with the echo engine (a token in half a millisecond), its database and all clients in this
process: the Responses API over sockets and HTTP, Chat Completions, Messages, Ollama, and tasks that edit a
file and run its check in a sandbox. From time to time the engine fails in the middle of answers, processes
of a check are killed, the disk is full, the database is locked or read-only, or the clock is set. A second
server is killed while it stores and started again. Every client counts its requests and their terminal
events. The ceiling: `lost` 0 (requests without a terminal event while their connection lived or could be
taken up again, and responses acknowledged as stored that are not there), `doubled` 0 (a second terminal
event), memory and handles flat, no process or folder left, and no callback of the loop that takes long
(`worst_stall_ms`, in time of this thread, so that a busy machine is not counted; the garbage collector's
longest look at server and clients together is `worst_collection_ms`).

`make bench-soak ARGS="--seconds 3600 --clients 12"`; last line JSON with `requests`, `lost`, `doubled`,
`rss_growth_mb`, `worst_stall_ms`; exit code 1 if one of the first three is wrong or a resource was not
released.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import uvicorn
import websockets

from bench.record import record
from bench.soak_faults import KilledServer, ReadOnly, full_disk, locked, moved_clock
from keystroke.config import NamedModel, PathSettings, ServerSettings, Settings
from keystroke.engine.echo import EchoEngine, Script
from keystroke.engine.echo_model import echo_model
from keystroke.gateway.app import Gateway, tune_collector, uvicorn_config
from keystroke.gateway.record.store import Store, default_url
from keystroke.gateway.transport.socket import SocketLimits
from keystroke.gateway.work.registry import ModelRegistry, local_entry

PATIENCE = 240.0  # seconds after which a client counts as hung,
COMPUTED = 60.0  # if this process computed for as many meanwhile: a busy machine may give it none
KILLS_FROM = 20.0  # seconds of a stretch from which the second server is killed in it
POOL = 5  # connections to the database that stay open
TERMINAL = {"response.completed", "response.incomplete", "response.failed", "response.cancelled"}
GARBAGE = [
    "{",
    "[]",
    '{"type":"nope"}',
    '{"type":"response.create","temperature":99}',
    "\x00",
    '{"type":"response.create","model":"none","input":"x"}',
]
BROKEN = "def add(a, b):\n    return a - b\n"
FIXED = "def add(a, b):\n    return a + b\n"
CHECK = "python3 -c 'from calc import add; assert add(1, 2) == 3'"
_began: ContextVar[float] = ContextVar("began")  # when the client of this task began


@dataclass
class SoakCounts:
    """What the clients saw."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def fault(self, words: str) -> None:
        if len(self.faults) < 20:
            self.faults.append(words[:300])
            _say(f"fault  {words[:300]}")  # an hour is long to wait for it
        self.counts["faults"] += 1


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # the disk may be full for a log, too
        print(line, file=sys.stderr, flush=True)


async def _patiently(work: Coroutine[Any, Any, None]) -> None:
    """Raises TimeoutError where a client is hung."""
    computed = time.process_time()
    task = asyncio.ensure_future(work)
    while not (await asyncio.wait([task], timeout=PATIENCE))[0]:
        if time.process_time() - computed > COMPUTED:
            task.cancel()
            await asyncio.wait([task])
            raise TimeoutError
    await task


class FaultyEngine(EchoEngine):
    """Fails at a step now and then, as a GPU that falls off its bus would."""

    failing = 0  # steps that are still to fail

    def step_many(self, requests: Any) -> Any:
        if self.failing:
            self.failing -= 1
            raise RuntimeError("the engine was killed (on purpose)")
        return super().step_many(requests)


class Stalls:
    """The longest time one callback kept the loop, in time of its thread: waiting for a core is not
    counted, nor what the clients here do for themselves."""

    def __init__(self) -> None:
        self.worst, self.what = 0.0, ""
        self.collection = 0.0  # the longest look of the garbage collector, which belongs to no callback
        self._collecting, self._collected = 0.0, 0.0
        self.watching = False  # not while it starts, nor while the soak itself counts what is held
        self._run: Callable[[asyncio.Handle], None] = asyncio.Handle._run

    def __enter__(self) -> Stalls:
        def timed(handle: asyncio.Handle) -> None:
            self._collected = 0.0
            began = time.thread_time()
            self._run(handle)
            spent = time.thread_time() - began
            if not self.watching:
                return
            self.collection = max(self.collection, self._collected)
            own = spent - self._collected
            if own > self.worst and not (who := _who(handle)).startswith(("Soak.", "KilledServer.")):
                self.worst, self.what = own, who

        setattr(asyncio.Handle, "_run", timed)  # noqa: B010 - there is no public way to look
        gc.callbacks.append(self._collector)
        return self

    def __exit__(self, *_: object) -> None:
        setattr(asyncio.Handle, "_run", self._run)  # noqa: B010
        gc.callbacks.remove(self._collector)

    def _collector(self, phase: str, _about: object) -> None:
        if phase == "start":
            self._collecting = time.thread_time()
        else:
            self._collected += time.thread_time() - self._collecting


def _repairing(other: Script) -> Script:
    """Repairs the file of a task and answers the rest as `other` does."""
    return lambda prompt: f"{FIXED}```\n" if "def add" in prompt else other(prompt)


def _http(base_url: str = "") -> httpx.AsyncClient:
    """A client that opens a connection for every request: a server may close an idle one at any time, and
    on a busy machine seconds lie between two requests."""
    once = httpx.Limits(max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=base_url, timeout=10 * PATIENCE, verify=False, limits=once)


def _who(handle: asyncio.Handle) -> str:
    """What a handle ran: the coroutine of a task, or the callback."""
    ran = getattr(handle, "_callback", None)
    task = getattr(ran, "__self__", None)
    if isinstance(task, asyncio.Task):
        return f"{task.get_coro().__qualname__} ({task.get_name()})"  # type: ignore[union-attr]
    return repr(ran)[:300]


class Soak:
    """One server in this process, and clients that misbehave until the time is over."""

    def __init__(self, seconds: float, clients: int, seed: int = 1, folder: Path | None = None) -> None:
        self.seconds, self.clients = seconds, clients
        self.random = random.Random(seed)
        self.tally = SoakCounts()
        self.stalls = Stalls()
        model = echo_model(step_cost=0.0005)
        assert isinstance(model.engine, EchoEngine)
        repeat = model.engine.script
        assert repeat is not None
        self.engine = FaultyEngine(_repairing(repeat), step_cost=0.0005)
        model = dataclasses.replace(model, engine=self.engine)
        entry = local_entry("echo", model, named=NamedModel(concurrent=8), max_queue=256)
        self._temporary = tempfile.TemporaryDirectory()
        self.folder = folder or Path(self._temporary.name)
        self.scratch = self.folder / "tmp"  # where tasks make their copies
        self.scratch.mkdir()
        settings = Settings(
            server=ServerSettings(port=0, drain_s=0.1, max_frame_bytes=100_000),
            paths=PathSettings(state=self.folder / "state"),
        )
        self.store = Store(default_url(self.folder), quota_mb=64)
        self.read_only = ReadOnly(self.store)
        self.killed = KilledServer(self.folder / "killed", self.random)
        self.acknowledged: list[str] = []  # responses that were said to be stored
        self.trouble = False  # the engine or the disk fails on purpose: failures are no fault
        self.trouble_over = 0.0  # when it was so last
        self.gateway = Gateway(
            ModelRegistry([entry]), settings, store=self.store, socket_limits=SocketLimits(patience=2.0)
        )
        self.entry = entry

    async def run(self) -> dict[str, Any]:
        usual, tempfile.tempdir = tempfile.tempdir, str(self.scratch)
        try:
            with self.stalls:
                result = await self._run()
        finally:
            tempfile.tempdir = usual
        result["worst_stall_ms"] = round(self.stalls.worst * 1e3, 1)
        result["worst_stall"] = self.stalls.what
        result["worst_collection_ms"] = round(self.stalls.collection * 1e3, 1)
        self._temporary.cleanup()
        return result

    async def _run(self) -> dict[str, Any]:
        config = uvicorn_config(self.gateway)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 - uvicorn offers no event to wait for
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.ws = f"ws://127.0.0.1:{port}/v1/responses"
        await self._tasker()  # it looks for a sandbox, and imports what tasks need
        await self._play(min(30.0, self.seconds / 5))
        held = [self.store.engine.connect() for _ in range(POOL)]  # all that its pool keeps open
        for connection in held:
            connection.close()
        tune_collector()  # as a server does once it is up
        before = await self._settle()
        samples = [before["rss_mb"]]
        began = time.monotonic()
        while (left := self.seconds - (time.monotonic() - began)) > 0:
            await self._play(min(left, max(2.0, self.seconds / 10)))
            samples.append((await self._settle())["rss_mb"])
            so_far = {name: self.tally.counts[name] for name in ("requests", "terminal", "lost", "faults")}
            _say(f"{time.monotonic() - began:6.0f} s  {so_far}")
        after = await self._settle()
        await self._look_for_stored()
        server.should_exit = True
        await serving
        return self._verdict(before, after, samples)

    async def _look_for_stored(self) -> None:
        """What was acknowledged as stored is there; the quota may have taken the oldest."""
        self.tally.counts["lost"] += self.killed.lost
        self.tally.counts["kept_through_kills"] = self.killed.acknowledged
        if self.killed.lost:
            self.tally.fault(f"{self.killed.lost} stored responses of a killed server are not there")
        await self.store.flush()
        for identity in self.acknowledged[-500:]:
            if await self.store.response(identity) is None:
                self.tally.counts["lost"] += 1
                self.tally.fault(f"{identity} was said to be stored and is not there")

    async def _play(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        clients = (self._client(deadline) for _ in range(self.clients))
        await asyncio.gather(*clients, self._break(deadline), self._kill(deadline))

    async def _kill(self, deadline: float) -> None:
        """Kill the second server again and again."""
        while time.monotonic() + KILLS_FROM < deadline:
            try:
                await self.killed.round()
                self.tally.counts["server_killed"] += 1
            except RuntimeError as error:
                self.tally.fault(str(error))
            await asyncio.sleep(5)

    async def _break(self, deadline: float) -> None:
        """Something fails for a moment, and then all is well again."""
        faults: dict[str, Any] = {
            "disk_full": full_disk,
            "store_locked": locked,
            "store_read_only": self.read_only.enter,
        }
        while time.monotonic() + 1.0 < deadline:
            await asyncio.sleep(self.random.uniform(0.3, 1.5))
            kind = self.random.choice(["engine_killed", "clock_moved", *faults])
            self.tally.counts[kind] += 1
            if kind == "clock_moved":  # which nobody may notice
                days = self.random.choice([-400, -1, 1, 40])
                with moved_clock(days * 86_400):
                    await asyncio.sleep(1.0)
                continue
            self.trouble = True
            if kind == "engine_killed":
                self.engine.failing = self.random.randint(1, 5)
                await asyncio.sleep(0.3)
                self.engine.failing = 0
            else:
                with faults[kind](self.store):
                    await asyncio.sleep(0.5)
                while self.store.failing:  # noqa: ASYNC110 - it is tried again every two seconds
                    await asyncio.sleep(0.05)
            await asyncio.sleep(0.3)
            self.trouble, self.trouble_over = False, time.monotonic()

    async def _settle(self) -> dict[str, float]:
        """What is held once nothing is asked for."""
        self.stalls.watching = False
        try:
            return await self._held()
        finally:
            await asyncio.sleep(0)
            self.stalls.watching = True

    async def _held(self) -> dict[str, float]:
        manager = self.gateway.tasks
        for _ in range(6000):
            busy = (
                manager.active_count
                or self.gateway.service.active_work
                or self.engine.live
                or self.entry.scheduler.waiting
            )
            if not busy and not self.gateway._connections and not self.entry.scheduler.running:
                break
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        gc.collect()
        process = psutil.Process()
        return {
            "live": len(self.gateway.service.active_work),
            "sessions": len(self.engine.live),
            "connections": len(self.gateway._connections),
            "tasks": len(asyncio.all_tasks()),
            "files": process.num_fds(),
            "processes": sum(child.pid != self.killed.pid for child in process.children(recursive=True)),
            "folders": len(list(self.scratch.iterdir())),
            "rss_mb": process.memory_info().rss / 2**20,
        }

    def _verdict(
        self, before: dict[str, float], after: dict[str, float], samples: list[float]
    ) -> dict[str, Any]:
        for name in ("live", "sessions", "connections", "folders"):
            if after[name]:
                self.tally.fault(f"{after[name]:.0f} {name} left behind")
        for name, most in (("tasks", 2), ("files", 2), ("processes", 0)):
            if after[name] > before[name] + most:
                self.tally.fault(f"{name} grew from {before[name]:.0f} to {after[name]:.0f}")
        half = len(samples) // 2
        growth = max(samples[half:]) - max(samples[: half + 1])
        if growth > 30:
            self.tally.fault(f"memory grew by {growth:.0f} MB in the second half")
        return {
            "requests": self.tally.counts["requests"],
            "lost": self.tally.counts["lost"],
            "doubled": self.tally.counts["doubled"],
            "rss_growth_mb": round(growth, 1),
            "worst_stall_ms": 0.0,
            "seconds": self.seconds,
            "counts": dict(sorted(self.tally.counts.items())),
            "faults": self.tally.faults,
            "before": {k: round(v, 1) for k, v in before.items()},
            "after": {k: round(v, 1) for k, v in after.items()},
            "rss_mb": [round(each) for each in samples],
        }

    # Clients

    async def _client(self, deadline: float) -> None:
        kinds: list[Callable[[], Any]] = [
            self._chatter, self._chatter, self._canceller, self._steerer, self._dropper, self._closer,
            self._babbler, self._slow_reader, self._sse_dropper, self._plain, self._ghost, self._returner,
            self._keeper, self._backgrounder, self._deaf, self._chat_client, self._messages_client,
            self._ollama_client, self._tasker,
        ]  # fmt: skip
        while time.monotonic() < deadline:
            kind = self.random.choice(kinds)
            _began.set(time.monotonic())
            try:
                await _patiently(kind())
                self.tally.counts[kind.__name__.strip("_")] += 1
            except TimeoutError:
                self.tally.counts["lost"] += 1
                self.tally.fault(f"{kind.__name__} hung")
            except (OSError, websockets.WebSocketException, httpx.HTTPError) as error:
                self.tally.fault(f"{kind.__name__}: {type(error).__name__} {error}")

    def _connect(self) -> Any:
        return websockets.connect(self.ws, compression=None, max_size=None, open_timeout=10 * PATIENCE)

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
                    self.tally.counts["doubled"] += 1
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

    def _failed(self, kind: str, why: str) -> None:
        """An answer that did not complete: a fault, unless something is broken on purpose."""
        self.tally.counts["failed"] += 1
        if not self.trouble and self.trouble_over < _began.get():
            self.tally.fault(why)

    async def _returner(self) -> None:
        """Is cut off in the middle, comes back, and has every event once."""
        socket = await self._connect()
        await self._create(socket, "come back " * 20, on_disconnect="continue", stream_id="r")
        heard = []
        for _ in range(self.random.randint(1, 12)):
            heard.append(json.loads(await socket.recv()))
            if heard[-1]["type"] in TERMINAL or heard[-1]["type"] == "error":
                socket.transport.abort()
                self.tally.counts["terminal"] += 1
                return
        socket.transport.abort()
        async with self._connect() as socket:
            again = {
                "type": "response.resume",
                "response_id": heard[0]["response"]["id"],
                "starting_after": heard[-1]["sequence_number"],
                "stream_id": "r",
            }
            await socket.send(json.dumps(again))
            while heard[-1]["type"] not in TERMINAL:
                heard.append(json.loads(await socket.recv()))
                if heard[-1]["type"] == "error":
                    self.tally.counts["lost"] += 1
                    self.tally.fault(f"a turn could not be taken up again: {heard[-1]['error']}")
                    return
        self.tally.counts["terminal"] += 1
        numbers = [event["sequence_number"] for event in heard]
        if len(set(numbers)) < len(numbers):
            self.tally.counts["doubled"] += 1
            self.tally.fault("a turn that was taken up again said something twice")
        if numbers[-1] - numbers[0] + 1 != len(numbers) and numbers != sorted(numbers):
            self.tally.counts["lost"] += 1
            self.tally.fault("a turn that was taken up again lost events")

    async def _keeper(self) -> None:
        """Wants its answer stored; what is acknowledged is looked for at the end."""
        async with _http() as http:
            self.tally.counts["requests"] += 1
            answer = await http.post(f"{self.url}/v1/responses", json={"input": "keep this", "store": True})
            if answer.status_code == 200 and answer.json()["status"] == "completed":
                self.tally.counts["terminal"] += 1
                if answer.json()["store"]:
                    self.acknowledged.append(answer.json()["id"])
                else:
                    self._failed("keeper", "a response could not be stored")
            else:
                self._failed("keeper", f"a request to be stored was answered with {answer.status_code}")

    async def _backgrounder(self) -> None:
        async with _http() as http:
            self.tally.counts["requests"] += 1
            body = {"input": "in the background", "background": True}
            made = await http.post(f"{self.url}/v1/responses", json=body)
            if made.status_code != 200:
                self._failed("backgrounder", f"a background request was answered with {made.status_code}")
                return
            place, found = f"{self.url}/v1/responses/{made.json()['id']}", made
            try:
                while True:
                    found = await http.get(place)
                    if found.json().get("status") in ("completed", "failed", "cancelled", "incomplete"):
                        self.tally.counts["terminal"] += 1
                        return
                    if found.status_code == 404:  # 503 while the database cannot be read
                        self.tally.counts["lost"] += 1
                        self.tally.fault(f"a background response is gone: {found.text:.200}")
                        return
                    await asyncio.sleep(0.1)
            except asyncio.CancelledError:  # it hung
                _say(f"last answer about a background response: {found.status_code} {found.text:.200}")
                raise

    async def _deaf(self) -> None:
        """Asks for much over SSE, reads nothing, and goes."""
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", int(self.url.rsplit(":", 1)[1]), limit=1024
        )
        body = json.dumps({"input": "unheard " * 2000, "stream": True, "store": False}).encode()
        head = b"POST /v1/responses HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(body)
        writer.write(head + body)
        await asyncio.sleep(self.random.random() * 0.5)
        writer.transport.abort()
        del reader

    async def _chatter(self) -> None:
        async with self._connect() as socket:
            previous: dict[str, Any] = {}
            for turn in range(self.random.randint(1, 5)):
                text = f"turn {turn} " * self.random.randint(1, 20)
                await self._create(socket, text, **previous)
                kind, response = await self._until_end(socket)
                if kind != "response.completed":
                    self._failed(kind, f"a turn ended with {kind}: {response}")
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
                self._failed(kind, f"a cancelled response ended with {kind}")

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
                    self._failed(kind, f"a successor ended with {kind}")

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
                self._failed(kind, "garbage ended the connection")

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
            _http() as http,
            http.stream("POST", f"{self.url}/v1/responses", json=body) as a,
        ):
            count = 0
            async for _ in a.aiter_lines():
                count += 1
                if count > 20:
                    break

    async def _plain(self) -> None:
        async with _http() as http:
            answer = await http.post(f"{self.url}/v1/responses", json={"input": "hello", "store": False})
            self.tally.counts["requests"] += 1
            if answer.status_code != 200 or answer.json()["status"] != "completed":
                self._failed("plain", f"a plain request was answered with {answer.status_code}")
            else:
                self.tally.counts["terminal"] += 1

    async def _chat_client(self) -> None:
        body = {"model": "echo", "messages": [{"role": "user", "content": "chat"}], "stream": True}
        await self._stream("/v1/chat/completions", body, lambda line: line == "data: [DONE]", '"error"')

    async def _messages_client(self) -> None:
        asked = [{"role": "user", "content": "messages"}]
        body = {"model": "echo", "messages": asked, "max_tokens": 50, "stream": True}
        await self._stream("/v1/messages", body, lambda line: line == "event: message_stop", "event: error")

    async def _ollama_client(self) -> None:
        body = {"model": "echo", "messages": [{"role": "user", "content": "ollama"}]}
        await self._stream("/api/chat", body, lambda line: '"done":true' in line, '"error"')

    async def _stream(self, path: str, body: dict[str, Any], ends: Callable[[str], bool], bad: str) -> None:
        """A streamed answer of one of the other APIs: it ends exactly once, or says why not."""
        self.tally.counts["requests"] += 1
        async with (
            _http() as http,
            http.stream("POST", self.url + path, json=body) as answer,
        ):
            lines = [line async for line in answer.aiter_lines()]
        ended, failed = sum(map(ends, lines)), any(bad in line for line in lines)
        if failed or answer.status_code != 200:
            self._failed(path, f"{path} was answered with {answer.status_code}: {lines[-3:]}")
        elif ended == 0:
            self.tally.counts["lost"] += 1
            self.tally.fault(f"{path} did not end: {lines[-3:]}")
        self.tally.counts["terminal"] += 1
        if ended > 1:
            self.tally.counts["doubled"] += 1
            self.tally.fault(f"{path} ended {ended} times")

    async def _tasker(self) -> None:
        """A task that repairs a file and checks it; now it is stopped, now the processes of its check die.
        The file is as it was or repaired, never anything else."""
        project = Path(tempfile.mkdtemp(prefix="project-", dir=self.folder))
        try:
            (project / "calc.py").write_text(BROKEN)
            await self._do_task(project)
        finally:
            shutil.rmtree(project, ignore_errors=True)

    async def _do_task(self, project: Path) -> None:
        body = {"workspace": str(project), "instruction": "make add in calc.py add", "files": ["calc.py"]}
        body |= {"check": CHECK, "approve": "never"}
        how = self.random.choice(["finish", "finish", "stop", "kill"])
        self.tally.counts["requests"] += 1
        async with _http(self.url) as http:
            made = await http.post("/v1/tasks", json=body)
            if made.status_code != 200:
                self._failed("tasker", f"a task was answered with {made.status_code} {made.text:.200}")
                return
            place = f"/v1/tasks/{made.json()['id']}"
            await asyncio.sleep(self.random.random())
            if how == "stop":
                await http.post(f"{place}/cancel", json={})
            elif how == "kill":
                self._kill_commands()
            task = (await http.get(place)).json()
            while task["status"] in ("queued", "working"):
                await asyncio.sleep(0.1)
                task = (await http.get(place)).json()
            self.tally.counts["terminal"] += 1
            self.tally.counts[f"task_{task['status']}"] += 1
            text = (project / "calc.py").read_text()
            if text != (FIXED if task["status"] == "done" else BROKEN):
                self.tally.counts["lost"] += 1
                self.tally.fault(f"a task is {task['status']} and its file is {text!r}")
            if how == "finish" and task["status"] != "done":
                self._failed("tasker", f"a task ended as {task['status']}: {task['line']}")
            if task["status"] == "done" and self.random.random() < 0.5:
                undone = await http.post(f"{place}/undo", json={})
                if undone.status_code != 200 or (project / "calc.py").read_text() != BROKEN:
                    self._failed("tasker", f"a task could not be undone: {undone.text:.200}")

    def _kill_commands(self) -> None:
        """Kill what the checks of tasks run. Other tasks notice it too."""
        if self.killed.pid < 0:
            return
        self.trouble_over = time.monotonic()
        for child in psutil.Process().children(recursive=True):
            if child.pid != self.killed.pid:
                with contextlib.suppress(psutil.Error):
                    child.kill()

    async def _ghost(self) -> None:
        """Completions for one buffer that supersede each other, as an editor sends them."""
        async with _http() as http:
            body = {
                "prompt": "x = ",
                "suffix": "\n",
                "max_tokens": 30,
                "buffer": f"f{self.random.randint(0, 3)}",
            }
            asked = [http.post(f"{self.url}/v1/completions", json=body) for _ in range(3)]
            for answer in await asyncio.gather(*asked):
                self.tally.counts["requests"] += 1
                if answer.status_code not in (200, 409):
                    self._failed("ghost", f"a completion was answered with {answer.status_code}")
                else:
                    self.tally.counts["terminal"] += 1


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
    record("soak", result)
    sys.stdout.flush()
    os._exit(1 if result["faults"] else 0)


if __name__ == "__main__":
    main()

"""Replicas on a local Ray: growth of throughput, reuse of prefixes, and the overhead of Ray.

Regime: one machine, a Ray of its own on loopback, gateways and echo engines of fixed step time as separate
processes. The engines sleep, so the cores are not the limit until the pipeline itself takes them all: what is
measured is routing, queueing and transport. Requests come over HTTP from this process.

  linear_share       throughput of ghost text with 4 replicas over 4 times that with 1, six requests under
                     way for each replica (5 tokens of 25 ms: a replica gives 8 answers a second)
  p95_ms_1, _2, _4   of those requests
  gateway_cpu_ms     CPU time of the gateway for such a request, at 4 replicas
  reuse_gain         prompt tokens computed with calls dealt out in turn, over those computed with prefix
                     routing: 24 conversations of 12 turns in random order over 4 replicas, 5,000 tokens to
                     begin with and about 430 a turn, caches that hold everything (so that nothing is won by
                     eviction)
  ray_overhead_ms    median time of a request through gateway and replica, less that of the same request to a
                     gateway with the engine in its own process; one client, same step time
  lost               requests without exactly one right answer while one of 4 engine replicas is killed
  resume_gap_ms      longest silence within 12 streams of about 6 s over 4 replicas that step one answer at
                     a time, while one replica is killed
  isolation_p95_ratio
                     p95 of ghost text of one key with 50 chats of another key beside it, over alone; one
                     replica that steps 16 answers together, 10 ms a step
  head_recovery_s    seconds from the death of Ray's head (its GCS process is killed) under
                     `keystroke scale up` to the first answer of the service that was started again

Ceiling: `linear_share` 1, `reuse_gain` 4 (so many replicas), `ray_overhead_ms` one trip between processes.

    make bench-scale ARGS="[--seconds N]"
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from bench.free_port import free_port
from bench.record import record
from keystroke.config import Settings, load_settings
from keystroke.gateway.access.keys import make_key
from keystroke.gateway.record.store import Store, default_url
from keystroke.scale.cluster import connect_ray
from keystroke.scale.rollout import deploy

STEP, TOKENS = 0.025, 8
QUICK = 0.005  # seconds a step, where the cost of transport is looked for
KEYS = [make_key("typing"), make_key("chatting")]  # two tenants
RESUMED = 0.02  # seconds a step, where streams are interrupted
TLS = httpx.create_ssl_context()  # once: each takes 60 ms of this process, which measures meanwhile


@dataclass
class RequestTimes:
    """What clients saw of one run."""

    times: list[float]
    seconds: float

    @property
    def rate(self) -> float:
        return len(self.times) / self.seconds

    @property
    def p95(self) -> float:
        return sorted(self.times)[int(0.95 * len(self.times))] * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--seconds", type=float, default=8.0, help="length of each run under load")
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = _settings(Path(folder))
        figures = _measured(settings, told.seconds)
    print("| figure | measured | aim |")
    print("|---|---|---|")
    aims = {"linear_share": "0.9", "reuse_gain": "3", "lost": "0", "isolation_p95_ratio": "at most 1.5"}
    for name, value in figures.items():
        print(f"| {name} | {value} | {aims.get(name, 'reported')} |")
    record("scale", figures)


def _settings(folder: Path) -> Settings:
    port = free_port()
    with closing(Store(default_url(folder))) as store:  # the tables, once
        for key, _ in KEYS:
            store.add_key(key)
    flags = {
        "paths.state": str(folder),
        "server.port": port,
        "server.drain_s": 3,
        "server.max_queue": 512,
        "scale.gateways": 1,
        "scale.replicas": 4,
        "speculation.enabled": False,
    }
    return load_settings(flags, cwd=folder, environ={"KEYSTROKE_CONFIG": str(folder)})


def _measured(settings: Settings, seconds: float) -> dict[str, float]:
    url = f"http://127.0.0.1:{settings.server.port}"
    figures: dict[str, float] = {}
    with connect_ray(settings) as serve:
        from keystroke.scale.application import EchoLoader, application
        from keystroke.scale.served_models import NAME

        def up(replicas: int, step: float, *, spread: bool = False, batch: int = 1) -> None:
            fewer = replace(settings, scale=replace(settings.scale, replicas=replicas))
            loader = EchoLoader(step_cost=step, max_batch=batch, max_queue=512)
            deploy(serve, application(fewer, echo=loader, spread=spread), NAME)
            _old_ones_gone(replicas + 1)

        rates = {}
        for replicas in (1, 2, 4):
            up(replicas, STEP)
            asyncio.run(_ghost(url, replicas, 1.0))  # connections and caches
            before = _gateway_seconds()
            seen = asyncio.run(_ghost(url, 6 * replicas, seconds))
            figures["gateway_cpu_ms"] = round((_gateway_seconds() - before) / len(seen.times) * 1e3, 2)
            rates[replicas] = seen.rate
            figures[f"rate_{replicas}"] = round(seen.rate, 2)
            figures[f"p95_ms_{replicas}"] = round(seen.p95, 1)
        figures["linear_share"] = round(rates[4] / (4 * rates[1]), 3)
        figures["lost"] = asyncio.run(_loss(url, seconds))
        up(4, RESUMED)
        figures["resume_gap_ms"] = round(asyncio.run(_resume_gap(url)) * 1e3)
        print(figures, file=sys.stderr)  # so far
        up(1, 0.01, batch=16)
        alone, beside_chat = asyncio.run(_isolation(url, seconds))
        figures["ghost_p95_ms_alone"] = round(alone, 1)
        figures["ghost_p95_ms_beside_chat"] = round(beside_chat, 1)
        figures["isolation_p95_ratio"] = round(beside_chat / alone, 2)
        print(figures, file=sys.stderr)
        up(4, 0.0)
        computed = asyncio.run(_conversations(url))
        up(4, 0.0, spread=True)
        figures["reuse_gain"] = round(asyncio.run(_conversations(url)) / computed, 2)
        up(1, QUICK)
        with _direct(settings) as beside:
            through, direct = asyncio.run(_one_client(url, beside))
    figures["ray_overhead_ms"] = round((through - direct) * 1e3, 2)
    figures["direct_ms"] = round(direct * 1e3, 2)
    figures["head_recovery_s"] = round(_head_recovery(settings), 1)
    return figures


def _replicas() -> list[tuple[int, str]]:
    """Serve's replicas below this process, by their titles."""
    found = []
    for pid in _descendants(os.getpid()):
        with suppress(OSError):
            title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            if title.startswith("ray::ServeReplica"):
                found.append((pid, title))
    return found


def _gateway_seconds() -> float:
    """CPU time that gateways have used."""
    spent = 0.0
    for pid, title in _replicas():
        if ":gateway" in title:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            spent += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return spent


def _old_ones_gone(wanted: int) -> None:
    deadline = time.monotonic() + 60
    while len(_replicas()) > wanted and time.monotonic() < deadline:
        time.sleep(0.2)


async def _ghost(url: str, clients: int, seconds: float, token: str = "") -> RequestTimes:
    """Completions from so many clients, each of its own file, one after another."""
    times: list[float] = []
    end = time.perf_counter() + seconds

    headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def client(who: int) -> None:
        async with httpx.AsyncClient(verify=TLS, base_url=url, timeout=60, headers=headers) as http:
            turn = 0
            while time.perf_counter() < end:
                turn += 1
                began = time.perf_counter()
                body = {"model": "auto", "prompt": f"file {who} " * 16 + str(turn), "max_tokens": TOKENS}
                answer = await http.post("/v1/completions", json=body)
                answer.raise_for_status()
                times.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*map(client, range(clients)))
    return RequestTimes(times, time.perf_counter() - began)


async def _conversations(url: str) -> int:
    """Prompt tokens computed for the conversations."""
    rng = random.Random(0)
    turns = [who for who in range(24) for _ in range(12)]
    rng.shuffle(turns)
    last: dict[int, str] = {}
    locks = {who: asyncio.Lock() for who in range(24)}
    computed = 0
    async with httpx.AsyncClient(verify=TLS, base_url=url, timeout=60) as http:

        async def turn(who: int) -> None:
            nonlocal computed
            async with locks[who]:
                first = who not in last
                words = _words(rng, 3000 if first else 400)
                body: dict[str, Any] = {
                    "model": "auto",
                    "instructions": "rule " * 400,
                    "input": f"conversation {who}: {words}",
                    "max_output_tokens": 16,
                }
                if not first:
                    body["previous_response_id"] = last[who]
                answer = (await http.post("/v1/responses", json=body)).json()
                last[who] = answer["id"]
                computed += answer["receipt"]["computed_tokens"]

        for start in range(0, len(turns), 4):
            await asyncio.gather(*map(turn, turns[start : start + 4]))
    return computed


def _words(rng: random.Random, size: int) -> str:
    return "".join(rng.choice("abcdefghijklmnop ") for _ in range(size))


async def _one_client(*urls: str) -> list[float]:
    """Median seconds of a request to each address, asked in turn: what else the machine does falls on all."""
    times: list[list[float]] = [[] for _ in urls]
    async with httpx.AsyncClient(verify=TLS, timeout=60) as http:
        for turn in range(100):
            body = {"model": "auto", "prompt": f"one file {turn}", "max_tokens": TOKENS}
            for url, seen in zip(urls, times, strict=True):
                began = time.perf_counter()
                (await http.post(f"{url}/v1/completions", json=body)).raise_for_status()
                seen.append(time.perf_counter() - began)
    return [median(seen[10:]) for seen in times]


async def _loss(url: str, seconds: float) -> int:
    """Answers that went wrong while an engine replica was killed. Their number is not the point; 0 is."""
    wrong = 0
    end = time.perf_counter() + seconds

    async def client(who: int) -> None:
        nonlocal wrong
        async with httpx.AsyncClient(verify=TLS, base_url=url, timeout=60) as http:
            turn = 0
            while time.perf_counter() < end:
                turn += 1
                asked = f"{who}-{turn}"
                body = {"model": "auto", "input": asked}
                answer = await http.post("/v1/responses", json=body)
                told = answer.json()
                right = answer.status_code == 200 and told["status"] == "completed"
                wrong += not (right and told["output"][0]["content"][0]["text"] == f"You said: {asked}")

    async def killer() -> None:
        await asyncio.sleep(seconds / 3)
        os.kill(next(pid for pid, title in _replicas() if "engine" in title), signal.SIGKILL)

    await asyncio.gather(killer(), *map(client, range(8)))
    return wrong


async def _resume_gap(url: str) -> float:
    """The longest silence within a stream while the engine replica with most streams is killed."""
    gaps: list[float] = []
    started = asyncio.Event()
    begun = 0

    async def stream(who: int) -> None:
        nonlocal begun
        body = {"model": "auto", "input": f"{who} " + "word " * 60, "stream": True}
        async with (
            httpx.AsyncClient(verify=TLS, base_url=url, timeout=120) as http,
            http.stream("POST", "/v1/responses", json=body) as answer,
        ):
            last = 0.0
            async for line in answer.aiter_lines():
                if '"response.output_text.delta"' not in line or not line.startswith("data: "):
                    continue
                now = time.perf_counter()
                if last:
                    gaps.append(now - last)
                else:
                    begun += 1
                    if begun == 4:
                        started.set()
                last = now

    async def killer() -> None:
        await started.wait()
        await asyncio.sleep(1.0)
        os.kill(next(pid for pid, title in _replicas() if "engine" in title), signal.SIGKILL)

    await asyncio.gather(killer(), *map(stream, range(12)))
    return max(gaps)


async def _isolation(url: str, seconds: float) -> tuple[float, float]:
    """p95 in ms of ghost text of 4 developers, alone and beside 50 chat streams."""
    (_, typing), (_, chatting) = KEYS
    await _ghost(url, 4, 1.0, typing)
    alone = await _ghost(url, 4, seconds, typing)
    stop = asyncio.Event()

    async def chat(who: int) -> None:
        body = {"model": "auto", "input": f"chat {who} " + "word " * 40}
        headers = {"Authorization": f"Bearer {chatting}"}
        async with httpx.AsyncClient(verify=TLS, base_url=url, timeout=600, headers=headers) as http:
            while not stop.is_set():
                (await http.post("/v1/responses", json=body)).raise_for_status()

    chats = [asyncio.create_task(chat(who)) for who in range(50)]
    await asyncio.sleep(1.0)
    beside = await _ghost(url, 4, seconds, typing)
    stop.set()
    await asyncio.gather(*chats)
    return alone.p95, beside.p95


def _head_recovery(settings: Settings) -> float:
    """Seconds from the death of a local Ray's head to the first answer after it."""
    port = free_port()
    folder = settings.paths.state
    state = str(folder / "recovery")
    environ = {**os.environ, "KEYSTROKE_PATHS_STATE": state, "KEYSTROKE_CONFIG": str(folder)}
    command = [sys.executable, "-m", "keystroke", "scale", "up", "--echo", "--port", str(port)]
    command += ["--gateways", "1"]  # a second one would go on for a moment, and count as the answer
    server = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    body = {"model": "auto", "input": "hi"}

    def answers() -> bool:
        if server.poll() is not None:
            raise RuntimeError(f"keystroke scale up ended with code {server.returncode}")
        try:
            url = f"http://127.0.0.1:{port}/v1/responses"
            return httpx.post(url, json=body, timeout=10, verify=TLS).is_success
        except httpx.TransportError:
            return False

    try:
        # A head that dies before this line ends the start, although replicas answer already.
        while not server.stderr.readline().startswith("serving"):
            answers()
        head = next(pid for pid in _descendants(server.pid) if _name(pid) == "gcs_server")
        began = time.perf_counter()
        os.kill(head, signal.SIGKILL)
        while answers():  # replicas go on until they see it
            time.sleep(0.05)
        while not answers():
            time.sleep(0.05)
        return time.perf_counter() - began
    finally:
        server.terminate()
        server.wait(120)


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    found, todo = [], [pid]
    while todo:
        todo += (new := children.get(todo.pop(), []))
        found += new
    return found


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


@contextmanager
def _direct(settings: Settings) -> Iterator[str]:
    """A gateway that has the engine in its own process. Yields its address."""
    folder = settings.paths.state
    port = free_port()
    # The echo model of `serve --echo` takes the same five milliseconds a step.
    command = [sys.executable, "-m", "keystroke", "--set", "speculation.enabled=false", "serve", "--echo"]
    environ = {**os.environ, "KEYSTROKE_PATHS_STATE": str(folder), "KEYSTROKE_CONFIG": str(folder)}
    server = subprocess.Popen([*command, "--port", str(port)], env=environ, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(300):
            try:
                httpx.get(f"{url}/health")
                break
            except httpx.TransportError:
                time.sleep(0.1)
        yield url
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)


if __name__ == "__main__":
    main()

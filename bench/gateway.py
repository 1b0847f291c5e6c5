"""The cost of the server's pipeline: one open socket against HTTP with server-sent events, in the same run.

The engine is the echo one, so nothing but the pipeline is measured: read, parse, template, tokenise (a real
byte-level BPE), schedule, encode, write, and the client's reading. A turn over the socket sends only what is
new (previous_response_id); a turn over HTTP sends the whole conversation, as clients without a socket must.
HTTP connections are kept alive and both sides decode with the same codec: the baseline is as good as we know
how to make it. Messages and Ollama streams are turns over HTTP as well; the socket is compared with them too.

  round trip   send to terminal event of a one-token turn, less the engine's own time (from the receipt)
  first token  send to first text delta
  a token      `instant`: CPU of the server process with the engine at full speed, less what the engine alone
               spends: the work itself. `paced`: a token every 2 ms, each an event of its own on either
               transport; CPU of the server's event loop and of the client, waking up included.
  gap          time between tokens over all streams, 200 sockets open, 32 decoding

Turns alternate, and times are lower quartiles: other work on the machine can only add to them. CPU figures
are medians. Last line: JSON, where
`server_us_per_token` is the instant figure and `per_token_saving` the paced one.
`python bench/gateway.py [--quick]`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import psutil
import uvloop
import websockets

from bench.record import record
from keystroke import Client
from keystroke.engine.base import Interrupt
from keystroke.protocol import codec
from keystroke.protocol.events import TERMINAL, TextDelta
from keystroke.protocol.items import Item, as_input
from keystroke.protocol.requests import CreateRequest
from keystroke.protocol.response import Receipt, Response

CONTEXTS = {"1k": 1_000, "16k": 16_000, "100k": 100_000}
STEP = 0.002  # seconds a step, where the engine's pace matters
LINE = "def value_{:05d}(x): return x * {:05d}\n"


# The server, in a process of its own


def make_tokenizer() -> Any:
    """A byte-level BPE learnt from the standard library's own sources: real tokenising, offline."""
    from pathlib import Path

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4096, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    sources = sorted(Path(os.__file__).parent.glob("*.py"))[:60]
    learner.train([str(path) for path in sources], trainer)
    from keystroke.engine.tokenizer.huggingface import from_spec

    return from_spec(json.loads(learner.to_str()))


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]\n{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)


def serve() -> None:
    from keystroke.config import NamedModel, ServerSettings, Settings, SpeculationSettings
    from keystroke.engine.echo import EchoEngine
    from keystroke.engine.model import Model
    from keystroke.engine.templates import ChatTemplate
    from keystroke.gateway.app import Gateway, run_server
    from keystroke.gateway.work.registry import ModelRegistry, local_entry

    tokenizer, template = make_tokenizer(), ChatTemplate(TEMPLATE)

    def model(name: str, **costs: Any) -> Model:
        engine = EchoEngine(context_length=200_000, cache_bytes=1 << 20, **costs)
        return Model(name, engine, tokenizer, template)

    entries = [
        local_entry("instant", model("instant"), named=NamedModel(concurrent=64)),
        local_entry("paced", model("paced", step_cost=STEP), named=NamedModel(concurrent=64)),
    ]
    settings = Settings(
        server=ServerSettings(port=0, max_connections=1024, drain_s=0.1),
        speculation=SpeculationSettings(enabled=False),  # a step is a token
    )
    run_server(Gateway(ModelRegistry(entries), settings), on_ready=lambda port: print(port, flush=True))


# The two clients


@dataclass(frozen=True)
class TimedTurn:
    began: float
    first: float
    ended: float
    engine: float  # seconds of it that the engine took
    events: int

    @property
    def round_trip(self) -> float:
        return self.ended - self.began - self.engine

    @property
    def first_token(self) -> float:
        return (self.first or self.ended) - self.began


def engine_seconds(response: Response) -> float:
    receipt = response.receipt
    assert isinstance(receipt, Receipt)
    return (receipt.prefill_ms + receipt.decode_ms) / 1e3


class BenchSocket:
    """Incremental turns over one WebSocket, by our own client."""

    name = "websocket"

    def __init__(self, port: int) -> None:
        self._client = Client(f"http://127.0.0.1:{port}")
        self._previous: str | None = None

    async def turn(self, model: str, text: str, tokens: int) -> TimedTurn:
        first, count = 0.0, 0
        began = time.perf_counter()
        stream = await self._client.respond(
            text, model=model, store=False, max_output_tokens=tokens, previous_response_id=self._previous
        )
        async for event in stream:
            count += 1
            if not first and isinstance(event, TextDelta):
                first = time.perf_counter()
        assert stream.response is not None
        self._previous = stream.response.id
        return TimedTurn(began, first, time.perf_counter(), engine_seconds(stream.response), count)

    async def close(self) -> None:
        await self._client.close()


class Http:
    """Whole-conversation turns, streamed over a kept-alive HTTP connection."""

    name = "http"

    def __init__(self, port: int) -> None:
        self._client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60)
        self._items: list[Item] = []

    async def turn(self, model: str, text: str, tokens: int) -> TimedTurn:
        self._items.append(Item(role="user", content=text))
        request = CreateRequest(
            model=model, store=False, stream=True, input=self._items, max_output_tokens=tokens
        )
        first, count, response = 0.0, 0, None
        began = time.perf_counter()
        body, headers = codec.encode(request), {"content-type": "application/json"}
        async with self._client.stream("POST", "/v1/responses", content=body, headers=headers) as answer:
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                event = codec.decode_server_event(line[6:])
                count += 1
                if not first and isinstance(event, TextDelta):
                    first = time.perf_counter()
                if isinstance(event, TERMINAL):
                    response = event.response
        assert response is not None, answer.status_code
        ended = time.perf_counter()
        self._items += map(as_input, response.output)
        return TimedTurn(began, first, ended, engine_seconds(response), count)

    async def close(self) -> None:
        await self._client.aclose()


class Conversation:
    """Whole-conversation turns of another API, streamed over a kept-alive HTTP connection."""

    name: str
    path: str

    def __init__(self, port: int) -> None:
        self._client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60)
        self._messages: list[dict[str, str]] = []

    def body(self, tokens: int) -> dict[str, Any]:
        """What the request has beside its model and messages."""
        raise NotImplementedError

    def read(self, event: dict[str, Any]) -> tuple[str, float | None]:
        """The text of an event; the last one's seconds of the engine."""
        raise NotImplementedError

    async def turn(self, model: str, text: str, tokens: int) -> TimedTurn:
        self._messages.append({"role": "user", "content": text})
        first, count, engine, said = 0.0, 0, 0.0, ""
        began = time.perf_counter()
        request = {"model": model, "messages": self._messages, "stream": True, **self.body(tokens)}
        body, headers = msgspec.json.encode(request), {"content-type": "application/json"}
        async with self._client.stream("POST", self.path, content=body, headers=headers) as answer:
            async for line in answer.aiter_lines():
                if not line.startswith(("data: ", "{")):
                    continue
                delta, spent = self.read(msgspec.json.decode(line.removeprefix("data: ")))
                count += 1
                said += delta
                if delta and not first:
                    first = time.perf_counter()
                engine = engine if spent is None else spent
        assert engine, answer.status_code
        ended = time.perf_counter()
        self._messages.append({"role": "assistant", "content": said})
        return TimedTurn(began, first, ended, engine, count)

    async def close(self) -> None:
        await self._client.aclose()


class BenchMessages(Conversation):
    name, path = "messages", "/v1/messages"

    def body(self, tokens: int) -> dict[str, Any]:
        return {"max_tokens": tokens}

    def read(self, event: dict[str, Any]) -> tuple[str, float | None]:
        if "receipt" in event:
            return "", (event["receipt"]["prefill_ms"] + event["receipt"]["decode_ms"]) / 1e3
        return event.get("delta", {}).get("text", ""), None


class BenchOllama(Conversation):
    name, path = "ollama", "/api/chat"

    def body(self, tokens: int) -> dict[str, Any]:
        return {"options": {"num_predict": tokens}}

    def read(self, event: dict[str, Any]) -> tuple[str, float | None]:
        if event["done"]:
            return "", (event["prompt_eval_duration"] + event["eval_duration"]) / 1e9
        return event["message"]["content"], None


# What is measured


async def turns(port: int, seed: str, rounds: int) -> dict[str, list[TimedTurn]]:
    """All ways in turn, for a conversation that already holds `seed`."""
    ways: list[BenchSocket | Http | Conversation] = [
        BenchSocket(port), Http(port), BenchMessages(port), BenchOllama(port),
    ]  # fmt: skip
    seen: dict[str, list[TimedTurn]] = {way.name: [] for way in ways}
    for way in ways:
        await way.turn("instant", seed, 1)
    for number in range(rounds + 2):
        for way in ways:
            turn = await way.turn("instant", f"question {number}", 1)
            if number >= 2:
                seen[way.name].append(turn)
    for way in ways:
        await way.close()
    return seen


@dataclass
class Spent:
    """CPU seconds a token, and events a token."""

    server: float  # the whole process
    pipeline: float  # the server's event loop and the client: everything but the engine's thread
    events: float


async def per_token(
    port: int, server: psutil.Process, model: str, tokens: int, repeats: int
) -> dict[str, Spent]:
    """Medians for each way, one stream."""
    ways: list[type[BenchSocket] | type[Http]] = [BenchSocket, Http]
    found: dict[str, list[Spent]] = {way.name: [] for way in ways}
    for _ in range(repeats):
        for make in ways:
            way = make(port)
            await way.turn(model, "warm", 4)
            before = server.cpu_times(), _loop_seconds(server), time.process_time()
            turn = await way.turn(model, "go on", tokens)
            after = server.cpu_times(), _loop_seconds(server), time.process_time()
            whole = sum(after[0][:2]) - sum(before[0][:2])
            pipeline = after[1] - before[1] + after[2] - before[2]
            found[way.name].append(Spent(whole / tokens, pipeline / tokens, turn.events / tokens))
            await way.close()
    return {
        name: Spent(
            statistics.median(s.server for s in spent),
            statistics.median(s.pipeline for s in spent),
            spent[-1].events,
        )
        for name, spent in found.items()
    }


def _loop_seconds(server: psutil.Process) -> float:
    """CPU seconds of the server's main thread, which runs its event loop."""
    main = next(thread for thread in server.threads() if thread.id == server.pid)
    return float(main.user_time + main.system_time)


def engine_alone(tokens: int, step: float) -> float:
    """CPU seconds a token of the echo engine and its generation without any server."""
    from keystroke.engine.echo import EchoEngine
    from keystroke.engine.generation import Generation, GenerationParams
    from keystroke.engine.model import Model

    model = Model("alone", EchoEngine(step_cost=step), make_tokenizer())
    interrupt = Interrupt()
    generation = Generation(
        model, model.engine.session(), list(b"[user]"), GenerationParams(tokens), interrupt=interrupt
    )
    generation.prefill()
    began = time.process_time()
    while generation.finish is None:
        generation.advance()
    return (time.process_time() - began) / tokens


async def crowd(port: int, open_sockets: int, decoding: int, tokens: int) -> dict[str, float]:
    """Time between tokens with many sockets open and some of them decoding."""
    url = f"ws://127.0.0.1:{port}/v1/responses"
    sockets = await asyncio.gather(
        *(websockets.connect(url, compression=None, open_timeout=30) for _ in range(open_sockets))
    )
    gaps: list[float] = []

    async def stream(socket: Any) -> None:
        body = {"type": "response.create", "model": "paced", "input": "go", "max_output_tokens": tokens}
        await socket.send(json.dumps({**body, "store": False}))
        last = 0.0
        async for frame in socket:
            if '"response.output_text.delta"' in frame:
                now = time.perf_counter()
                if last:
                    gaps.append(now - last)
                last = now
            elif '"response.incomplete"' in frame or '"response.completed"' in frame:
                return

    await asyncio.gather(*(stream(s) for s in sockets[:decoding]))
    await asyncio.gather(*(s.close() for s in sockets))
    gaps.sort()
    return {"p50": gaps[len(gaps) // 2], "p99": gaps[int(len(gaps) * 0.99)], "count": len(gaps)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    rounds, tokens, repeats = (20, 500, 1) if options.quick else (60, 1500, 3)
    command = [sys.executable, "-m", "bench.gateway", "--serve"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    port = int(process.stdout.readline())
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(report(port, psutil.Process(process.pid), rounds, tokens, repeats))
    finally:
        process.terminate()
        process.wait(10)
    record("gateway", result)


def row(label: str, what: str, ours: float, theirs: float, unit: str, scale: float) -> None:
    saving = f"{1 - ours / theirs:>8.1%}"
    print(f"{label:>8} {what:>16} {ours * scale:>9.2f} {unit} {theirs * scale:>9.2f} {unit} {saving}")


def lower_quartile(values: list[float]) -> float:
    return sorted(values)[len(values) // 4]


def _events(spent: dict[str, Spent]) -> str:
    return ", ".join(f"{way} {s.events:.2f}" for way, s in spent.items())


async def report(port: int, server: psutil.Process, rounds: int, tokens: int, repeats: int) -> dict[str, Any]:
    result: dict[str, Any] = {"roundtrip_saving": {}, "ttft_saving": {}}
    tokenizer = make_tokenizer()
    source = "".join(LINE.format(i, i) for i in range(20_000))
    tokens_a_character = len(tokenizer.encode(source[:100_000])) / 100_000
    print(f"{'':>8} {'':>16} {'WebSocket':>12} {'HTTP+SSE':>12} {'saving':>8}")
    for label, context in CONTEXTS.items():
        found = await turns(port, source[: round(context / tokens_a_character)], rounds)
        for name, key in (("round_trip", "roundtrip_saving"), ("first_token", "ttft_saving")):
            ours, theirs = (
                lower_quartile([getattr(turn, name) for turn in found[way]]) for way in ("websocket", "http")
            )
            result[key][label] = round(1 - ours / theirs, 3)
            row(label, name.replace("_", " "), ours, theirs, "ms", 1e3)
        ours = lower_quartile([turn.round_trip for turn in found["websocket"]])
        for way in ("messages", "ollama"):
            theirs = lower_quartile([turn.round_trip for turn in found[way]])
            result.setdefault(f"roundtrip_saving_{way}", {})[label] = round(1 - ours / theirs, 3)
            row(label, way, ours, theirs, "ms", 1e3)
    base = engine_alone(tokens * 4, 0.0)
    spent = await per_token(port, server, "instant", tokens * 4, repeats)
    work = {way: max(s.server - base, 1e-9) for way, s in spent.items()}
    # Here only the socket still sends every token by itself, so the two are not compared.
    print(f" instant   server a token {work['websocket'] * 1e6:>9.2f} us {work['http'] * 1e6:>9.2f} us")
    print(f"{'':>9}(engine alone {base * 1e6:.0f} us; events a token: {_events(spent)})")
    result["server_us_per_token"] = round(work["websocket"] * 1e6, 1)
    spent = await per_token(port, server, "paced", tokens, repeats)
    ours, theirs = spent["websocket"].pipeline, spent["http"].pipeline
    row("paced", "pipeline a token", ours, theirs, "us", 1e6)
    print(f"{'':>9}(events a token: {_events(spent)})")
    result["per_token_saving"] = round(1 - ours / theirs, 3)
    result["pipeline_us_per_token"] = round(ours * 1e6, 1)
    gap = await crowd(port, 200, 32, min(tokens, 200))
    result["p99_gap_ms"] = round(gap["p99"] * 1e3, 2)
    result["p50_gap_ms"] = round(gap["p50"] * 1e3, 2)
    print(
        f"     gap 32 of 200 decoding: p50 {gap['p50'] * 1e3:.1f} ms, p99 {gap['p99'] * 1e3:.1f} ms "
        f"(32 steps of the engine: {STEP * 32e3:.0f} ms)"
    )
    return result


if __name__ == "__main__":
    main()

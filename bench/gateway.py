"""What the pipeline itself costs: one open socket against HTTP with server-sent events, same server, same run.

The engine is the fake one, so nothing but the pipeline is measured: read, parse, template, tokenise, schedule,
encode, write. A turn over the socket sends only what is new (previous_response_id); a turn over HTTP sends the
whole conversation, as clients without a socket must. HTTP connections are kept alive: the baseline is as
good as we can make it, and what an unpractised client pays for connecting anew is not counted.

Figures (medians, turns interleaved so that a busy machine troubles both alike):
  round trip   send to terminal event of a one-token turn, less the engine's own time
  first token  send to first text delta
  per token    CPU time of the server process a token, less what the engine alone costs, one event a token
  gap          99th percentile of the time between tokens over all streams, 200 sockets open, 32 decoding

Last line: JSON. `python bench/gateway.py [--quick]`
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
from typing import Any

import httpx
import psutil
import websockets
import websockets.sync.client

CONTEXTS = {"1k": 1_000, "16k": 16_000, "100k": 100_000}
STEP = 0.002  # seconds a step, where the engine's pace matters
LINE = "def value_{:05d}(x): return x * {:05d}\n"


# The server, in a process of its own


def serve() -> None:
    from keystroke.config import NamedModel, ServerSettings, Settings
    from keystroke.engine.fake import SPECIAL, FakeEngine
    from keystroke.engine.model import Model
    from keystroke.engine.templates import ChatTemplate
    from keystroke.engine.tokenizer.byte_tokens import ByteTokenizer
    from keystroke.gateway.app import Gateway, run_server
    from keystroke.gateway.registry import Registry, local_entry

    template = ChatTemplate(
        "{% for m in messages %}[{{ m.role }}]\n{{ m.content }}<end>\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]\n{% endif %}"
    )

    def model(name: str, **costs: Any) -> Model:
        engine = FakeEngine(context_length=200_000, cache_bytes=1 << 26, **costs)
        return Model(name, engine, ByteTokenizer(SPECIAL), template)

    entries = [
        local_entry("instant", model("instant"), named=NamedModel(concurrent=64)),
        local_entry("paced", model("paced", step_cost=STEP), named=NamedModel(concurrent=64)),
    ]
    settings = Settings(server=ServerSettings(port=0, max_connections=1024, drain_s=0.1))
    gateway = Gateway(Registry(entries), settings)
    run_server(gateway, on_ready=lambda port: print(port, flush=True))


# The two clients


class Socket:
    """Incremental turns over one WebSocket."""

    def __init__(self, port: int) -> None:
        self._socket = websockets.sync.client.connect(
            f"ws://127.0.0.1:{port}/v1/responses", compression=None, max_size=None
        )
        self._previous: str | None = None

    def turn(self, model: str, text: str, tokens: int) -> Turn:
        body: dict[str, Any] = {
            "type": "response.create",
            "model": model,
            "store": False,
            "input": [{"role": "user", "content": text}],
            "max_output_tokens": tokens,
        }
        if self._previous is not None:
            body["previous_response_id"] = self._previous
        frame = json.dumps(body)
        began = time.perf_counter()
        self._socket.send(frame)
        first = 0.0
        while True:
            event = json.loads(self._socket.recv())
            if not first and event["type"] == "response.output_text.delta":
                first = time.perf_counter()
            if event["type"] in ("response.completed", "response.incomplete"):
                break
            if event["type"] in ("error", "response.failed"):
                raise RuntimeError(event)
        turn = Turn(began, first, time.perf_counter(), event["response"])
        self._previous = event["response"]["id"]
        return turn

    def close(self) -> None:
        self._socket.close()


class Http:
    """Whole-conversation turns, streamed over a kept-alive HTTP connection."""

    def __init__(self, port: int) -> None:
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        self._items: list[dict[str, str]] = []

    def turn(self, model: str, text: str, tokens: int) -> Turn:
        self._items.append({"role": "user", "content": text})
        body = {
            "model": model,
            "store": False,
            "stream": True,
            "input": self._items,
            "max_output_tokens": tokens,
        }
        began = time.perf_counter()
        first, last = 0.0, None
        with self._client.stream("POST", "/v1/responses", json=body) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: "):
                    continue
                event = json.loads(line[6:])
                if not first and event["type"] == "response.output_text.delta":
                    first = time.perf_counter()
                if event["type"] in ("response.completed", "response.incomplete"):
                    last = event["response"]
        assert last is not None, answer.status_code
        turn = Turn(began, first, time.perf_counter(), last)
        said = last["output"][0]["content"][0]["text"] if last["output"] else ""
        self._items.append({"role": "assistant", "content": said})
        return turn

    def close(self) -> None:
        self._client.close()


class Turn:
    def __init__(self, began: float, first: float, ended: float, response: dict[str, Any]) -> None:
        receipt = response["receipt"]
        engine = (receipt["prefill_ms"] + receipt["decode_ms"]) / 1e3
        self.round_trip = ended - began - engine
        self.first_token = (first or ended) - began
        self.tokens = response["usage"]["output_tokens"]


# What is measured


def turns(port: int, context: int, rounds: int) -> dict[str, dict[str, float]]:
    """Medians of both ways for a conversation that already holds `context` tokens."""
    seed = "".join(LINE.format(i, i) for i in range(context // len(LINE.format(0, 0)) + 1))[:context]
    ways: dict[str, Socket | Http] = {"websocket": Socket(port), "http": Http(port)}
    seen: dict[str, list[Turn]] = {name: [] for name in ways}
    for client in ways.values():
        client.turn("instant", seed, 1)
    for number in range(rounds + 2):
        for name, client in ways.items():
            turn = client.turn("instant", f"question {number}", 1)
            if number >= 2:
                seen[name].append(turn)
    for client in ways.values():
        client.close()
    return {
        name: {
            "round_trip": statistics.median(t.round_trip for t in made),
            "first_token": statistics.median(t.first_token for t in made),
        }
        for name, made in seen.items()
    }


def per_token(port: int, server: psutil.Process, tokens: int, repeats: int) -> dict[str, float]:
    """Server CPU seconds a token for each way, one stream, the engine at a steady pace."""
    spent: dict[str, list[float]] = {"websocket": [], "http": []}
    for _ in range(repeats):
        for name, make in (("websocket", Socket), ("http", Http)):
            client = make(port)
            client.turn("paced", "warm", 4)
            before = server.cpu_times()
            turn = client.turn("paced", "go on", tokens)
            after = server.cpu_times()
            used = after.user + after.system - before.user - before.system
            spent[name].append(used / turn.tokens)
            client.close()
    return {name: statistics.median(values) for name, values in spent.items()}


def engine_alone(tokens: int) -> float:
    """CPU seconds a token of the fake engine and its generation without any server."""
    from keystroke.engine.fake import SPECIAL, FakeEngine
    from keystroke.engine.generation import Generation, GenerationParams
    from keystroke.engine.model import Model
    from keystroke.engine.tokenizer.byte_tokens import ByteTokenizer

    model = Model("paced", FakeEngine(step_cost=STEP), ByteTokenizer(SPECIAL))
    session = model.engine.session()
    generation = Generation(model, session, list(b"[user]\ngo on\n"), GenerationParams(tokens))
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
    rounds, tokens, repeats = (20, 400, 2) if options.quick else (60, 1500, 3)
    process = subprocess.Popen(
        [sys.executable, os.path.abspath(__file__), "--serve"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    port = int(process.stdout.readline())
    server = psutil.Process(process.pid)
    try:
        report(port, server, rounds, tokens, repeats)
    finally:
        process.terminate()
        process.wait(10)


def report(port: int, server: psutil.Process, rounds: int, tokens: int, repeats: int) -> None:
    result: dict[str, Any] = {"roundtrip_saving": {}, "ttft_saving": {}}
    print(f"{'context':>8} {'':>12} {'WebSocket':>12} {'HTTP+SSE':>12} {'saving':>8}")
    for label, context in CONTEXTS.items():
        found = turns(port, context, rounds)
        for name, key in (("round_trip", "roundtrip_saving"), ("first_token", "ttft_saving")):
            ours, theirs = found["websocket"][name], found["http"][name]
            saving = 1 - ours / theirs
            result[key][label] = round(saving, 3)
            words = name.replace("_", " ")
            print(f"{label:>8} {words:>12} {ours * 1e3:>9.2f} ms {theirs * 1e3:>9.2f} ms {saving:>8.1%}")
    base = engine_alone(tokens)
    spent = per_token(port, server, tokens, repeats)
    ours, theirs = (max(spent[way] - base, 1e-9) for way in ("websocket", "http"))
    result["per_token_saving"] = round(1 - ours / theirs, 3)
    result["server_us_per_token"] = round(ours * 1e6, 1)
    result["server_us_per_token_http"] = round(theirs * 1e6, 1)
    result["engine_us_per_token"] = round(base * 1e6, 1)
    print(
        f"{'token':>8} {'server CPU':>12} {ours * 1e6:>9.1f} us {theirs * 1e6:>9.1f} us "
        f"{1 - ours / theirs:>8.1%}   (engine alone: {base * 1e6:.1f} us)"
    )
    gap = asyncio.run(crowd(port, 200, 32, min(tokens, 200)))
    result["p99_gap_ms"] = round(gap["p99"] * 1e3, 2)
    result["p50_gap_ms"] = round(gap["p50"] * 1e3, 2)
    ideal = STEP * 32 * 1e3
    print(
        f"    gap  32 of 200 decoding: p50 {gap['p50'] * 1e3:.1f} ms, p99 {gap['p99'] * 1e3:.1f} ms "
        f"(the engine's own pace for 32 streams: {ideal:.0f} ms)"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()

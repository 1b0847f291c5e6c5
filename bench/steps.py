"""Single steps, several rows and prompts of a local engine, beside llama.cpp on the same file.

Regime: one GGUF file as stored, batch 1, one thread per core, contexts of 40, 600 and 2,000 tokens. A step
reads every weight and the keys and values of its context once, so the ceiling is the memory's bandwidth over
those bytes: the table shows GB/s beside milliseconds. Rows are the cost of verifying a draft of that length,
in steps of one row. Engines take turns within each round; every figure is a ratio of medians in this run.
llama.cpp's flash attention is as its own default decides, its cache in half precision like ours.

    python -m bench.steps --llama FOLDER [--model FILE.gguf ...]    # default: the shipped model
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.llama_library import LlamaLibrary
from bench.record import record
from keystroke.config import load_settings
from keystroke.engine.base import Engine
from keystroke.engine.cores import usable_cores
from keystroke.engine.host import HostSession
from keystroke.engine.load import load_model

ROOT = Path(__file__).parents[1]
SHIPPED = ROOT / "models/keystroke-80m/keystroke-80m.gguf"
TEXT = ROOT / "src/keystroke/engine/onnx/engine.py"
CONTEXTS = (40, 600, 2000)
ROWS = (2, 4, 8, 16)
STEPS = 24
OURS, PEER = "keystroke", "llama.cpp"


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


Samples = defaultdict[tuple[str, str, int], list[float]]


def measure_ours(engine: Engine, tokens: Sequence[int], context: int, samples: Samples) -> None:
    engine.cache.clear()  # type: ignore[attr-defined]
    engine.known.clear()  # type: ignore[attr-defined]
    inside: list[float] = []
    with engine.session() as session:
        assert isinstance(session, HostSession)
        forward = session._forward

        def watched(*arguments: Any) -> Any:
            results: list[Any] = []
            inside.append(seconds(lambda: results.append(forward(*arguments))))
            return results[0]

        prompt = list(tokens[:context])
        samples[OURS, "prefill", context].append(seconds(lambda: (session.extend(prompt), session.step())))
        session.step()
        session._forward = watched  # type: ignore[assignment,method-assign]
        for _ in range(STEPS):
            inside.clear()
            step = seconds(session.step)
            samples[OURS, "step", context].append(step)
            samples[OURS, "outside", context].append(step - sum(inside))
        start = len(session._held)
        for rows in ROWS:
            for _ in range(4):
                took = seconds(lambda count=rows: forward(tokens[:count], start, count, None))  # type: ignore[misc]
                samples[OURS, f"rows {rows}", context].append(took)
        session._held.clear()


def measure_peer(library: LlamaLibrary, tokens: Sequence[int], context: int, samples: Samples) -> None:
    library.reset()
    samples[PEER, "prefill", context].append(seconds(lambda: library.eval(tokens[:context])))
    library.eval([11])
    samples[PEER, "step", context] += [seconds(lambda: library.eval([11])) for _ in range(STEPS)]


def measure(file: Path, llama: Path | None, rounds: int, threads: int) -> dict[str, object]:
    settings = load_settings()
    model = load_model(file, replace(settings, engine=replace(settings.engine, threads=threads)))
    engine = model.engine
    library = LlamaLibrary(llama, file, threads, context=3000) if llama is not None else None
    tokens = model.tokenizer.encode(TEXT.read_text()) * 3
    samples: Samples = defaultdict(list)
    for _ in range(rounds):
        for context in CONTEXTS:
            measure_ours(engine, tokens, context, samples)
            if library is not None:
                measure_peer(library, tokens, context, samples)

    def median(who: str, what: str, context: int) -> float:
        return statistics.median(samples[who, what, context])

    size, each = file.stat().st_size, engine.info.kv_bytes_per_token
    print(f"\n{file.name} · {size / 1e6:,.0f} MB · {threads} threads · {rounds} rounds\n")
    print(
        f"{'context':>7} {'engine':10} {'ms a step':>9} {'GB/s':>5} {'prefill tok/s':>13}   rows 2, 4, 8, 16"
    )
    found: dict[str, dict[int, object]] = defaultdict(dict)
    for context in CONTEXTS:
        for who in (OURS, PEER) if library is not None else (OURS,):
            step, prefill = median(who, "step", context), context / median(who, "prefill", context)
            rows = [median(OURS, f"rows {n}", context) / step for n in ROWS] if who == OURS else []
            speed = (size + context * each) / step / 1e9
            costs = " / ".join(f"{cost:.2f}" for cost in rows)
            print(f"{context:7} {who:10} {step * 1e3:9.2f} {speed:5.1f} {prefill:13.1f}   {costs}")
            if who == OURS:
                found["row_cost"][context] = [round(cost, 2) for cost in rows]
                found["gb_s"][context] = round(speed, 1)
                found["step_ms"][context] = round(step * 1e3, 2)
                found["overhead_us"][context] = round(median(OURS, "outside", context) * 1e6)
        if library is not None:
            for key, what in (("decode_vs_llamacpp", "step"), ("prefill_vs_llamacpp", "prefill")):
                found[key][context] = round(median(PEER, what, context) / median(OURS, what, context), 2)
    engine.close()
    return dict(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, action="append", help="a GGUF file; may be repeated")
    parser.add_argument("--llama", type=Path, help="folder of llama.cpp's libraries, compared with")
    parser.add_argument("--rounds", type=int, default=3, help="how often the engines take turns")
    parser.add_argument("--threads", type=int, default=0, help="of both engines; one per core if left out")
    arguments = parser.parse_args()
    threads = arguments.threads or usable_cores()
    files = arguments.model or [SHIPPED]
    record("steps", {file.stem: measure(file, arguments.llama, arguments.rounds, threads) for file in files})


if __name__ == "__main__":
    main()

"""Speed of models of other shapes or precisions on this machine, measured before training one.

Regime: candidates with random weights, exported as the shipped model is and run by the embedded engine; a
prompt of 512 tokens is read and 24 tokens are written, all candidates in turn, round after round, so that a
busy machine weighs on all alike; one thread, since threads that wait for each other count what others do.
Processor seconds and the best time by the clock; the ratio to the shipped shape is what to read. The ceiling
of a step is the file's size over the machine's memory bandwidth.

    python -m bench.shapes [--rounds N] [--threads N] [--candidate NAME ...]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from bench.record import record
from keystroke.config import load_settings
from keystroke.engine.load import load_model
from keystroke.engine.model import Model
from keystroke_lab.training.transformer import Shape

TOKENIZER = Path(__file__).parents[1] / "models" / "keystroke-80m" / "tokenizer.json"
PROMPT, WRITTEN = 512, 24
CANDIDATES: dict[str, tuple[Shape, str]] = {
    "8x768 Q8_0 (shipped)": (Shape(), "Q8_0"),
    "8x768 Q5_1": (Shape(), "Q5_1"),
    "10x768 v24k Q8_0": (Shape(vocab=24_576, layers=10, context=8192), "Q8_0"),
    "15x768 v24k Q5_1": (Shape(vocab=24_576, layers=15, context=8192), "Q5_1"),
    "8x1024 v24k Q5_1": (
        Shape(vocab=24_576, hidden=1024, heads=16, intermediate=3072, context=8192),
        "Q5_1",
    ),
}


@dataclass(slots=True)
class ShapeCosts:
    prefill: list[float] = field(default_factory=list)  # seconds by the clock
    step: list[float] = field(default_factory=list)
    prefill_cpu: list[float] = field(default_factory=list)
    step_cpu: list[float] = field(default_factory=list)


def resized(vocabulary: int, folder: Path) -> Path:
    """The shipped tokenizer cut or filled up to a size: what a step costs does not depend on its words."""
    spec = json.loads(TOKENIZER.read_text(encoding="utf-8"))
    words: dict[str, int] = spec["model"]["vocab"]
    kept = {word: i for word, i in words.items() if i < vocabulary}
    kept |= {f"filler{i}": i for i in range(len(words), vocabulary)}
    pairs = [pair if isinstance(pair, list) else pair.split(" ") for pair in spec["model"]["merges"]]
    spec["model"] |= {
        "vocab": kept,
        "merges": [p for p in pairs if "".join(p) in kept and set(p) <= kept.keys()],
    }
    path = folder / f"tokenizer-{vocabulary}.json"
    path.write_text(json.dumps(spec), encoding="utf-8")
    return path


def exported(name: str, shape: Shape, quantisation: str, folder: Path) -> Path:
    """A GGUF file of random weights."""
    import torch

    from keystroke_lab.export.weights import expected_tensors, export_gguf

    torch.manual_seed(0)
    weights = {
        tensor: torch.ones(size) if len(size) == 1 else 0.02 * torch.randn(size)
        for tensor, size in expected_tensors(shape).items()
    }
    source = folder / "weights.pt"
    torch.save({"shape": shape.to_json(), "step": 0, "tokens": 0, "weights": weights}, source)
    out = folder / f"{name.replace(' ', '-')}.gguf"
    export_gguf(source, resized(shape.vocab, folder), out, name=name, quantisation=quantisation)
    source.unlink()
    return out


def run_once(model: Model, tokens: list[int], costs: ShapeCosts) -> None:
    with model.engine.session() as session:
        clock, cpu = time.perf_counter(), time.process_time()
        session.extend(tokens)
        session.step()
        costs.prefill.append(time.perf_counter() - clock)
        costs.prefill_cpu.append(time.process_time() - cpu)
        clock, cpu = time.perf_counter(), time.process_time()
        for _ in range(WRITTEN):
            session.step()
        costs.step.append((time.perf_counter() - clock) / WRITTEN)
        costs.step_cpu.append((time.process_time() - cpu) / WRITTEN)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="0: as many as the engine would take")
    parser.add_argument(
        "--candidate", action="append", choices=list(CANDIDATES), help="only these, and the shipped"
    )
    given = parser.parse_args()
    first = next(iter(CANDIDATES))
    wanted = [first, *(name for name in given.candidate or list(CANDIDATES)[1:] if name != first)]
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as place:
        folder, settings = Path(place), load_settings({"engine.threads": given.threads}, Path.cwd())
        models, costs = {}, {name: ShapeCosts() for name in wanted}
        for name in wanted:
            shape, quantisation = CANDIDATES[name]
            path = exported(name, shape, quantisation, folder)
            models[name] = load_model(path, settings)
            rows[name] = {
                "parameters": shape.parameters,
                "bytes": path.stat().st_size,
                "shape": asdict(shape),
            }
            print(
                f"{name}: {shape.parameters / 1e6:.1f}M, {path.stat().st_size / 1e6:.1f} MB", file=sys.stderr
            )
        for number in range(given.rounds + 1):  # the first one warms up
            for name in wanted:
                kept = ShapeCosts() if number == 0 else costs[name]
                # Other tokens every round: what an engine remembers must not count as read.
                run_once(
                    models[name], [300 + (i * 7919 + number * 131) % 20_000 for i in range(PROMPT)], kept
                )
                said = f"{kept.prefill_cpu[-1]:.3f} s read, {1000 * kept.step_cpu[-1]:.1f} ms a step"
                print(f"round {number}, {name}: {said} (processor)", file=sys.stderr, flush=True)
        for model in models.values():
            model.engine.close()
    for name in wanted:
        mine, base = costs[name], costs[first]
        for kind in ("prefill", "step"):
            cpu, base_cpu = getattr(mine, f"{kind}_cpu"), getattr(base, f"{kind}_cpu")
            rows[name][f"{kind}_ms"] = round(1000 * min(getattr(mine, kind)), 2)
            rows[name][f"{kind}_cpu_ms"] = round(1000 * median(cpu), 2)
            # Neighbours in time are compared: a busy moment then weighs on both.
            pairs = [one / other for one, other in zip(cpu, base_cpu, strict=True)]
            rows[name][f"{kind}_ratio"] = round(median(pairs), 3)
    print(f"{'candidate':<24} {'M':>6} {'MB':>6} {'read ms':>11} {'step ms':>8} {'x read':>10} {'x step':>7}")
    for name, row in rows.items():
        print(
            f"{name:<24} {row['parameters'] / 1e6:>6.1f} {row['bytes'] / 1e6:>6.1f} {row['prefill_ms']:>11} "
            f"{row['step_ms']:>8} {row['prefill_ratio']:>10} {row['step_ratio']:>7}"
        )
    record("shapes", {"bench": "shapes", "rounds": given.rounds, "threads": given.threads, "models": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())

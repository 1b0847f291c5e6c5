"""Speed of mixtures and hybrids in the embedded engine and in llama.cpp, random weights in the real shapes.

Regime: one GGUF file, batch 1, all cores; a prompt of 150 tokens, then single steps; prefill of 512 tokens.
The file is written here, as its publishers quantise it, and deleted afterwards. Speed does not depend on the
values of weights, but for mixtures on which experts tokens use: random ones use all alike. A step reads the
weights of the chosen experts once, so that memory bandwidth over those bytes is the ceiling of both engines.
`--layers` takes the first layers only, where memory or time are short: all but the output head then shrinks
alike. Peers take turns within each round, or with `--apart` one follows the other: llama.cpp's repacked copy
of a large file leaves no memory for another engine. Figures are ratios of medians. On shared cores seconds
mean little: llama.cpp's threads wait for each other by spinning. There `--threads 1` and the ratios of
processor seconds (`_cpu`) count. `cosine` compares the logits of both engines for the same prompt. The first
start has an empty cache, so that it compiles the operators too.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.llama_library import LlamaLibrary
from bench.random_models import SHAPES, write_model
from bench.record import record
from bench.stored_weights import PROMPT, READ, LlamaPeer, StoredPeer, Took
from keystroke.config import load_settings
from keystroke.engine.onnx.engine import OnnxEngine
from keystroke.engine.onnx.recurrent import MARK_EVERY, RecurrentState

# One start in a process of its own: seconds to the first token, and the most memory.
_START = """
import sys, time
began = time.perf_counter()
from pathlib import Path
from bench.families import open_engine
engine = open_engine(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
with engine.session() as session:
    session.extend([11, 12, 13])
    session.step()
took = time.perf_counter() - began
status = Path("/proc/self/status").read_text()  # ru_maxrss would include what the parent had when it forked
print(took, int(status.partition("VmHWM:")[2].split()[0]) / 1e6)
"""


def open_engine(path: Path, threads: int, cache: Path | None = None) -> OnnxEngine:
    """The engine alone: these files have no vocabulary. `cache`: another than the user's."""
    from keystroke.engine.backends import LoadArguments
    from keystroke.engine.onnx.backend import load

    settings = load_settings()
    settings = replace(settings, engine=replace(settings.engine, threads=threads, context=4096))
    settings = replace(settings, paths=replace(settings.paths, cache=cache or settings.paths.cache))
    engine = load(LoadArguments(path=path, settings=settings, precision="stored", progress=lambda *_: None))
    assert isinstance(engine, OnnxEngine)
    return engine


def snapshot_share(engine: OnnxEngine, tokens: list[int]) -> float:
    """The share of processor seconds that snapshots take in a conversation of four turns (128 tokens read, 48
    written), copies of the state between single steps included."""
    spent = 0.0
    keep = RecurrentState.keep

    def watched(state: RecurrentState, *arguments: Any) -> None:
        nonlocal spent
        began = time.process_time()
        keep(state, *arguments)
        spent += time.process_time() - began

    RecurrentState.keep = watched  # type: ignore[assignment, method-assign]
    try:
        began, steps = time.process_time(), 0
        with engine.session("conversation") as session:
            for turn in range(4):
                session.extend([*session.tokens, *tokens[turn * 128 : turn * 128 + 128]])
                for _ in range(48):
                    session.step()
                    steps += 1
            total = time.process_time() - began
            assert session.buffers is not None
            assert session.buffers.recurrent is not None
            state = session.buffers.recurrent.state
            began = time.process_time()
            for array in state:
                array.copy()
            spent += (time.process_time() - began) * steps / MARK_EVERY
    finally:
        RecurrentState.keep = keep  # type: ignore[method-assign]
    return spent / total


def measure_model(name: str, path: Path, options: argparse.Namespace) -> dict[str, Any]:
    shape, build, threads = SHAPES[name], options.llama, options.threads
    layers = min(options.layers or shape.layers, shape.layers)
    written = not path.exists()
    if written:
        write_model(path, shape, layers)
    result: dict[str, Any] = {"layers": layers, "file_gb": path.stat().st_size / 1e9}
    try:
        with tempfile.TemporaryDirectory() as cache:
            for key in ("first_start_s", "start_s"):
                command = [sys.executable, "-c", _START, str(path), str(threads), cache]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                result[key], result["peak_rss_gb"] = map(float, done.stdout.split())
        dice = np.random.default_rng(1)
        tokens = [int(t) for t in dice.integers(100, 90_000, options.read)]
        took: dict[str, list[tuple[str, Took]]] = {}
        engine = open_engine(path, threads)
        peers: dict[str, Any] = {"ours": StoredPeer(engine)}
        with engine.session("compared") as session:
            ours = session._forward(tokens[:PROMPT], 0, 1, None)[0].astype(np.float64)
            session._held.clear()
        if shape.architecture == "qwen35moe":
            result["snapshot_share"] = snapshot_share(engine, tokens)
        if options.apart:
            measure_peers(peers, tokens, options.rounds, took)
            engine.close()
            peers.clear()
        if build is not None:
            library = LlamaLibrary(build, path, threads)
            peers["llama.cpp"] = LlamaPeer(library)
            library.eval(tokens[:PROMPT])
            theirs = library.logits(shape.vocab)
            result["cosine"] = float(ours @ theirs / np.linalg.norm(ours) / np.linalg.norm(theirs))
        measure_peers(peers, tokens, options.rounds, took)
        for unit, suffix in ((0, ""), (1, "_cpu")):  # seconds, seconds of the processor
            for kind, count in (("decode", 1), ("prefill", len(tokens))):
                for peer, each in took.items():
                    median = statistics.median(taken[unit] for what, taken in each if what == kind)
                    result[f"{peer}_{kind}{suffix}"] = count / median
                if build is not None:
                    ratio = result[f"ours_{kind}{suffix}"] / result[f"llama.cpp_{kind}{suffix}"]
                    result[f"{kind}_vs_llamacpp{suffix}"] = ratio
        engine.close()
    finally:
        if written:
            path.unlink()
    return result


def measure_peers(
    peers: dict[str, Any], tokens: list[int], rounds: int, took: dict[str, list[tuple[str, Took]]]
) -> None:
    """Let the peers take turns; what each step and each prompt took is added to `took`."""
    for _ in range(rounds):
        for peer, work in peers.items():
            each = took.setdefault(peer, [])
            each += [("decode", step) for step in work.decode(tokens[:PROMPT])]
            each.append(("prefill", work.prefill(tokens)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", choices=[*SHAPES, []], help="default: all")
    parser.add_argument("--llama", type=Path, help="folder of llama.cpp's shared libraries")
    parser.add_argument("--layers", type=int, default=0, help="only so many layers; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--read", type=int, default=READ, help="tokens of the long prompt")
    parser.add_argument("--apart", action="store_true", help="one engine after the other, for large files")
    parser.add_argument("--folder", type=Path, help="where files are, or are written for the time being")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models or SHAPES:
            found = measure_model(name, (options.folder or Path(folder)) / f"{name}.gguf", options)
            figures[name] = {key: round(value, 4) for key, value in found.items()}
            print(name)
            for key, value in found.items():
                print(f"  {key:24} {value:10.3f}")
    record("families", figures)


if __name__ == "__main__":
    main()

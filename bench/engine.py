"""The embedded engine against llama.cpp and against a bare loop over its own graph.

Regime: SmolLM2-135M-Instruct, batch 1, all physical cores, short context (about 200 tokens) unless a row says
otherwise. Decoding reads every weight once a token, so the ceiling is memory bandwidth over the bytes of the
weights; on a few small cores the dot products themselves are as dear. Peers take turns in rounds within one
run, and every figure is a ratio of medians: these are ratios of this machine, not promises for another.

llama.cpp takes part through `llama-cpp-python` where that is installed (it compiles for ten minutes, so it is
no dependency); the best of its 4-bit and 8-bit files counts, made from the same weights. Ours counts at its
best precision too, and the table shows both, with the KL divergence from 32-bit floats that each costs.

With `--model FILE.gguf` (or a model named `coder` in the library) a code model takes part as it is stored;
`--llama FOLDER` names builds of llama.cpp that it is compared with, `--only-model` leaves out the rest. MLX
has a row on Macs, and with `--mlx` elsewhere (on its CPU build, which takes seconds a token).

    make bench-engine            # ARGS="--rounds 5" for steadier figures
"""

from __future__ import annotations

import argparse
import platform
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np

from bench.llama_file import llama_files
from bench.record import record
from bench.stored_weights import measure_stored_weights
from keystroke.config import load_settings
from keystroke.engine.base import Interrupt
from keystroke.engine.checkpoint import open_checkpoint
from keystroke.engine.cores import usable_cores
from keystroke.engine.generation import Generation, GenerationParams
from keystroke.engine.locate import resolve
from keystroke.engine.model import Model
from keystroke.engine.onnx.convert import convert_model
from keystroke.engine.onnx.engine import OnnxEngine, OnnxGraph, OnnxOptions
from keystroke.engine.speculative import FileDrafter, measure_verify_cost
from keystroke.engine.speculative.adaptive import AdaptiveDrafter, drafter_for
from keystroke.engine.tokenizer import load_tokenizer
from keystroke.engine.tokenizer.incremental import IncrementalEncoder
from keystroke.errors import NotFound

ROOT = Path(__file__).parents[1]
PROMPT = 150
DECODED = 64
SOURCES = ("src/keystroke/errors.py", "src/keystroke/engine/prefix.py", "src/keystroke/engine/base.py")


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class EmbeddedPeer:
    """One precision of the embedded engine."""

    def __init__(self, path: Path, precision: str, *, exact: bool = True) -> None:
        cache = load_settings().paths.cache
        with open_checkpoint(path) as checkpoint:
            model = convert_model(checkpoint, precision=precision, cache=cache)
            engine = OnnxEngine(OnnxGraph(model, checkpoint.spec, precision), OnnxOptions(exact=exact))
        self.engine = engine
        self.model = Model("bench", engine, load_tokenizer(path))

    def decode(self, prompt: Sequence[int], count: int = DECODED) -> float:
        """Seconds a token through the whole text path: session, sampler, detokeniser, stop rules."""
        self.engine.cache.clear()
        self.engine.known.clear()
        with self.engine.session() as session:
            params = GenerationParams(max_tokens=count, ignore_eos=True)
            generation = Generation(self.model, session, prompt, params)
            for _ in generation:
                pass
            return median(generation.stats.step_seconds[1:])

    def paths(self, prompt: Sequence[int]) -> tuple[float, float]:
        """Seconds a token of the text path and of a bare loop (the run and an argmax), a step of each in
        turn, so that whatever else the machine does falls on both."""
        self.engine.cache.clear()
        self.engine.known.clear()
        whole, bare = [], []
        with self.engine.session() as session, self.engine.session() as naked:
            generation = Generation(
                self.model, session, prompt, GenerationParams(max_tokens=200, ignore_eos=True)
            )
            generation.prefill()
            naked.extend(prompt)
            naked._ensure_buffers(
                0, len(prompt) + 4 * DECODED
            )  # no growing on the way: the loop below is to be bare
            naked.extend([])
            naked.extend(prompt)
            naked.step()
            binding = naked._binding
            assert binding is not None
            token, position = naked.tokens[-1], naked.length - 1
            for _ in range(DECODED * 2):
                whole.append(timed(generation.advance))
                began = time.perf_counter()
                token = int(self.engine.run(binding, [token], position, 1, None).argmax())
                bare.append(time.perf_counter() - began)
                position += 1
            naked._held.clear()
        return median(whole[1:]), median(bare[1:])

    def overhead(self, prompt: Sequence[int]) -> float:
        """Microseconds of Python a token: everything outside ONNX Runtime's own run."""
        inside = [0.0]
        execute = self.engine._execute

        def watched(*arguments: object) -> None:
            began = time.perf_counter()
            execute(*arguments)
            inside[0] += time.perf_counter() - began

        with self.engine.session() as session:
            params = GenerationParams(max_tokens=500, ignore_eos=True)
            generation = Generation(self.model, session, prompt, params, drafter=None, interrupt=Interrupt())
            generation.prefill()
            generation.advance()
            outside = []
            self.engine._execute = watched  # type: ignore[assignment, method-assign]
            try:
                for _ in range(DECODED * 2):
                    inside[0] = 0.0
                    outside.append(timed(generation.advance) - inside[0])
            finally:
                self.engine._execute = execute  # type: ignore[method-assign]
        return median(outside) * 1e6

    def prefill(self, prompt: Sequence[int]) -> float:
        self.engine.cache.clear()
        self.engine.known.clear()
        with self.engine.session() as session:
            return len(prompt) / timed(lambda: (session.extend(prompt), session.step()))

    def logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        """Log probabilities at every position, [n, vocab], for the quality column."""
        rows = []
        with self.engine.session() as session:
            binding_owner = session
            for start in range(0, len(tokens), 64):
                part = list(tokens[start : start + 64])
                logits = binding_owner._forward(part, start, len(part), None).astype(np.float64)
                logits -= logits.max(axis=1, keepdims=True)
                rows.append(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))
        return np.concatenate(rows)


class LlamaCpp:
    """llama.cpp with one file, through its Python binding's token interface."""

    def __init__(self, path: Path, threads: int) -> None:
        from llama_cpp import Llama

        self.model = Llama(str(path), n_ctx=1024, n_threads=threads, n_threads_batch=threads, verbose=False)

    def decode(self, prompt: Sequence[int], count: int = DECODED) -> float:
        self.model.reset()
        self.model.eval(prompt)
        return median([timed(lambda: self.model.eval([11])) for _ in range(count)])

    def prefill(self, prompt: Sequence[int]) -> float:
        self.model.reset()
        return len(prompt) / timed(lambda: self.model.eval(prompt))


def speculation(ours: EmbeddedPeer, rounds: int) -> dict[str, float]:
    """Rewriting a file with the file as draft, and completing code with drafts from what was seen."""
    measure_verify_cost(ours.engine)
    tokenizer = ours.model.tokenizer
    source = "\n".join((ROOT / SOURCES[1]).read_text().splitlines()[14:60]) + "\n"
    edited = source.replace("common_prefix", "shared_prefix")
    opening = edited[: edited.index("while low < limit")]
    task = f"# before\n{source}\n# after: common_prefix is renamed to shared_prefix\n{opening}"
    prompts = [(ROOT / name).read_text()[:1200] for name in SOURCES]
    result: dict[str, float] = {}

    def run(prompt: str, count: int, drafter: AdaptiveDrafter | None) -> tuple[float, str, float]:
        ours.engine.cache.clear()
        ours.engine.known.clear()
        with ours.engine.session() as session:
            params = GenerationParams(max_tokens=count, ignore_eos=True)
            generation = Generation(ours.model, session, tokenizer.encode(prompt), params, drafter=drafter)
            generation.prefill()
            generation.advance()
            seconds = timed(
                lambda: [generation.advance() for _ in iter(lambda: generation.finish is None, False)]
            )
            share = generation.stats.accepted / max(generation.stats.drafted, 1)
            return seconds, generation.text, share

    plain, drafted = [], []
    for _ in range(rounds):
        seconds, text, _ = run(task, 200, None)
        plain.append(seconds)
        seconds, same, share = run(task, 200, drafter_for(ours.engine, tokenizer.encode(source)))
        drafted.append(seconds)
        assert same == text, "speculation changed the text"
    result["edit_vs_plain"] = median(plain) / median(drafted)
    result["edit_acceptance"] = share
    result["edit_tokens_per_step"] = float(
        tokens_per_step(ours, tokenizer.encode(task), tokenizer.encode(source))
    )

    ratios = []
    for _ in range(rounds):
        for prompt in prompts:
            seconds, text, _ = run(prompt, 64, None)
            faster, same, _ = run(prompt, 64, drafter_for(ours.engine))
            assert same == text, "speculation changed the text"
            ratios.append(seconds / faster)
    result["completion_vs_plain"] = median(ratios)
    return result


def tokens_per_step(ours: EmbeddedPeer, task: Sequence[int], source: Sequence[int]) -> float:
    """Tokens a step when the file draft is always taken at its longest: what the drafter itself is worth."""
    ours.engine.cache.clear()
    ours.engine.known.clear()
    drafter = FileDrafter(source)
    with ours.engine.session() as session:
        params = GenerationParams(max_tokens=200, ignore_eos=True)
        generation = Generation(ours.model, session, task, params, drafter=drafter)
        for _ in generation:
            pass
        return generation.stats.tokens / max(generation.stats.steps, 1)


def keystrokes(ours: EmbeddedPeer, text: str) -> tuple[float, list[float], list[float], list[float]]:
    """Seconds to the first token from cold, after each key, of a plain step, and that a fork adds to one."""
    ours.engine.cache.clear()
    ours.engine.known.clear()
    tokenizer = ours.model.tokenizer
    with ours.engine.session() as session:
        cold = timed(lambda: (session.extend(tokenizer.encode(text)), session.step()))
        encoder = IncrementalEncoder(tokenizer, text)

        def key(character: str) -> None:
            encoder.edit(len(encoder), len(encoder), character)
            session.extend(encoder.tokens)
            session.step()

        def branch() -> None:
            with session.fork() as other:
                other.step()

        warm = [timed(lambda c=character: key(c)) for character in "\nprint(len("]  # type: ignore[misc]
        steps = [timed(session.step) for _ in range(8)]
        forks = [max(timed(branch) - median(steps), 0.0) for _ in range(4)]
    return cold, warm, steps, forks


def cancelled(ours: EmbeddedPeer, text: str) -> float:
    """Steps between the press of a key that cancels and the end of the answer."""
    interrupt = Interrupt()
    pressed: list[float] = []

    def press() -> None:
        pressed.append(time.perf_counter())
        interrupt.set()

    with ours.engine.session() as session:
        params = GenerationParams(max_tokens=500, ignore_eos=True)
        generation = Generation(
            ours.model, session, ours.model.tokenizer.encode(text), params, drafter=None, interrupt=interrupt
        )
        generation.prefill()
        generation.advance()
        threading.Timer(0.05, press).start()
        while generation.finish is None:
            generation.advance()
        return (time.perf_counter() - pressed[0]) / median(generation.stats.step_seconds)


def latency(ours: EmbeddedPeer, rounds: int) -> dict[str, float]:
    """A keystroke in a 4k-token buffer, warm against cold; forking there; cancelling."""
    tokenizer = ours.model.tokenizer
    text = "\n".join(path.read_text() for path in sorted((ROOT / "src/keystroke/engine").glob("*.py")))
    text = tokenizer.decode(tokenizer.encode(text)[:4096])
    cold, warm, steps, forks = [], [], [], []
    for _ in range(rounds):
        first, keys, plain, branches = keystrokes(ours, text)
        cold.append(first)
        warm += keys
        steps += plain
        forks += branches
    return {
        "warm_vs_cold_ttft": median(cold) / median(warm),
        "cold_ms": median(cold) * 1e3,
        "warm_ms": median(warm) * 1e3,
        "cancel_steps": max(cancelled(ours, text[:800]) for _ in range(rounds * 3)),
        "fork_steps": median(forks) / median(steps),
    }


def added_coder() -> Path | None:
    """The file of the code model, where it was added to the library."""
    try:
        path = resolve("coder", load_settings())
    except NotFound:
        return None
    files = [path] if path.is_file() else sorted(path.glob("*.gguf"))
    return files[0] if files else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="how often the peers take turns")
    parser.add_argument(
        "--model", type=Path, help="a GGUF file to run as it is stored; coder if it was added"
    )
    parser.add_argument(
        "--llama", type=Path, action="append", default=[], help="folder of llama.cpp libraries"
    )
    parser.add_argument("--threads", type=int, default=0, help="of every engine; one per core if left out")
    parser.add_argument("--only-model", action="store_true", help="nothing but the row of --model")
    parser.add_argument("--mlx", action="store_true", help="a row of MLX, also without a Mac")
    arguments = parser.parse_args()
    rounds = arguments.rounds
    threads = arguments.threads or usable_cores()
    stored: dict[str, object] = {}
    if (file := arguments.model or added_coder()) is not None:
        text = "\n".join((ROOT / name).read_text() for name in SOURCES)
        stored = measure_stored_weights(file, text, arguments.llama, rounds, threads, mlx=arguments.mlx)
        for key, value in stored.items():
            print(f"{key:28} {value}")
    if arguments.only_model:
        record("engine", stored)
        return

    path = resolve("smollm2", load_settings())
    ours = {name: EmbeddedPeer(path, name) for name in ("int4", "int8")}
    tokenizer = ours["int8"].model.tokenizer
    text = (ROOT / SOURCES[2]).read_text()
    tokens = tokenizer.encode(text)
    prompt = tokens[:PROMPT]

    peers: dict[str, LlamaCpp] = {}
    try:
        files = llama_files(path, load_settings().paths.cache / "bench")
        peers = {f"llama.cpp {name}": LlamaCpp(file, threads) for name, file in files.items()}
    except ImportError:
        print("llama-cpp-python is not installed: no llama.cpp in this run (pip install llama-cpp-python)")

    decode: dict[str, list[float]] = {}
    prefill: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, engine in ours.items():
            for exact in (True, False):
                engine.engine.exact = exact
                label = f"keystroke {name}" + ("" if exact else ", exact off")
                decode.setdefault(label, []).append(engine.decode(prompt))
                prefill.setdefault(label, []).append(engine.prefill(tokens[:512]))
            engine.engine.exact = True
        for name, peer in peers.items():
            decode.setdefault(name, []).append(peer.decode(prompt))
            prefill.setdefault(name, []).append(peer.prefill(tokens[:512]))

    quality: dict[str, float] = {}
    reference = EmbeddedPeer(path, "fp32").logprobs(tokens[:384])
    for name, engine in ours.items():
        candidate = engine.logprobs(tokens[:384])
        quality[f"keystroke {name}"] = float((np.exp(reference) * (reference - candidate)).sum(axis=1).mean())

    machine = f"{platform.machine()}, {threads} threads · onnxruntime {version('onnxruntime')}"
    print(f"SmolLM2-135M-Instruct · {machine}\n")
    print(f"{'engine':28} {'decode tok/s':>12} {'prefill tok/s':>13} {'KL to fp32':>11}")
    for name, values in decode.items():
        kl = f"{quality[name]:.4f}" if name in quality else "-"
        print(f"{name:28} {1 / median(values):12.1f} {median(prefill[name]):13.0f} {kl:>11}")

    result: dict[str, object] = {}
    best = min(median(v) for k, v in decode.items() if k.startswith("keystroke") and "off" not in k)
    best_off = min(median(v) for k, v in decode.items() if k.startswith("keystroke"))
    theirs = [median(v) for k, v in decode.items() if k.startswith("llama")]
    result["plain_vs_llamacpp"] = min(theirs) / best if theirs else None
    result["plain_exact_off_vs_llamacpp"] = min(theirs) / best_off if theirs else None
    main_engine = ours["int8"]
    pairs = [main_engine.paths(prompt) for _ in range(rounds)]
    result["plain_vs_raw"] = median([bare / whole for whole, bare in pairs])
    result["overhead_us_per_token"] = median([main_engine.overhead(prompt) for _ in range(rounds)])
    cost = measure_verify_cost(main_engine.engine, seconds=3.0)
    result["verify_cost"] = {str(rows): round(cost[rows], 2) for rows in (2, 4, 8, 16, 32)}
    result |= speculation(main_engine, rounds)
    result |= latency(main_engine, rounds)

    print()
    for key, value in result.items():
        print(f"{key:28} {value:.3f}" if isinstance(value, float) else f"{key:28} {value}")
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in result.items()}
    record(
        "engine",
        {
            **rounded,
            **stored,
            "decode_tok_s": {k: round(1 / median(v), 1) for k, v in decode.items()},
            "kl": quality,
        },
    )


if __name__ == "__main__":
    main()

"""Speed and quality of a GGUF file as stored, in the embedded engine and in llama.cpp.

Regime: one file, batch 1, all cores, a prompt of 150 tokens, then single steps; prefill of 512 tokens. A step
reads every weight once, so memory bandwidth over the file's size is the ceiling of both; prefill is bound by
multiplying bytes. Peers take turns within each round, and the figures are ratios of medians: of seconds, and
of processor seconds, which other programs on the machine disturb less (with one thread, where none waits for
another). Quality is the KL divergence from the same weights widened to 32-bit floats, on the first tokens of
the text.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from bench.fp32_reference import divergence, log_softmax, widened_logprobs
from bench.llama_library import LlamaLibrary
from keystroke.config import load_settings
from keystroke.engine.checkpoint import open_checkpoint
from keystroke.engine.load import load_model
from keystroke.engine.mlx.backend import unavailable_reason
from keystroke.engine.onnx.engine import OnnxEngine

if TYPE_CHECKING:
    from keystroke.engine.mlx.engine import MlxEngine

PROMPT, STEPS, READ, JUDGED = 150, 16, 512, 256
Took = tuple[float, float]  # seconds, seconds of the processor


class Peer(Protocol):
    """What takes turns: each call starts from nothing."""

    def decode(self, prompt: Sequence[int]) -> list[Took]:
        """What each of STEPS steps after the prompt took."""

    def prefill(self, tokens: Sequence[int]) -> Took:
        """What reading the tokens took, to the logits of the last."""


def timed(work: Callable[[], object]) -> Took:
    began = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began[0], time.process_time() - began[1]


class StoredPeer:
    """An engine of ours; `steps` and `read`: how much is measured, fewer where a step takes seconds."""

    def __init__(self, engine: OnnxEngine | MlxEngine, steps: int = STEPS, read: int = READ) -> None:
        self.engine, self.steps, self.read = engine, steps, read

    def _forget(self) -> None:
        self.engine.cache.clear()
        if isinstance(self.engine, OnnxEngine):
            self.engine.known.clear()

    def decode(self, prompt: Sequence[int]) -> list[Took]:
        self._forget()
        with self.engine.session() as session:
            session.extend(prompt[: self.read])
            session.step()
            return [timed(session.step) for _ in range(self.steps)]

    def prefill(self, tokens: Sequence[int]) -> Took:
        self._forget()
        with self.engine.session() as session:
            wall, processor = timed(lambda: (session.extend(tokens[: self.read]), session.step()))
        share = len(tokens) / min(self.read, len(tokens))
        return wall * share, processor * share


class LlamaPeer:
    def __init__(self, library: LlamaLibrary) -> None:
        self.library = library

    def decode(self, prompt: Sequence[int]) -> list[Took]:
        self.library.reset()
        self.library.eval(prompt)
        return [timed(lambda: self.library.eval([11])) for _ in range(STEPS)]

    def prefill(self, tokens: Sequence[int]) -> Took:
        self.library.reset()
        return timed(lambda: self.library.eval(tokens))


# One start in a process of its own: from the import to the first token, with the cache folder given.
_START = """
import sys, time
began = time.perf_counter()
from dataclasses import replace
from pathlib import Path
from keystroke.config import load_settings
from keystroke.engine.checkpoint import open_checkpoint
from keystroke.engine.load import load_model
settings = load_settings()
settings = replace(
    settings,
    paths=replace(settings.paths, cache=Path(sys.argv[2])),
    engine=replace(settings.engine, kind="onnx"),
)
model = load_model(Path(sys.argv[1]), settings)
loaded = time.perf_counter() - began
with model.engine.session() as session:
    session.extend(model.tokenizer.encode("def add(a, b):"))
    session.step()
print(loaded, time.perf_counter() - began)
"""


def starts(path: Path) -> dict[str, float]:
    """Seconds until the model is loaded, the first time and later, and the megabytes that stay in the cache.
    The first time compiles the operators too."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as cache:
        for name in ("first_start_s", "later_start_s"):
            command = [sys.executable, "-c", _START, str(path), cache]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            loaded, first_token = map(float, done.stdout.split())
            found |= {name: loaded, name.replace("start", "token"): first_token}
        kept = sum(file.stat().st_size for file in Path(cache).rglob("*") if file.is_file())
    return {**found, "cache_mb": kept / 1e6}


def quality(path: Path, engine: OnnxEngine, tokens: Sequence[int]) -> float:
    """KL divergence from the widened model, in nats a token."""
    with engine.session() as session:
        found = log_softmax(session._forward(tokens, 0, len(tokens), None))
    with open_checkpoint(path) as checkpoint:
        return divergence(widened_logprobs(checkpoint, tokens), found)


def memory_mb() -> float:
    """The most that this process has had in memory, the mapped file included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)


def mlx_peer(path: Path) -> StoredPeer:
    """The same file on MLX. Its CPU build takes seconds a token, so that little is measured there."""
    from keystroke.engine.mlx.engine import MlxEngine

    settings = load_settings()
    engine = load_model(path, replace(settings, engine=replace(settings.engine, kind="mlx"))).engine
    assert isinstance(engine, MlxEngine)
    return StoredPeer(engine) if unavailable_reason() is None else StoredPeer(engine, steps=2, read=8)


def measure_stored_weights(
    path: Path, text: str, builds: Sequence[Path], rounds: int, threads: int, *, mlx: bool = False
) -> dict[str, object]:
    """Print the table of one file; `builds` are folders of llama.cpp, of which the best counts. `mlx`: with
    a row of the MLX engine, on a machine it is not made for too."""
    result: dict[str, object] = dict(starts(path))
    settings = load_settings()
    engine = replace(settings.engine, threads=threads, kind="onnx")
    model = load_model(path, replace(settings, engine=engine))
    assert isinstance(model.engine, OnnxEngine)
    tokens = model.tokenizer.encode(text)
    prompt, long = tokens[:PROMPT], tokens[:READ]
    ours_alone = StoredPeer(model.engine)
    ours_alone.decode(prompt)
    result["coder_memory_mb"] = memory_mb()
    peers: dict[str, Peer] = {f"keystroke {model.engine.info.precision}": ours_alone}
    for build in builds:
        peers[f"llama.cpp {build.name}"] = LlamaPeer(LlamaLibrary(build, path, threads))
    llama = list(peers)[1:]
    if mlx or unavailable_reason() is None:
        peers["keystroke mlx"] = mlx_peer(path)
    decode: dict[str, list[Took]] = {name: [] for name in peers}
    prefill: dict[str, list[Took]] = {name: [] for name in peers}
    for _ in range(rounds):
        for name, peer in peers.items():
            decode[name] += peer.decode(prompt)
            wall, processor = peer.prefill(long)
            prefill[name].append((wall / len(long), processor / len(long)))

    def rate(taken: dict[str, list[Took]], name: str, clock: int = 0) -> float:
        return 1 / statistics.median(took[clock] for took in taken[name])

    size = path.stat().st_size
    print(f"\n{path.name} · {size / 1e9:.2f} GB · {threads} threads\n")
    print(f"{'engine':32} {'decode tok/s':>12} {'GB/s':>6} {'prefill tok/s':>13}   by processor seconds")
    for name in peers:
        speed = rate(decode, name)
        seconds = f"{rate(decode, name, 1):8.2f} {rate(prefill, name, 1):8.1f}"
        print(f"{name:32} {speed:12.2f} {speed * size / 1e9:6.1f} {rate(prefill, name):13.1f}   {seconds}")
    ours, theirs = next(iter(peers)), llama
    for clock, key in enumerate(("coder_vs_llamacpp", "coder_vs_llamacpp_processor")):
        result[key] = {
            each: rate(taken, ours, clock) / max(rate(taken, name, clock) for name in theirs)
            for each, taken in (("decode", decode), ("prefill", prefill))
            if theirs
        }
    result["coder_tok_s"] = {
        name: {"decode": rate(decode, name), "prefill": rate(prefill, name)} for name in peers
    }
    result["coder_kv_bytes_per_token"] = model.engine.info.kv_bytes_per_token
    result["coder_kl"] = quality(path, model.engine, tokens[:JUDGED])
    model.engine.close()
    return result

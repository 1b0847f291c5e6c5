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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from bench.llama_library import LlamaLibrary
from bench.record import record
from bench.stored_weights import PROMPT, READ, LlamaPeer, StoredPeer, Took
from keystroke.config import load_settings
from keystroke.engine.onnx.engine import OnnxEngine, OnnxSession
from keystroke.engine.onnx.recurrent import MARK_EVERY


@dataclass(frozen=True)
class PublishedSizes:
    """A model's published sizes and how its common GGUF file stores them."""

    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int
    top: int
    width: int
    attention: str = "Q4_K"
    body: str = "Q4_K"
    down: str = "Q6_K"  # of every other layer; `body` in the rest
    head: str = "Q6_K"
    shared: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


SHAPES = {
    "coder-30b-a3b": PublishedSizes("qwen3moe", 2048, 48, 32, 4, 128, 151_936, 128, 8, 768),
    "gpt-oss-20b": PublishedSizes(
        *("gpt-oss", 2880, 24, 64, 8, 64, 201_088, 32, 4, 2880),
        *("Q8_0", "MXFP4", "MXFP4", "Q8_0"),
        extra={"attention.sliding_window": 128, "rope.freq_base": 150_000.0},
    ),
    "qwen3.6-35b-a3b": PublishedSizes(
        *("qwen35moe", 2048, 40, 16, 2, 256, 248_320, 256, 8, 512),
        shared=512,
        extra={
            "ssm.conv_kernel": 4,
            "ssm.state_size": 128,
            "ssm.group_count": 16,
            "ssm.time_step_rank": 32,
            "ssm.inner_size": 4096,
            "full_attention_interval": 4,
            "rope.dimension_count": 64,
        },
    ),
}
# Where a block's half-precision scales lie.
_HALVES = {"Q4_K": (0, 2), "Q6_K": (208,), "Q8_0": (0,), "MXFP4": ()}


def tensors(shape: PublishedSizes, layers: int) -> list[tuple[str, tuple[int, ...], str]]:
    """Names, shapes and types of a file's tensors."""
    found: list[tuple[str, tuple[int, ...], str]] = []
    hidden, queries, keys = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    oss, hybrid = shape.architecture == "gpt-oss", shape.architecture == "qwen35moe"
    found += [("token_embd.weight", (shape.vocab, hidden), "Q8_0" if oss else shape.attention)]
    for layer in range(layers):

        def add(name: str, *size: int, kind: str = "F32", at: str = f"blk.{layer}.") -> None:
            found.append((at + name, size, kind))

        add("attn_norm.weight", hidden)
        add("post_attention_norm.weight" if oss or hybrid else "ffn_norm.weight", hidden)
        if hybrid and (layer + 1) % 4:
            add("attn_qkv.weight", 8192, hidden, kind=shape.attention)
            add("attn_gate.weight", 4096, hidden, kind=shape.attention)
            add("ssm_conv1d.weight", 8192, 4)
            for name in ("ssm_dt.bias", "ssm_a"):
                add(name, 32)
            for name in ("ssm_beta.weight", "ssm_alpha.weight"):
                add(name, 32, hidden, kind="Q8_0")
            add("ssm_norm.weight", 128)
            add("ssm_out.weight", hidden, 4096, kind=shape.attention)
        else:
            add("attn_q.weight", queries * (2 if hybrid else 1), hidden, kind=shape.attention)
            add("attn_k.weight", keys, hidden, kind=shape.attention)
            add("attn_v.weight", keys, hidden, kind=shape.head)
            add("attn_output.weight", hidden, queries, kind=shape.attention)
            for name, size in (("q", queries), ("k", keys), ("v", keys), ("output", hidden)) if oss else ():
                add(f"attn_{name}.bias", size)
            for name in () if oss else ("attn_q_norm.weight", "attn_k_norm.weight"):
                add(name, shape.head_dim)
        if oss:
            add("attn_sinks.weight", shape.heads)
            add("ffn_gate_inp.bias", shape.experts)
            for name, size in (("gate", shape.width), ("up", shape.width), ("down", hidden)):
                add(f"ffn_{name}_exps.bias", shape.experts, size)
        add("ffn_gate_inp.weight", shape.experts, hidden)
        add("ffn_gate_exps.weight", shape.experts, shape.width, hidden, kind=shape.body)
        add("ffn_up_exps.weight", shape.experts, shape.width, hidden, kind=shape.body)
        add(
            "ffn_down_exps.weight",
            shape.experts,
            hidden,
            shape.width,
            kind=(shape.down, shape.body)[layer % 2],
        )
        if shape.shared:
            add("ffn_gate_inp_shexp.weight", hidden)
            add("ffn_gate_shexp.weight", shape.shared, hidden, kind=shape.body)
            add("ffn_up_shexp.weight", shape.shared, hidden, kind=shape.body)
            add("ffn_down_shexp.weight", hidden, shape.shared, kind=shape.down)
    return [
        *found,
        ("output_norm.weight", (hidden,), "F32"),
        ("output.weight", (shape.vocab, hidden), shape.head),
    ]


def random_tensor(
    dice: np.random.Generator, shape: tuple[int, ...], kind: str, name: str
) -> np.ndarray[Any, Any]:
    """Values around zero for matrices, ones for norms; large tensors repeat one pattern of random blocks."""
    if kind == "F32":
        values = dice.standard_normal(shape).astype(np.float32)
        return (
            np.ones(shape, np.float32)
            if "norm" in name
            else -np.abs(values)
            if "ssm_a" in name
            else values * 0.02
        )
    values, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    count = int(np.prod(shape)) // values
    pattern = dice.integers(0, 256, (min(count, 1 << 14), size), dtype=np.uint8)
    for at in _HALVES[kind]:
        pattern[:, at : at + 2] = np.frombuffer(np.float16(1e-4).tobytes(), np.uint8)
    if kind == "MXFP4":
        pattern[:, 0] = 120
    blocks = np.resize(pattern, (count, size))
    return blocks.reshape(*shape[:-1], -1)


def write_model(path: Path, shape: PublishedSizes, layers: int, vocabulary: Path | None = None) -> None:
    """A file of random weights, with the tokens and the chat template of another file, or without any."""
    writer = gguf.GGUFWriter(path, shape.architecture)
    at = shape.architecture
    for key, value in {
        "block_count": layers,
        "context_length": 4096,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.width,
        "expert_feed_forward_length": shape.width,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "expert_count": shape.experts,
        "expert_used_count": shape.top,
        "vocab_size": shape.vocab,
        **({"expert_shared_feed_forward_length": shape.shared} if shape.shared else {}),
        **shape.extra,
    }.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{at}.{key}", value)
    if shape.architecture == "qwen35moe":
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_layer_norm_rms_eps(1e-6)
    if vocabulary is None:
        writer.add_tokenizer_model("none")
    for key, entry in gguf.GGUFReader(vocabulary).fields.items() if vocabulary is not None else ():
        if key.startswith("tokenizer."):
            writer.add_key_value(key, entry.contents(), *entry.types[:2])
    wanted, dice = tensors(shape, layers), np.random.default_rng(0)
    for name, size, kind in wanted:
        values, block = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        nbytes = int(np.prod(size)) // values * block
        stored = size if kind == "F32" else (*size[:-1], size[-1] // values * block)
        dtype = np.dtype(np.float32 if kind == "F32" else np.uint8)
        writer.add_tensor_info(name, stored, dtype, nbytes, GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, size, kind in wanted:
        writer.write_tensor_data(np.ascontiguousarray(random_tensor(dice, size, kind, name)))
    writer.close()


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
    keep = OnnxSession._keep_snapshot

    def watched(session: OnnxSession, *arguments: Any) -> None:
        nonlocal spent
        began = time.process_time()
        keep(session, *arguments)
        spent += time.process_time() - began

    OnnxSession._keep_snapshot = watched  # type: ignore[assignment, method-assign]
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
        OnnxSession._keep_snapshot = keep  # type: ignore[method-assign]
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

"""Single-stream speed of the CUDA engine, with transformers' compiled static cache beside it.

Regime: batch 1 unless a row says otherwise, bf16 KV, greedy, weights random (speed does not depend on them)
but for the speculative edit, which needs a real model. A step must read every weight once and the context's
KV once; that many bytes over the bandwidth of a large copy, measured in the same run, is the ceiling, and
`fraction_of_limit` is how near a row comes. Everything goes through `Session`, host included. The last line
is JSON.

    python -P bench/cuda.py                   every row and the peer
    python -P bench/cuda.py 135m 1.5b         some of: 135m 1.5b 7b 120k edit
        --model PATH    a folder or file with real weights, for the edit
        --no-peer       leaves transformers out
        --compile       only compiles the kernels, so that a later run need not
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

# This folder has a keystroke.py of its own, which must not stand for the package.
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

from keystroke.engine.base import StepRequest  # noqa: E402
from keystroke.engine.checkpoint import open_checkpoint  # noqa: E402
from keystroke.engine.checkpoint.rope import extended  # noqa: E402
from keystroke.engine.checkpoint.spec import ModelSpec, RopeSpec  # noqa: E402
from keystroke.engine.cuda.driver import GpuLauncher, compiled  # noqa: E402
from keystroke.engine.cuda.engine import CudaEngine, load_cuda  # noqa: E402
from keystroke.engine.cuda.model import random_weights  # noqa: E402
from keystroke.engine.cuda.plan import Plan, Precision  # noqa: E402
from keystroke.engine.cuda.sparse import Sparse  # noqa: E402
from keystroke.engine.speculative import FileDrafter  # noqa: E402
from keystroke.engine.tokenizer import load_tokenizer  # noqa: E402

DEVICE = torch.device("cuda")
BASE = ModelSpec(
    architecture="qwen2",
    name="",
    vocab_size=151_936,
    hidden=1536,
    layers=28,
    heads=12,
    kv_heads=2,
    head_dim=128,
    intermediate=8960,
    norm_eps=1e-6,
    rope=RopeSpec(1_000_000.0),
    context_length=32_768,
    tied=True,
    qkv_bias=True,
)
SHAPES = {
    "135m": replace(
        BASE,
        architecture="llama",
        name="SmolLM2-135M",
        vocab_size=49_152,
        hidden=576,
        layers=30,
        heads=9,
        kv_heads=3,
        head_dim=64,
        intermediate=1536,
        context_length=8192,
        qkv_bias=False,
    ),
    "1.5b": replace(BASE, name="Qwen2.5-1.5B"),
    "7b": replace(
        BASE,
        name="Qwen2.5-7B",
        vocab_size=152_064,
        hidden=3584,
        heads=28,
        kv_heads=4,
        intermediate=18_944,
        tied=False,
    ),
}
LONG = extended(SHAPES["1.5b"], 131_072)
KERNELS: dict[str, tuple[tuple[ModelSpec, Precision, tuple[tuple[int, bool], ...]], ...]] = {
    # what each part of the benchmark runs: shape, precision, (tiles of rows, sparse)
    "135m": ((SHAPES["135m"], "bf16", ((1, False), (2, False))),),
    "1.5b": ((SHAPES["1.5b"], "bf16", ((1, False), (2, False))),),
    "7b": tuple((SHAPES["7b"], p, ((1, False), (2, False))) for p in ("bf16", "int8", "int4")),
    "120k": ((LONG, "bf16", ((1, False), (1, True))),),
}
# Figures measured once on such a GPU with another program, batch 1, the same shapes: quoted, not run here.
QUOTED = {
    ("SmolLM2-135M", "bf16", 1024): ("llama.cpp F16", 965.0),
    ("Qwen2.5-1.5B", "bf16", 1024): ("gpt-fast", 436.0),
    ("Qwen2.5-7B", "bf16", 1024): ("llama.cpp F16", 196.0),
    ("Qwen2.5-7B", "int8", 1024): ("llama.cpp Q8_0", 257.0),
    ("Qwen2.5-7B", "int4", 1024): ("llama.cpp Q4_0", 353.0),
    ("Qwen2.5-1.5B", "bf16", 120_000): ("llama.cpp F16", 247.0),
}
EDITED = Path(__file__).resolve().parent.parent / "src/keystroke/engine/speculative/file_draft.py"
Row = dict[str, Any]


def bandwidth() -> float:
    """Bytes a second, read plus written, of a large copy."""
    source = torch.empty(1 << 32, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source), 10)


def seconds(work: Callable[[], object], count: int) -> float:
    """Median over three of the mean time of `count` calls."""
    work()
    times = []
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            work()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / count)
    return statistics.median(times)


def prompt(spec: ModelSpec, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, spec.vocab_size, (length,), generator=generator).tolist()


def blocks() -> int:
    return torch.cuda.get_device_properties(DEVICE).multi_processor_count


def engine(spec: ModelSpec, precision: Precision, kv_tokens: int, sparse: Sparse = "off") -> CudaEngine:
    weights = random_weights(spec, precision, DEVICE, blocks())
    return CudaEngine(weights, GpuLauncher(weights.plan, DEVICE), kv_tokens, sparse=sparse)


def compile_all(parts: list[str], model: Path | None) -> None:
    """Every kernel these parts need, at once: the compiler is slow and the machine has cores."""
    wanted = [
        Plan(spec, precision, blocks()).macros(*variant)
        for part in parts
        for spec, precision, variants in KERNELS.get(part, ())
        for variant in variants
    ]
    if model is not None and "edit" in parts:
        with open_checkpoint(model) as checkpoint:
            wanted += [Plan(checkpoint.spec, "bf16", blocks()).macros(tiles) for tiles in (1, 2)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(compiled, wanted))


class Bench:
    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.limit = bandwidth()

    def add(
        self, spec: ModelSpec, precision: str, context: int, mode: str, tok_s: float, **more: Any
    ) -> None:
        row: Row = {
            "shape": spec.name,
            "precision": precision,
            "context": context,
            "mode": mode,
            "tok_s": round(tok_s, 1),
            "fraction_of_limit": None,
            "peer_tok_s": None,
            **more,
        }
        quoted = QUOTED.get((spec.name, precision, context))
        if mode in ("decode", "sparse decode") and quoted is not None:
            row["quoted_peer"], row["quoted_tok_s"] = quoted
        self.rows.append(row)
        extra = ", ".join(
            f"{k} {v}" for k, v in row.items() if k not in ("shape", "precision", "context", "mode", "tok_s")
        )
        print(
            f"{spec.name:14} {precision:5} context {context:>7,}  {mode:22} {tok_s:9.1f} tok/s  {extra}",
            flush=True,
        )

    def compare(self, spec: ModelSpec) -> None:
        """Put transformers' speed beside the row of the same shape in bf16."""
        torch.cuda.empty_cache()
        try:
            speed = round(transformers_speed(spec, 1024), 1)
        except Exception as error:  # a peer that fails must not cost our own figures
            print(f"transformers on {spec.name}: {type(error).__name__}: {error}", flush=True)
            return
        finally:
            torch.compiler.reset()
        print(f"{spec.name:14} bf16  context   1,024  transformers           {speed:9.1f} tok/s", flush=True)
        for row in self.rows:
            if (row["shape"], row["precision"], row["context"], row["mode"]) == (
                spec.name,
                "bf16",
                1024,
                "decode",
            ):
                row["peer_tok_s"] = speed

    def report(self) -> None:
        found = {
            "bench": "cuda",
            "gpu": torch.cuda.get_device_name(),
            "copy_tb_s": round(self.limit / 1e12, 3),
        }
        print(json.dumps({**found, "rows": self.rows}), flush=True)

    def decode(self, e: CudaEngine, spec: ModelSpec, context: int, mode: str = "decode") -> float:
        """One stream of plain steps; returns seconds a step."""
        plan = e._stepper.plan
        with e.session() as session:
            session.extend(prompt(spec, context))
            for _ in range(8):
                session.step()
            step = seconds(session.step, 100)
        moved = plan.streamed_bytes + context * plan.kv_bytes_per_token
        more: Row = {}
        if mode == "decode":
            more["fraction_of_limit"] = round(moved / step / self.limit, 3)
        else:
            more["steps_taken_again"] = e.doubts
        self.add(spec, plan.precision, context, mode, 1 / step, **more)
        return step

    def verify(self, e: CudaEngine, spec: ModelSpec, context: int) -> None:
        """What a step of 16 rows costs against one of 1 row, neither running ahead."""
        times = {}
        for rows in (1, 16):
            with e.session() as session:
                session.extend(prompt(spec, context))
                session.step()
                length = session.length

                def once(rows: int = rows, length: int = length) -> None:
                    session.step([0] * (rows - 1))
                    session.rollback(length)

                times[rows] = seconds(once, 40)
        self.add(
            spec,
            e.info.precision,
            context,
            "verify 16 rows",
            1 / times[16],
            times_one_row=round(times[16] / times[1], 3),
        )

    def together(self, e: CudaEngine, spec: ModelSpec, context: int, alone: float) -> None:
        sessions = [e.session() for _ in range(16)]
        for i, session in enumerate(sessions):
            session.extend([i, *prompt(spec, context - 1)])
            session.step()
        requests = [StepRequest(session) for session in sessions]
        step = seconds(lambda: e.step_many(requests), 40)
        for session in sessions:
            session.close()
        self.add(
            spec,
            e.info.precision,
            context,
            "16 sessions together",
            16 / step,
            times_one_session=round(16 * alone / step, 2),
        )

    def keystroke(self, e: CudaEngine, spec: ModelSpec, context: int, alone: float) -> None:
        """First token after 16 more tokens on a long session."""
        base = prompt(spec, context)
        with e.session() as session:
            session.extend(base)
            session.step()

            def once() -> None:
                session.rollback(context)
                session.extend([*base, *range(16)])
                session.step()

            once()
            times = []
            for _ in range(20):
                began = time.perf_counter()
                once()
                times.append(time.perf_counter() - began)
        taken = statistics.median(times)
        self.add(
            spec, e.info.precision, context, "first token after +16", 1 / taken, steps=round(taken / alone, 2)
        )

    def prefill(self, e: CudaEngine, spec: ModelSpec, context: int) -> None:
        with e.session() as session:
            session.extend(prompt(spec, 2048)[:2000])  # the libraries' own first-time work
        with e.session() as session:
            torch.cuda.synchronize()
            began = time.perf_counter()
            session.extend(prompt(spec, context))
            torch.cuda.synchronize()
            taken = time.perf_counter() - began
        self.add(spec, e.info.precision, context, "prefill", context / taken, seconds=round(taken, 3))

    def edit(self, path: Path, count: int = 400) -> None:
        """A file copied with a name changed: the model has seen the file and the beginning of its new
        version; the old file is the draft. The text must be the same with and without it."""
        tokenizer = load_tokenizer(path)
        source = EDITED.read_text()
        old, new = "_at", "_cursor"
        tokens = tokenizer.encode(source)[:900]
        shown = tokenizer.decode(tokens)
        changed = tokenizer.encode(shown.replace(old, new))
        lead = len(changed) // 3
        start = [*tokens, *tokenizer.encode("\n\n"), *changed[:lead]]
        with load_cuda(path, kv_tokens=16_384) as e:
            texts, times, steps, accepted, drafted = {}, {}, 0, 0, 0
            for mode in ("plain", "drafts", "plain", "drafts"):  # the first of each warms up
                drafter = FileDrafter(tokens)
                drafter.begin(start)
                drafter.observe(changed[:lead])
                steps = accepted = drafted = 0
                with e.session() as session:
                    session.extend(start)
                    torch.cuda.synchronize()
                    began = time.perf_counter()
                    made: list[int] = []
                    while len(made) < count:
                        draft = drafter.propose(session.tokens, 15) if mode == "drafts" else ()
                        step = session.step(draft)
                        if mode == "drafts":
                            drafter.observe(step.tokens)
                        made += step.tokens
                        steps, accepted, drafted = steps + 1, accepted + step.accepted, drafted + len(draft)
                    times[mode] = (time.perf_counter() - began) / len(made)
                texts[mode] = made[:count]
            spec, precision = e._stepper.plan.spec, e.info.precision
        self.add(spec, precision, len(start), "copy with edits, plain", 1 / times["plain"])
        self.add(
            spec,
            precision,
            len(start),
            "copy with edits, drafts",
            1 / times["drafts"],
            times_plain=round(times["plain"] / times["drafts"], 2),
            accepted=round(accepted / max(drafted, 1), 3),
            tokens_a_step=round(count / steps, 2),
            same_text=texts["plain"] == texts["drafts"],
        )


def transformers_speed(spec: ModelSpec, context: int) -> float:
    """Decode tokens a second of transformers with a compiled static cache."""
    import transformers

    name = "Llama" if spec.architecture == "llama" else "Qwen2"
    config = getattr(transformers, f"{name}Config")(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden,
        intermediate_size=spec.intermediate,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        max_position_embeddings=spec.context_length,
        rms_norm_eps=spec.norm_eps,
        tie_word_embeddings=spec.tied,
    )
    with torch.device(DEVICE):
        model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16).eval()
    tokens = torch.tensor([prompt(spec, context)], device=DEVICE)

    def generate(count: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            min_new_tokens=count,
            max_new_tokens=count,
            do_sample=False,
            cache_implementation="static",
            pad_token_id=0,
        )
        torch.cuda.synchronize()
        return time.perf_counter() - began

    generate(160)
    generate(160)
    short, long = (statistics.median(generate(count) for _ in range(3)) for count in (32, 160))
    return 128 / (long - short)


def main(arguments: list[str]) -> None:
    model = Path(arguments.pop(arguments.index("--model") + 1)) if "--model" in arguments else None
    wanted = [a for a in arguments if not a.startswith("-")] or ["135m", "1.5b", "7b", "120k", "edit"]
    compile_all(wanted, model)
    if "--compile" in arguments:
        return
    bench = Bench()
    torch.cuda.empty_cache()
    print(f"{torch.cuda.get_device_name()}: copy {bench.limit / 1e12:.2f} TB/s", flush=True)
    if "135m" in wanted:
        spec = SHAPES["135m"]
        with engine(spec, "bf16", 65_536) as e:
            alone = bench.decode(e, spec, 1024)
            bench.verify(e, spec, 1024)
            bench.together(e, spec, 1024, alone)
    if "1.5b" in wanted:
        spec = SHAPES["1.5b"]
        with engine(spec, "bf16", 65_536) as e:
            alone = bench.decode(e, spec, 1024)
            bench.verify(e, spec, 1024)
            bench.together(e, spec, 1024, alone)
            alone = bench.decode(e, spec, 8192)
            bench.keystroke(e, spec, 8192, alone)
            bench.prefill(e, spec, 16_384)
    if "7b" in wanted:
        spec = SHAPES["7b"]
        for precision in ("bf16", "int8", "int4"):
            with engine(spec, precision, 32_768) as e:
                bench.decode(e, spec, 1024)
                bench.verify(e, spec, 1024)
    if "120k" in wanted:
        with engine(LONG, "bf16", 262_144) as e:
            bench.prefill(e, LONG, 131_000)
            bench.decode(e, LONG, 120_000)
        with engine(LONG, "bf16", 131_072, "always") as e:
            bench.decode(e, LONG, 120_000, "sparse decode")
    if "edit" in wanted and model is not None:
        bench.edit(model)
    bench.report()
    if "--no-peer" not in arguments:
        for name in ("135m", "1.5b"):
            if name in wanted:
                bench.compare(SHAPES[name])
                bench.report()


if __name__ == "__main__":
    main(sys.argv[1:])

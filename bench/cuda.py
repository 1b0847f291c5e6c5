"""Single-stream speed of the CUDA engine, with transformers' compiled static cache beside it.

Regime: batch 1 unless a row says otherwise, bf16 KV, greedy, weights random (speed does not depend on them).
A step must read every weight once and the context's KV once; that many bytes over the bandwidth of a large
copy, measured in the same run, is the ceiling, and `fraction_of_limit` is how near a row comes. Everything
goes through `Session`, host included. The last line is JSON.

    python bench/cuda.py                 every row and the peer
    python bench/cuda.py 135m 1.5b       some shapes;  --no-peer leaves transformers out
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

# This folder has a keystroke.py of its own, which must not stand for the package.
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

from keystroke.engine.base import StepRequest  # noqa: E402
from keystroke.engine.checkpoint.rope import extended  # noqa: E402
from keystroke.engine.checkpoint.spec import ModelSpec, RopeSpec  # noqa: E402
from keystroke.engine.cuda.driver import GpuLauncher  # noqa: E402
from keystroke.engine.cuda.engine import CudaEngine  # noqa: E402
from keystroke.engine.cuda.model import random_weights  # noqa: E402
from keystroke.engine.cuda.plan import Precision  # noqa: E402

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


def engine(spec: ModelSpec, precision: Precision, kv_tokens: int) -> CudaEngine:
    blocks = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    weights = random_weights(spec, precision, DEVICE, blocks)
    return CudaEngine(weights, GpuLauncher(weights.plan, DEVICE), kv_tokens)


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

    def decode(self, e: CudaEngine, spec: ModelSpec, context: int) -> float:
        """One stream of plain steps; returns seconds a step."""
        plan = e._stepper.plan
        with e.session() as session:
            session.extend(prompt(spec, context))
            for _ in range(8):
                session.step()
            step = seconds(session.step, 100)
        moved = plan.streamed_bytes + context * plan.kv_bytes_per_token
        self.add(
            spec,
            plan.precision,
            context,
            "decode",
            1 / step,
            fraction_of_limit=round(moved / step / self.limit, 3),
        )
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
            torch.cuda.synchronize()
            began = time.perf_counter()
            session.extend(prompt(spec, context))
            torch.cuda.synchronize()
            self.add(spec, e.info.precision, context, "prefill", context / (time.perf_counter() - began))


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
    wanted = [a for a in arguments if not a.startswith("-")] or ["135m", "1.5b", "120k", "7b"]
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
    if "7b" in wanted:
        spec = SHAPES["7b"]
        for precision in ("bf16", "int8", "int4"):
            with engine(spec, precision, 32_768) as e:
                bench.decode(e, spec, 1024)
                bench.verify(e, spec, 1024)
    if "120k" in wanted:
        spec = extended(SHAPES["1.5b"], 131_072)
        with engine(spec, "bf16", 262_144) as e:
            bench.prefill(e, spec, 131_000)
            bench.decode(e, spec, 120_000)
    bench.report()
    if "--no-peer" not in arguments:
        for name in SHAPES:
            if name in wanted:
                bench.compare(SHAPES[name])
        bench.report()


if __name__ == "__main__":
    main(sys.argv[1:])

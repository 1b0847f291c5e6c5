"""Row `moe-host` of bench/cuda.py: Coder-30B-A3B on GPUs that do not hold all of its experts.

Weights are random blocks as a Q4_K_M file has them, each layer in memory of its own, so that no cache helps.
The GPU memory of smaller cards is simulated: as many experts are placed on the GPU as would fit beside the
rest, a context of 16k tokens and room to read prompts; routers are random, so a card with half of the experts
computes half of the pairs. `host_gb_s` is what all cores read from such memory, measured in the same process;
`fraction_of_limit` is the time that reading a step's experts from it takes at least, of a step's time.
`quoted_tok_s`: llama.cpp with all experts on 16 cores, measured once on such a machine. MOE_HOST=host,8 in
the environment measures only these.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from bench.cuda_rows.cuda_parts import (
    CONTEXT,
    DEVICE,
    QWEN3_CODER_30B,
    READY,
    Json,
    Run,
    blocks,
    say,
    seconds_each,
)
from keystroke.config import load_settings
from keystroke.engine.checkpoint.ggml_types import STORAGE_TYPES
from keystroke.engine.checkpoint.spec import ModelSpec
from keystroke.engine.cores import usable_cores
from keystroke.engine.cuda.driver import GpuLauncher
from keystroke.engine.cuda.engine import CudaEngine
from keystroke.engine.cuda.gpu import fit_plan
from keystroke.engine.cuda.plan import Plan
from keystroke.engine.cuda.stored import Codes
from keystroke.engine.cuda.weights import (
    build_weights,
    place_experts,
    random_codes,
    random_plan,
    random_tensor,
)
from keystroke.engine.host_experts import ExpertLayer, ExpertStore, ExpertTable
from keystroke.engine.onnx.native import operators_library

MEMORY = (24, 16, 12, 8)  # GB of GPUs; then all experts on the host
QUOTED = 44.0
KV_TOKENS = 16_384
_BLOCKS = {known.name: known for known in STORAGE_TYPES.values()}
_SHARE = 0.97  # of a GPU's memory that its driver leaves


@dataclass(frozen=True)
class Limits:
    """Bytes a second that the GPU and the host's cores read."""

    gpu: float
    host: float


def random_rows(kind: str, height: int, width: int, seed: int) -> npt.NDArray[np.uint8]:
    """Random blocks of Q4_K or Q6_K whose numbers are scaled like trained weights."""
    block = _BLOCKS[kind]
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 256, (height, width // block.block, block.block_bytes), np.uint8)
    scale = np.frombuffer(np.float16(width**-0.5 / 300).tobytes(), np.uint8)
    if kind == "Q4_K":
        rows[..., 0:2], rows[..., 2:4] = scale, scale
    else:
        rows[..., 208:210] = scale
        rows[..., 192:208] &= 31
    return rows.reshape(height, -1)


def random_store(spec: ModelSpec) -> ExpertStore:
    """A store in the types of a Q4_K_M file; layers have the same blocks in other memory."""
    library = operators_library(load_settings().paths.cache)
    assert library is not None, "the operators do not compile here"
    experts = spec.experts
    assert experts is not None
    shapes = {
        "gate": ("Q4_K", experts.width, spec.hidden),
        "up": ("Q4_K", experts.width, spec.hidden),
        "down": ("Q4_K", spec.hidden, experts.width),
        "wide": ("Q6_K", spec.hidden, experts.width),
    }
    some = {
        name: random_rows(kind, 8 * height, width, seed)
        for seed, (name, (kind, height, width)) in enumerate(shapes.items())
    }

    def layer(index: int) -> ExpertLayer:
        down = "wide" if index % 2 == 0 else "down"
        gate, up, last = (
            ExpertTable(np.tile(some[name], (experts.count // 8, 1)), shapes[name][0])
            for name in ("gate", "up", down)
        )
        return ExpertLayer(gate, up, last)

    with ThreadPoolExecutor(usable_cores()) as pool:
        return ExpertStore(library, tuple(pool.map(layer, range(spec.layers))))


def host_bandwidth(store: ExpertStore) -> float:
    """Bytes a second that all cores read from the store."""
    parts = [
        table.rows.reshape(-1).view(np.uint64) for each in store.layers for table in (each.gate, each.up)
    ]
    with ThreadPoolExecutor(usable_cores()) as pool:
        times = []
        for _ in range(3):
            began = time.perf_counter()
            list(pool.map(np.bitwise_or.reduce, parts))
            times.append(time.perf_counter() - began)
    return sum(part.nbytes for part in parts) / statistics.median(times)


def engine_of(plan: Plan, store: ExpertStore) -> CudaEngine:
    generator = torch.Generator(device=DEVICE).manual_seed(0)

    def source(name: str, shape: tuple[int, ...]) -> torch.Tensor | Codes:
        if len(shape) == 2 and shape[1] % 32 == 0:
            return random_codes((shape[0], shape[1]), generator)
        return random_tensor(name, shape, generator)

    host = None if plan.resident is None else place_experts(plan, store)
    return CudaEngine(build_weights(plan, source, DEVICE, host), GpuLauncher(plan, DEVICE), KV_TOKENS)


def measure(plan: Plan, store: ExpertStore, mode: str, limits: Limits) -> Json:
    experts, resident = plan.spec.experts, plan.resident
    assert experts is not None
    with engine_of(plan, store) as engine:
        run = Run(engine, limits.gpu)
        for text in (run.text, run.text[CONTEXT:]):  # the first compiles kernels
            began = time.perf_counter()
            with engine.session() as session:
                session.extend(text[:CONTEXT])
                session.step()
            first = time.perf_counter() - began
        server = engine._stepper.experts
        before = (0, 0) if server is None else server.counts()
        taken = run.step_seconds(CONTEXT)
        after = before if server is None else server.counts()
        rows = min(16, engine._stepper.plan.max_rows)
        with engine.session() as session:  # what a short prompt takes for each 16 tokens
            session.extend(run.text[:CONTEXT])
            session.step([0] * (rows - 1))
            many = seconds_each(lambda: session.step([0] * (rows - 1)), 5)
        absent = 0 if resident is None else experts.count - resident
        each = (
            sum(table.rows.nbytes for layer in store.layers for table in (layer.gate, layer.up, layer.down))
            // experts.count
        )
        read = each * experts.top * absent / experts.count
        row = run.row(
            CONTEXT,
            mode,
            1 / taken,
            fraction_of_limit=round(read / limits.host / taken, 3) if absent else None,
            experts_on_gpu=experts.count - absent,
            host_gb_s=round(limits.host / 1e9, 1),
            first_token_s=round(first, 2),
            ms_16_rows=round(1000 * many, 1),
        )
        if server is not None:
            row["pairs_a_message"] = round((after[1] - before[1]) / max(after[0] - before[0], 1), 2)
        if resident == 0:
            row |= {"quoted_peer": "llama.cpp, experts on 16 cores", "quoted_tok_s": QUOTED}
        return row


def main() -> None:
    blocks()  # the driver's own start
    print(READY, flush=True)
    told = sys.stdin.readline()
    if not told:
        return
    spec = QWEN3_CODER_30B
    store = random_store(spec)
    limits = Limits(float(told), host_bandwidth(store))
    plan = random_plan(spec, "stored", blocks())
    wanted = [("all experts on the host", replace(plan, resident=0))]
    for size in MEMORY:
        room = int(size * 1e9 * _SHARE)
        wanted.append((f"experts on {size} GB", fit_plan(plan, "auto", room, int(size * 1e9))))
    only = os.environ.get("MOE_HOST", "").split(",")  # of a short run: host, 8, 12 ...
    for mode, fitted in wanted:
        if only[0] and not any(f" {each} GB" in mode or mode.endswith(each) for each in only):
            continue
        try:
            say(measure(fitted, store, mode, limits))
        except Exception as error:
            traceback.print_exc()
            say({"part": "moe-host", "row": mode, "error": f"{type(error).__name__}: {error}"[:300]})
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

"""Models for the tests on a GPU: small, of every family, with random weights; and the kernels they need.

The one place that names shapes for these tests. Engines run on the GPU, references in torch beside them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from keystroke.engine.base import Sampling
from keystroke.engine.checkpoint.rope import extend_context
from keystroke.engine.checkpoint.spec import ModelSpec, RopeSpec, tensor_shapes
from keystroke.engine.cuda.driver import GpuLauncher
from keystroke.engine.cuda.engine import CudaEngine
from keystroke.engine.cuda.plan import NEAR, KvPrecision, Plan, Precision
from keystroke.engine.cuda.sparse import Sparse
from keystroke.engine.cuda.target import HOPPER as NATIVE
from keystroke.engine.cuda.target import Target
from keystroke.engine.cuda.weights import build_weights, random_tensor

Tensors = dict[str, Tensor]
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
needs_hopper = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
DEVICE = torch.device("cuda")
PROBE = Sampling(logprobs=0)  # chosen on the host: no step runs ahead and overwrites the logits
FAMILIES = ("llama", "qwen2", "qwen3")
VOCABULARY = 32_003


def family(name: str) -> ModelSpec:
    return ModelSpec(
        architecture=name,  # type: ignore[arg-type]
        name=f"small {name}",
        vocab_size=VOCABULARY,
        hidden=768,
        layers=6,
        heads=12,
        kv_heads=2 if name == "qwen2" else 4,
        head_dim=128 if name == "qwen3" else 64,
        intermediate=2048,
        norm_eps=1e-6,
        rope=RopeSpec(10_000.0),
        context_length=16_384,
        tied=name != "llama",
        qkv_bias=name == "qwen2",
        qk_norm=name == "qwen3",
    )


# Heads of 128 and few of them for keys, as real models with long contexts have.
WIDE = replace(family("qwen2"), name="wide", hidden=1536, layers=4, head_dim=128, intermediate=4096)
LONG = extend_context(WIDE, 65_536)
DRAFTING = replace(WIDE, layers=1)
# An untied head, so that its own quantisation can be told; units of several chunks.
QUANTISED = replace(WIDE, hidden=2304, layers=2, intermediate=2048, tied=False)
ENDLESS = extend_context(replace(family("qwen2"), layers=3), 131_072)


def blocks() -> int:
    return torch.cuda.get_device_properties(DEVICE).multi_processor_count


def kernels() -> list[dict[str, str]]:
    """Most of what the tests need; the rest compiles when it is needed."""
    wanted: list[tuple[ModelSpec, Precision, tuple[int, ...], bool]] = [
        *((family(name), "bf16", (1, 2, 4), False) for name in FAMILIES),
        (WIDE, "bf16", (1, 2), False),
        (LONG, "bf16", (1, 2), True),
        (DRAFTING, "bf16", (1, 2), False),
        (QUANTISED, "int8", (1, 2, 4), False),
        (QUANTISED, "int4", (1, 2, 4), False),
        (ENDLESS, "bf16", (1,), False),
    ]
    bytewise = [Plan(family(name), "bf16", blocks(), "int8").macros(1) for name in FAMILIES]
    long = Plan(LONG, "bf16", blocks(), "int8")
    bytewise += [long.macros(tiles, sparse) for tiles in (1, 2) for sparse in (False, True)]
    quantised = [Plan(each[0], each[1], blocks()) for each in wanted if each[1] != "bf16"]
    single = [plan.macros(1, shape=plan.shape(1, reach)) for plan in quantised for reach in (0, NEAR)]
    return [*bytewise, *single] + [
        Plan(spec, precision, blocks()).macros(tiles, sparse)
        for spec, precision, sizes, sparse in wanted
        for tiles in sizes
    ]


def tensors_of(spec: ModelSpec, seed: int = 0) -> Tensors:
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return {name: random_tensor(name, shape, generator) for name, shape in tensor_shapes(spec).items()}


def engine_of(
    spec: ModelSpec,
    tensors: Tensors | None = None,
    precision: Precision = "bf16",
    kv_tokens: int = 65_536,
    sparse: Sparse = "off",
    seed: int = 0,
    kv_precision: KvPrecision = "bf16",
    target: Target | None = None,
) -> CudaEngine:
    given = tensors_of(spec, seed) if tensors is None else tensors
    plan = Plan(spec, precision, blocks(), kv_precision, target=target or NATIVE)
    weights = build_weights(plan, lambda name, _: given[name], DEVICE)
    return CudaEngine(weights, GpuLauncher(weights.plan, DEVICE), kv_tokens, sparse=sparse)


def text(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, count).tolist()  # type: ignore[no-any-return]


def plain(engine: CudaEngine, prompt: list[int], count: int, sampling: Sampling = Sampling()) -> list[int]:  # noqa: B008
    with engine.session() as session:
        session.extend(prompt)
        return [session.step(sampling=sampling).tokens[0] for _ in range(count)]


def last_logits(engine: CudaEngine, prompt: list[int]) -> Tensor:
    """What the kernel computes after the last token of `prompt`."""
    with engine.session() as session:
        session.extend(prompt)
        row = session.length - session.resident - 1
        session.step(sampling=PROBE)
        return engine._stepper.logits[row].double()


def assert_rows_alone_equal_rows_together(engine: CudaEngine, prompt: list[int]) -> None:
    """The last tokens one by one, then several in a step: the same bits. In a scope of its own: pages that
    another test left were read in other portions, which round differently."""
    length = len(prompt)
    with engine.session(scope="rows alone and together") as session:
        session.extend(prompt[:-16])
        singles = []
        for token in prompt[-16:]:
            session.step(sampling=PROBE)
            singles.append(engine._stepper.logits[0].clone())
            session.rollback(session.length - 1)
            session.extend([*session.tokens, token])
        for size in (each for each in (2, 5, 8, 15) if each <= engine._stepper.plan.max_rows):
            session.rollback(length - size)
            session._resident = length - 1 - size
            session.step(prompt[length - size :], sampling=PROBE)
            for i in range(size):
                assert torch.equal(engine._stepper.logits[i], singles[16 - size + i]), (size, i)
            session.rollback(length - size)
            session.extend(prompt)


def assert_steps_repeat(engine: CudaEngine, length: int, times: int = 500) -> None:
    """The same step many times: what blocks pass to each other arrives in another order each time, which
    must not show."""
    with engine.session(scope="steps repeat") as session:
        session.extend(text(length))
        session.step(sampling=PROBE)
        first = None
        for i in range(times):
            session.rollback(length)
            session.step(sampling=PROBE)
            logits = engine._stepper.logits[0].clone()
            first = logits if first is None else first
            assert torch.equal(logits, first), i

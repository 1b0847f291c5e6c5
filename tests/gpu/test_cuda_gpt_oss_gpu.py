"""gpt-oss-20b's layers on a GPU, experts in MXFP4: against float64 of the stored weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from gpu_models import (
    DEVICE,
    assert_rows_alone_equal_rows_together,
    assert_steps_repeat,
    blocks,
    family,
    last_logits,
    needs_hopper,
    text,
)
from torch import Tensor

from keystroke.engine.checkpoint.spec import ExpertsSpec, tensor_shapes
from keystroke.engine.cuda.driver import GpuLauncher
from keystroke.engine.cuda.engine import CudaEngine
from keystroke.engine.cuda.packing import unpack
from keystroke.engine.cuda.plan import Plan
from keystroke.engine.cuda.reference import forward
from keystroke.engine.cuda.stored import Codes, typical_formats
from keystroke.engine.cuda.weights import build_weights, random_codes, random_tensor

pytestmark = needs_hopper
SPEC = replace(
    family("llama"),
    architecture="gpt_oss",
    name="gpt-oss",
    hidden=2880,
    layers=3,
    heads=64,
    kv_heads=8,
    head_dim=64,
    tied=False,
    qkv_bias=True,
    o_bias=True,
    sinks=True,
    window=128,
    windowed=frozenset({0, 2}),
    experts=ExpertsSpec(32, 4, 2880, router_bias=True, bias=True, limit=7.0),
)
Loaded = tuple[CudaEngine, dict[str, Tensor]]


@pytest.fixture(scope="module")
def model() -> Iterator[Loaded]:
    generator = torch.Generator(device=DEVICE).manual_seed(5)
    given: dict[str, Tensor | Codes] = {}
    for name, shape in tensor_shapes(SPEC).items():
        if len(shape) == 2 and not name.endswith("mlp.gate.weight"):
            given[name] = random_codes(shape, generator, floats=".experts." in name)
        else:
            given[name] = random_tensor(name, shape, generator)
    truth = {name: each.weights() if isinstance(each, Codes) else each for name, each in given.items()}
    plan = Plan(SPEC, "stored", blocks(), stored=typical_formats(SPEC))
    weights = build_weights(plan, lambda name, _: given[name], DEVICE)
    with CudaEngine(weights, GpuLauncher(plan, DEVICE), 16_384) as engine:
        yield engine, truth


@pytest.mark.parametrize("length", [1, 16, 120, 300])
def test_logits_are_nearer_the_stored_weights_than_plain_bf16(model: Loaded, length: int) -> None:
    engine, truth = model
    prompt = text(length)
    exact = forward(SPEC, truth.__getitem__, prompt, torch.float64)[-1]
    rounded = forward(SPEC, truth.__getitem__, prompt, torch.bfloat16)[-1].double()
    assert (last_logits(engine, prompt) - exact).norm() <= (rounded - exact).norm()


def test_rows_alone_equal_rows_together(model: Loaded) -> None:
    assert_rows_alone_equal_rows_together(model[0], text(200))


def test_far_keys_outside_a_window(model: Loaded) -> None:
    engine, truth = model
    prompt = text(2300)
    exact = forward(SPEC, truth.__getitem__, prompt, torch.float32)[-1]
    assert (last_logits(engine, prompt) - exact).norm() / exact.norm() < 0.02


def test_matrices_are_widened_to_the_kernels_own_numbers(model: Loaded) -> None:
    weights = model[0]._prefill._weights
    assert weights.unpacker is not None
    at = 0
    for name, matrix in weights.plan.layer(0).items():
        packed, rows = weights.layers[at : at + matrix.bytes], weights._rows[name]
        slow = unpack(packed, weights._places[name], matrix, rows)
        assert torch.equal(weights.unpacker.unpack(name, packed, matrix, rows, None), slow), name
        at += matrix.bytes


@pytest.mark.parametrize("length", [1000, 2500])
def test_a_step_taken_again_has_the_same_bits(model: Loaded, length: int) -> None:
    assert_steps_repeat(model[0], length)

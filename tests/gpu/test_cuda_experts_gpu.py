"""Mixtures of experts in the shape of Qwen3-Coder-30B-A3B on a GPU: against float64 of the stored weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from gpu_models import (
    DEVICE,
    PROBE,
    assert_rows_alone_equal_rows_together,
    assert_steps_repeat,
    blocks,
    family,
    last_logits,
    needs_hopper,
    text,
)
from torch import Tensor

from keystroke.engine.base import StepRequest
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
    family("qwen3"),
    architecture="qwen3_moe",
    name="mixture",
    hidden=2048,
    layers=3,
    heads=32,
    kv_heads=4,
    tied=False,
    experts=ExpertsSpec(count=128, top=8, width=768),
)
Loaded = tuple[CudaEngine, dict[str, Tensor]]


def given_and_truth() -> tuple[dict[str, Tensor | Codes], dict[str, Tensor]]:
    generator = torch.Generator(device=DEVICE).manual_seed(5)
    given: dict[str, Tensor | Codes] = {}
    for name, shape in tensor_shapes(SPEC).items():
        stored = len(shape) == 2 and not name.endswith("mlp.gate.weight")
        given[name] = random_codes(shape, generator) if stored else random_tensor(name, shape, generator)  # type: ignore[arg-type]
    truth = {name: each.weights() if isinstance(each, Codes) else each for name, each in given.items()}
    return given, truth


@pytest.fixture(scope="module", params=[False, True], ids=["usual", "compact"])
def model(request: pytest.FixtureRequest) -> Iterator[Loaded]:
    given, truth = given_and_truth()
    usual = typical_formats(SPEC)
    plan = Plan(SPEC, "stored", blocks(), stored=usual.compacted() if request.param else usual)
    weights = build_weights(plan, lambda name, _: given[name], DEVICE)
    with CudaEngine(weights, GpuLauncher(plan, DEVICE), 16_384) as engine:
        yield engine, truth


def test_both_packings_of_q4_k_have_the_same_bits() -> None:
    given, _ = given_and_truth()
    usual, prompt, found = typical_formats(SPEC), text(1100), []
    for formats in (usual, usual.compacted()):
        plan = Plan(SPEC, "stored", blocks(), stored=formats)
        weights = build_weights(plan, lambda name, _: given[name], DEVICE)
        with CudaEngine(weights, GpuLauncher(plan, DEVICE), 16_384) as engine, engine.session() as session:
            for rows in (1, 16):
                session.extend(prompt[:-rows])
                session.step(sampling=PROBE)
                session.extend(prompt)
                session.step(sampling=PROBE)
                found.append(engine._stepper.logits[:rows].clone())
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


def test_logits_are_nearer_the_stored_weights_than_plain_bf16(model: Loaded) -> None:
    engine, truth = model
    for length in (1, 16, 120):
        prompt = text(length)
        exact = forward(SPEC, truth.__getitem__, prompt, torch.float64)[-1]
        rounded = forward(SPEC, truth.__getitem__, prompt, torch.bfloat16)[-1].double()
        assert (last_logits(engine, prompt) - exact).norm() <= (rounded - exact).norm()


def test_rows_alone_equal_rows_together(model: Loaded) -> None:
    assert_rows_alone_equal_rows_together(model[0], text(200))


def test_sessions_together_give_what_each_gives_alone(model: Loaded) -> None:
    engine, prompts = model[0], [text(40 + 3 * i)[i:] for i in range(16)]
    alone = []
    for prompt in prompts:
        with engine.session() as session:
            session.extend(prompt)
            alone.append([session.step(sampling=PROBE).tokens[0] for _ in range(4)])
    sessions = [engine.session() for _ in prompts]
    for session, prompt in zip(sessions, prompts, strict=True):
        session.extend(prompt)
    requests = [StepRequest(session, sampling=PROBE) for session in sessions]
    steps = [engine.step_many(requests) for _ in range(4)]
    assert [[step[i].tokens[0] for step in steps] for i in range(len(prompts))] == alone
    for session in sessions:
        session.close()


def test_matrices_are_widened_to_the_kernels_own_numbers(model: Loaded) -> None:
    weights = model[0]._prefill._weights
    assert weights.unpacker is not None
    for layer in range(2):
        at = weights.plan.layer_offsets[layer]
        for name, matrix in weights.plan.layer(layer).items():
            packed, rows = weights.layers[at : at + matrix.bytes], weights._rows[name]
            slow = unpack(packed, weights._places[name], matrix, rows)
            assert torch.equal(weights.unpacker.unpack(name, packed, matrix, rows, None), slow), name
            at += matrix.bytes


@pytest.mark.parametrize("length", [1000, 2500])
def test_a_step_taken_again_has_the_same_bits(model: Loaded, length: int) -> None:
    assert_steps_repeat(model[0], length)

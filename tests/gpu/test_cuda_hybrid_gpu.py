"""Layers of Qwen3.6-35B-A3B's and 27B's shape on a GPU: against float64 of the stored weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from bench.cuda_rows.cuda_parts import PUBLISHED_35B
from gpu_models import DEVICE, assert_steps_repeat, blocks, family, last_logits, needs_hopper, text
from torch import Tensor

from keystroke.engine.base import StepRequest
from keystroke.engine.checkpoint.spec import DeltaSpec, ExpertsSpec, tensor_shapes
from keystroke.engine.cuda.driver import GpuLauncher
from keystroke.engine.cuda.engine import CudaEngine
from keystroke.engine.cuda.plan import Plan
from keystroke.engine.cuda.reference import forward
from keystroke.engine.cuda.stored import Codes, typical_formats
from keystroke.engine.cuda.weights import build_weights, random_codes, random_tensor

pytestmark = needs_hopper
DENSE = replace(
    family("qwen3"),
    architecture="qwen3_5",
    name="27B's layers",
    hidden=5120,
    layers=4,
    heads=24,
    kv_heads=4,
    head_dim=256,
    rotary=64,
    intermediate=17_408,
    tied=False,
    gated_attention=True,
    delta=DeltaSpec(frozenset({0, 1, 2}), 16, 48, 128, 128, 4),
)
MIXTURE = replace(
    DENSE,
    architecture="qwen3_5_moe",
    name="35B-A3B's layers",
    hidden=2048,
    heads=16,
    kv_heads=2,
    experts=ExpertsSpec(256, 8, 512, shared=512, shared_gate=True),
    delta=DeltaSpec(frozenset({0, 1, 2}), 16, 32, 128, 128, 4),
)
Loaded = tuple[CudaEngine, dict[str, Tensor]]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((DENSE, typical_formats(DENSE)), id="dense"),
        pytest.param((MIXTURE, typical_formats(MIXTURE)), id="mixture"),
        pytest.param((MIXTURE, PUBLISHED_35B), id="published mixture"),
    ],
)
def model(request: pytest.FixtureRequest) -> Iterator[Loaded]:
    spec, formats = request.param
    generator = torch.Generator(device=DEVICE).manual_seed(5)
    given: dict[str, Tensor | Codes] = {}
    for name, shape in tensor_shapes(spec).items():
        stored = len(shape) == 2 and shape[1] % 64 == 0 and not name.endswith("gate.weight")
        given[name] = (
            random_codes((shape[0], shape[1]), generator) if stored else random_tensor(name, shape, generator)
        )
    truth = {name: each.weights() if isinstance(each, Codes) else each for name, each in given.items()}
    plan = Plan(spec, "stored", blocks(), stored=formats)
    weights = build_weights(plan, lambda name, _: given[name], DEVICE)
    with CudaEngine(weights, GpuLauncher(plan, DEVICE), 16_384) as engine:
        yield engine, truth


@pytest.mark.parametrize("length", [1, 5, 120, 300])
def test_logits_are_nearer_the_stored_weights_than_plain_bf16(model: Loaded, length: int) -> None:
    engine, truth = model
    prompt = text(length)
    exact = forward(engine.spec, truth.__getitem__, prompt, torch.float64)[-1]
    rounded = forward(engine.spec, truth.__getitem__, prompt, torch.bfloat16)[-1].double()
    assert (last_logits(engine, prompt) - exact).norm() <= (rounded - exact).norm()


def test_drafts_rollbacks_and_other_sessions_change_no_token(model: Loaded) -> None:
    engine, _ = model
    prompts = [text(200), text(90), text(5)]
    alone = []
    for prompt in prompts:
        with engine.session() as session:
            session.extend(prompt)
            alone.append([token for _ in range(12) for token in session.step().tokens])
    with engine.session() as session:
        session.extend(prompts[0])
        found = list(session.step([*alone[0][:2], 0]).tokens)
        fork = session.fork()
        while len(found) < 12:
            found += session.step([0, 1]).tokens
        assert found[:12] == alone[0]
        assert [token for _ in range(4) for token in fork.step().tokens] == alone[0][3:7]
        session.rollback(len(prompts[0]))
        fork.close()
    sessions = [engine.session() for _ in prompts]
    for session, prompt in zip(sessions, prompts, strict=True):
        session.extend(prompt)
    steps = [engine.step_many([StepRequest(session) for session in sessions]) for _ in range(12)]
    assert [[step[i].tokens[0] for step in steps] for i in range(3)] == alone
    for session in sessions:
        session.close()


@pytest.mark.parametrize("length", [1000, 2500])
def test_a_step_taken_again_has_the_same_bits(model: Loaded, length: int) -> None:
    assert_steps_repeat(model[0], length)

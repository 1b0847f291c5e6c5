"""Experts in host memory on a GPU: against float64 of the stored weights, with drafts and company."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from gpu_models import (
    DEVICE,
    PROBE,
    assert_rows_alone_equal_rows_together,
    blocks,
    family,
    last_logits,
    needs_hopper,
    text,
)
from torch import Tensor

from keystroke.config import load_settings
from keystroke.engine.base import StepRequest
from keystroke.engine.checkpoint.spec import ExpertsSpec, tensor_shapes
from keystroke.engine.cuda import reference
from keystroke.engine.cuda.driver import GpuLauncher
from keystroke.engine.cuda.engine import CudaEngine
from keystroke.engine.cuda.plan import PAGE, Plan
from keystroke.engine.cuda.reference import choose_experts
from keystroke.engine.cuda.stored import Codes, read_codes, typical_formats
from keystroke.engine.cuda.weights import HostExperts, build_weights, random_tensor
from keystroke.engine.host_experts import ExpertLayer, ExpertStore, ExpertTable
from keystroke.engine.onnx.native import operators_library

sys.path.insert(0, str(Path(__file__).parents[1] / "engine" / "checkpoint"))
from stored_models import random_blocks

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
    experts=ExpertsSpec(count=32, top=8, width=768),
)
PLACEMENTS = {"none on the GPU": 0, "some on the GPU": 11}


def kind_of(name: str) -> str:
    """As `typical_formats` expects."""
    layer = int(name.split(".")[2]) if name.startswith("model.layers.") else -1
    wide = layer % 2 == 0 and (".v_proj." in name or ".down_proj." in name)
    return "Q6_K" if name == "lm_head.weight" or wide else "Q4_K"


@cache
def given() -> tuple[dict[str, Tensor | Codes], dict[str, Tensor], ExpertStore]:
    generator = torch.Generator(device=DEVICE).manual_seed(5)
    found: dict[str, Tensor | Codes] = {}
    tables: dict[str, ExpertTable] = {}
    for seed, (name, shape) in enumerate(tensor_shapes(SPEC).items()):
        if len(shape) != 2 or name.endswith("mlp.gate.weight"):
            found[name] = random_tensor(name, shape, generator)
            continue
        kind = kind_of(name)
        stored = random_blocks(kind, shape[0], shape[1], deviation=shape[1] ** -0.5, seed=seed)
        found[name] = read_codes(torch.from_numpy(stored).to(DEVICE), kind)
        if ".experts." in name:
            tables[name] = ExpertTable(stored, kind)
    library = operators_library(load_settings().paths.cache)
    if library is None:
        pytest.skip("needs a C compiler")

    def layer(index: int) -> ExpertLayer:
        at = f"model.layers.{index}.mlp.experts"
        gate, up, down = (tables[f"{at}.{each}_proj.weight"] for each in ("gate", "up", "down"))
        return ExpertLayer(gate, up, down)

    truth = {name: each.weights() if isinstance(each, Codes) else each for name, each in found.items()}
    return found, truth, ExpertStore(library, tuple(map(layer, range(SPEC.layers))))


@pytest.fixture(scope="module", params=list(PLACEMENTS.values()), ids=list(PLACEMENTS))
def engine(request: pytest.FixtureRequest) -> Iterator[CudaEngine]:
    resident: int = request.param
    tensors, _, store = given()
    held = [[(5 * i + layer) % 32 for i in range(resident)] for layer in range(SPEC.layers)]
    plan = Plan(SPEC, "stored", blocks(), stored=typical_formats(SPEC), resident=resident)
    weights = build_weights(plan, lambda name, _: tensors[name], DEVICE, HostExperts(store, held))
    with CudaEngine(weights, GpuLauncher(plan, DEVICE), 16_384) as made:
        yield made


def test_logits_are_near_those_of_the_stored_weights(
    engine: CudaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts whose last token chooses its experts clearly: where two scores are nearly the same, rounding
    decides which expert is used, and the logits differ by that expert."""
    gaps: list[float] = []

    def recorded(experts: ExpertsSpec, scores: Tensor) -> tuple[Tensor, Tensor]:
        best = scores[-1].sort(descending=True).values
        gaps.append(float(best[experts.top - 1] - best[experts.top]))
        return choose_experts(experts, scores)

    monkeypatch.setattr(reference, "choose_experts", recorded)
    for length in (1, 16):  # computed in steps
        clearest, exact, prompt = 0.0, None, text(length)
        for seed in range(8):
            gaps.clear()
            tokens = text(length, seed)
            logits = reference.forward(SPEC, given()[1].__getitem__, tokens, torch.float64)[-1]
            if min(gaps) > clearest:
                clearest, exact, prompt = min(gaps), logits, tokens
        assert exact is not None
        found = last_logits(engine, prompt)
        assert (found - exact).norm() / exact.norm() < 0.02, (length, clearest)


def test_a_prompt_read_at_once_has_the_values_of_the_stored_weights(
    engine: CudaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the second layer, which depend on a token's own experts in the first. The median of tokens: in
    some of them rounding decides between two experts of nearly the same score."""
    prompt, kept = text(120), []

    def keep(_: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        kept.append(values)
        return keys, values

    reference.forward(SPEC, given()[1].__getitem__, prompt, torch.float64, keep)
    monkeypatch.setattr(engine, "steps_up_to", 0)
    with engine.session(scope="read at once") as session:
        session.extend(prompt)
        session.step(sampling=PROBE)
        pages = list(session._table.pages)
    stored = engine._values.view(SPEC.layers, -1, SPEC.kv_heads, SPEC.head_dim, PAGE)[1, pages]
    found = stored.permute(0, 3, 1, 2).flatten(0, 1)[:100].double().flatten(1)
    truth = kept[1][:100].flatten(1)
    errors = (found - truth).norm(dim=1) / truth.norm(dim=1)
    assert float(errors.median()) < 0.02, errors.sort().values


def test_prompts_are_read_with_the_experts_of_the_file(engine: CudaEngine) -> None:
    weights, experts = engine._prefill._weights, SPEC.experts
    assert weights.host is not None
    assert experts is not None
    for layer in range(SPEC.layers):
        dense, at = weights.dense(layer), f"model.layers.{layer}.mlp.experts"
        gate, up = dense.gate_up.chunk(2)
        for name, found in (("gate", gate), ("up", up), ("down", dense.down)):
            truth = given()[1][f"{at}.{name}_proj.weight"].view(experts.count, -1)
            each, absent = found.view(experts.count, -1), weights.host.absent(layer, experts)
            assert torch.equal(each[absent], truth[absent].to(torch.bfloat16))
            assert (each.float() - truth).norm() / truth.norm() < 0.004


def test_rows_alone_equal_rows_together(engine: CudaEngine) -> None:
    assert_rows_alone_equal_rows_together(engine, text(200))


def test_drafts_change_no_token(engine: CudaEngine) -> None:
    prompt = text(50)
    with engine.session() as session:
        session.extend(prompt)
        plain = [session.step().tokens[0] for _ in range(24)]  # runs ahead
        session.rollback(len(prompt))
        drafted: list[int] = []
        while len(drafted) < 24:
            at = len(drafted)
            drafted += session.step([*plain[at : at + 2], 0]).tokens
    assert drafted[:24] == plain


def test_sessions_together_give_what_each_gives_alone(engine: CudaEngine) -> None:
    prompts = [text(20 + 3 * i)[i:] for i in range(8)]
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


def test_cancelled_steps_leave_the_host_ready(engine: CudaEngine) -> None:
    prompt = text(30)
    with engine.session() as session:
        session.extend(prompt)
        for _ in range(5):
            session.step()  # the last of them launched another
        session.rollback(len(prompt))
        first = session.step(sampling=PROBE).tokens
        session.rollback(len(prompt))
        assert session.step(sampling=PROBE).tokens == first

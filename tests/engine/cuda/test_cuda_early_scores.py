"""Scores of experts before attention's output is in the residual stream, on the emulator and as plain
matrices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cuda_emulator import EmulatedLauncher
from cuda_models import CPU, dense_tensors, tiny_engine, tiny_spec, tiny_weights
from test_cuda_experts import PROMPT, last_logits, mixture
from test_cuda_hybrid import hybrid
from test_cuda_sparse import chooses_all_and_equals_dense

from keystroke.engine.base import StepRequest
from keystroke.engine.checkpoint.spec import DeltaSpec, ExpertsSpec, ModelSpec
from keystroke.engine.cuda.early_router import EarlyRouter
from keystroke.engine.cuda.engine import CudaEngine
from keystroke.engine.cuda.plan import KvPrecision, Plan
from keystroke.engine.cuda.reference import forward

BLOCKS = 12  # so many that one warp of each has at most one group of scores
SHARED = ExpertsSpec(32, 4, 64, shared=64, shared_gate=True)
MODELS = {
    "mixture": mixture(3),
    "two parts": mixture(3, heads=8),
    "shared expert": hybrid(
        layers=3, experts=SHARED, delta=DeltaSpec(frozenset({0, 2}), 2, 4, 32, 64, 4, tiled=True)
    ),
}


def early_engine(spec: ModelSpec, blocks: int = BLOCKS) -> CudaEngine:
    weights = tiny_weights(spec, "int8", blocks=blocks)
    assert weights.plan.early_scores is not None
    return CudaEngine(weights, EmulatedLauncher(weights.plan), 1024)


def matrix(blocks: torch.Tensor, scale: torch.Tensor, rows: int) -> torch.Tensor:
    """[rows, columns] of one layer's blocks [parts, groups, pieces, 8, 32]."""
    return blocks.permute(1, 3, 0, 2, 4).flatten(0, 1).flatten(1)[:rows].double() * scale[:rows, None]


def test_the_two_matrices_give_the_routers_scores() -> None:
    plan = Plan(mixture(), "int8", BLOCKS)
    spec, early = plan.spec, EarlyRouter.empty(plan, CPU)
    width = spec.heads * spec.head_dim
    router, norm = torch.randn(32, spec.hidden) * 0.1, torch.randn(spec.hidden) * 0.1 + 1
    output, row, given = torch.randn(spec.hidden, width) * 0.1, torch.randn(spec.hidden), torch.randn(width)
    early.put(1, router, norm, output)
    before, behind = (
        matrix(blocks[1], early.scales[1, i], 32) for i, blocks in enumerate((early.before, early.behind))
    )
    wanted = (router * norm).double() @ (row.double() + output.double() @ given.double())
    found = before @ row.double() + behind @ given.double()
    assert (found - wanted).norm() / wanted.norm() < 2**-10
    assert not early.before[0].any()


@pytest.mark.parametrize(
    ("name", "blocks", "warps"),
    [*((name, BLOCKS, 1) for name in MODELS), ("two parts", 4, 2), ("shared expert", 2, 3)],
)
def test_logits_are_those_of_the_textbook_alone_and_in_company(name: str, blocks: int, warps: int) -> None:
    """Where scores nearly tie, rounding may choose another expert: the wanted logits are those of the nearest
    of three prompts."""
    spec = MODELS[name]
    with early_engine(spec, blocks) as engine:
        assert engine._stepper.plan.early_scores is not None
        assert engine._stepper.plan.early_scores.warps == warps
        tensors = dense_tensors(engine._prefill._weights)
        errors = []
        for first in range(3):
            prompt = [first, *PROMPT[1:]][: 6 if spec.delta else 9]  # a step of a hybrid has at most 8 rows
            alone, *others = (last_logits(engine, prompt, rows) for rows in (1, 2, 5, len(prompt)))
            assert all(torch.equal(alone, each) for each in others)
            wanted = forward(spec, tensors.__getitem__, prompt, torch.float64)[-1]
            errors.append(float((alone - wanted).norm() / wanted.norm()))
    assert sorted(errors)[1] < 0.02, errors


def test_drafts_and_other_sessions_change_no_token() -> None:
    with early_engine(MODELS["two parts"]) as engine:
        prompts = [[5, 6, 7], [8, 9, 10, 11], [12]]
        alone = []
        for prompt in prompts:
            with engine.session() as session:
                session.extend(prompt)
                alone.append([token for _ in range(4) for token in session.step().tokens])
        with engine.session() as session:
            session.extend(prompts[0])
            assert list(session.step([*alone[0][:3], 0]).tokens) == alone[0][:4]
        sessions = [engine.session() for _ in prompts]
        for session, prompt in zip(sessions, prompts, strict=True):
            session.extend(prompt)
        steps = [engine.step_many([StepRequest(session) for session in sessions]) for _ in range(4)]
        assert [[step[i].tokens[0] for step in steps] for i in range(3)] == alone


@pytest.mark.slow
@pytest.mark.parametrize("kv_precision", ["bf16", "int8"])
def test_attention_to_every_chunk_gives_the_logits_of_the_whole(kv_precision: KvPrecision) -> None:
    spec = replace(MODELS["mixture"], context_length=3200)
    engine = tiny_engine(
        spec, "int8", blocks=BLOCKS, kv_tokens=6400, sparse="always", kv_precision=kv_precision
    )
    assert engine._stepper.plan.early_scores is not None
    engine.sparse_from, engine.sparse_budget = 512, 64
    chooses_all_and_equals_dense(engine)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "blocks"), [(1, BLOCKS), (3, BLOCKS), (9, BLOCKS), (1, 8), (3, 8)])
def test_warps_that_are_held_back_change_nothing(rows: int, blocks: int) -> None:
    spec = replace(MODELS["two parts"], layers=6)
    with early_engine(spec, blocks) as engine:
        launcher = engine._stepper._launcher
        assert isinstance(launcher, EmulatedLauncher)
        calm = last_logits(engine, PROMPT, rows)
        launcher.single, launcher.stalls = rows == 1, 25
        held_back = [last_logits(engine, PROMPT, rows) for _ in range(3)]
    assert all(torch.equal(calm, each) for each in held_back)


@pytest.mark.parametrize(
    ("spec", "blocks", "resident"),
    [
        pytest.param(tiny_spec("qwen3"), BLOCKS, None, id="no experts"),
        pytest.param(mixture(), 1, None, id="too many groups of scores for a block"),
        pytest.param(mixture(), BLOCKS, 8, id="experts on the host"),
        pytest.param(
            mixture(experts=ExpertsSpec(32, 4, 64, router_bias=True)), BLOCKS, None, id="router with biases"
        ),
    ],
)
def test_other_models_are_scored_by_their_routers(spec: ModelSpec, blocks: int, resident: int | None) -> None:
    plan = Plan(spec, "int8", blocks, resident=resident)
    assert plan.early_scores is None
    assert plan.early_bytes == 0
    assert "EARLY" not in plan.macros(1)


def test_sixteen_bits_are_scored_by_their_routers() -> None:
    with tiny_engine(mixture(), blocks=BLOCKS) as engine:
        assert engine._stepper.plan.early_scores is None

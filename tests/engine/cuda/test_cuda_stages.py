"""Stages of the ring and shares of warps: a matter of speed and never of results."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cuda_models import dense_tensors, tiny_engine, tiny_spec

from keystroke.engine.base import Sampling
from keystroke.engine.checkpoint.spec import ModelSpec
from keystroke.engine.cuda.plan import (
    BLOCK_BYTES,
    MIN_STAGES,
    TAIL_BYTES,
    WARPS,
    KvPrecision,
    Plan,
    Precision,
)
from keystroke.engine.cuda.reference import forward


def test_four_bits_give_the_same_row_from_stages_of_any_size() -> None:
    # As wide as a model of seven billion: a stage holds a whole unit for few rows, a part of one for many.
    spec = replace(tiny_spec("llama", layers=2, tied=False), hidden=3584, vocab_size=72)
    plan = Plan(spec, "int4", 2)
    assert plan.stage_bytes(1) >= plan.gate_up.unit_bytes > plan.stage_bytes(2)
    same_row_alone_and_in_company(spec, "int4")


def test_many_rows_give_the_same_row_from_smaller_stages() -> None:
    # Three turns of every warp to a stage for few rows, two for many.
    spec = replace(tiny_spec("llama", layers=2, tied=False), hidden=1536, vocab_size=72)
    plan = Plan(spec, "bf16", 2)
    assert [(plan.stage_bytes(tiles) - TAIL_BYTES) / BLOCK_BYTES[0] / WARPS for tiles in (1, 2)] == [3, 2]
    same_row_alone_and_in_company(spec, "bf16")


@pytest.mark.parametrize("kv_precision", ["bf16", "int8"])
def test_pages_side_by_side_come_through_the_smallest_ring(
    kv_precision: KvPrecision, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two pages of sixteen bits take four stages: one serves both halves of the warps, one after the other.
    spec, prompt = tiny_spec("qwen3"), [(11 * i * i + 3 * i) % 203 for i in range(590)]
    bucket, found = Plan._bucket, []
    for _ in range(2):
        with tiny_engine(spec, kv_precision=kv_precision) as engine, engine.session() as session:
            session.extend(prompt)
            session.step(sampling=Sampling(logprobs=0))
            found.append((engine._stepper.plan.bucket(1).stages, engine._stepper.logits[0].clone()))
        monkeypatch.setattr(Plan, "_bucket", lambda plan, n: replace(bucket(plan, n), stages=MIN_STAGES))
    (large, plain), (small, narrow) = found
    assert large > small == MIN_STAGES
    assert torch.equal(plain, narrow)


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_units_of_a_warp_give_the_same_row(precision: Precision) -> None:
    # The O projection's units are narrow and many, so each warp multiplies whole ones.
    spec = replace(tiny_spec("qwen2", layers=2), hidden=256, intermediate=320, vocab_size=72)
    plan = Plan(spec, precision, 2)
    assert plan.macros(1)["O_ALONE"] == "1"
    same_row_alone_and_in_company(spec, precision)


def same_row_alone_and_in_company(spec: ModelSpec, precision: Precision) -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    probe = Sampling(logprobs=0)  # chosen on the host: nothing runs ahead
    with tiny_engine(spec, precision) as engine:
        with engine.session() as session:
            session.extend(prompt)
            session.step(sampling=probe)
            together = engine._stepper.logits[8].clone()
        with engine.session() as session:
            session.extend(prompt[:8])
            session.step(sampling=probe)
            session.extend(prompt)
            session.step(sampling=probe)
            alone = engine._stepper.logits[0].clone()
        tensors = dense_tensors(engine._prefill._weights)
    assert torch.equal(alone, together)
    truth = forward(spec, tensors.__getitem__, prompt)[-1]
    assert (alone - truth).norm() / truth.norm() < 0.02

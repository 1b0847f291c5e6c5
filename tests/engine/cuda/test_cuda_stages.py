"""Stages of the ring: their size is a matter of speed and never of results."""

from __future__ import annotations

from dataclasses import replace

import torch
from cuda_models import dense_tensors, tiny_engine, tiny_spec

from keystroke.engine.base import Sampling
from keystroke.engine.cuda.reference import forward


def test_four_bits_give_the_same_row_from_stages_of_any_size() -> None:
    # As wide as a model of seven billion: a stage holds a whole unit for few rows, a part of one for many.
    spec = replace(tiny_spec("llama", layers=2, tied=False), hidden=3584, vocab_size=72)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    probe = Sampling(logprobs=0)  # chosen on the host: nothing runs ahead
    with tiny_engine(spec, "int4") as engine:
        plan = engine._stepper.plan
        assert plan.stage_bytes(1) >= plan.gate_up.unit_bytes > plan.stage_bytes(2)
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

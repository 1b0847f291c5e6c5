"""Hopper run as an older GPU: copies by lanes, less shared memory, code that the driver finishes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpu_models import (
    DEVICE,
    FAMILIES,
    LONG,
    QUANTISED,
    WIDE,
    assert_rows_alone_equal_rows_together,
    engine_of,
    family,
    last_logits,
    needs_hopper,
    plain,
    tensors_of,
    text,
)

from keystroke.engine.base import Sampling, StepRequest
from keystroke.engine.cuda.gpu import gpu_target
from keystroke.engine.cuda.plan import Precision
from keystroke.engine.cuda.reference import forward
from keystroke.engine.cuda.target import AMPERE, HOPPER

pytestmark = needs_hopper
BY_LANES = replace(AMPERE, shared_bytes=HOPPER.shared_bytes, portable=True)
KINDS = ("sm_80", "sm_86", "sm_89")


@pytest.mark.parametrize("length", [1, 16, 50, 300, 2500])
@pytest.mark.parametrize("name", FAMILIES)
def test_copies_by_lanes_give_the_bits_of_bulk_copies(name: str, length: int) -> None:
    spec, prompt = family(name), text(length)
    tensors, found = tensors_of(spec), []
    for target in (HOPPER, BY_LANES):
        with engine_of(spec, tensors, target=target) as engine:
            found.append(last_logits(engine, prompt))
    assert torch.equal(*found)


@pytest.mark.parametrize("precision", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_older_kind_is_nearer_the_truth_than_plain_bf16(kind: str, precision: Precision) -> None:
    spec = WIDE if precision == "bf16" else QUANTISED
    tensors, prompt = tensors_of(spec), text(700)
    with engine_of(spec, tensors, precision) as engine:
        native = last_logits(engine, prompt)
    with engine_of(spec, tensors, precision, target=gpu_target(DEVICE, kind)) as engine:
        logits = last_logits(engine, prompt)
    assert (logits - native).norm() / native.norm() < 0.01
    if precision == "bf16":
        truth = forward(spec, tensors.__getitem__, prompt, torch.float64)[-1]
        rounded = forward(spec, tensors.__getitem__, prompt, torch.bfloat16)[-1].double()
        assert (logits - truth).norm() <= (rounded - truth).norm()


@pytest.mark.parametrize("kind", KINDS)
def test_an_older_kind_says_the_same_with_drafts_and_in_company(kind: str) -> None:
    with engine_of(WIDE, target=gpu_target(DEVICE, kind)) as engine:
        for sampling in (Sampling(), Sampling(temperature=0.8, seed=5, top_p=0.9)):
            prompt = text(321, 10)
            expected = plain(engine, prompt, 32, sampling)
            with engine.session() as session:
                session.extend(prompt)
                said: list[int] = []
                most = engine._stepper.plan.max_rows - 1
                while len(said) < 32:
                    said += session.step(expected[len(said) :][:most], sampling=sampling).tokens
                assert said[:32] == expected
        sessions = [engine.session() for _ in range(16)]
        for i, session in enumerate(sessions):
            session.extend([i, *text(100)])
        together = engine.step_many([StepRequest(session) for session in sessions])
        for session in sessions:
            session.close()
        assert [step.tokens[0] for step in together] == [
            plain(engine, [i, *text(100)], 1)[0] for i in range(16)
        ]


def test_rows_alone_equal_rows_together_on_an_older_kind() -> None:
    with engine_of(WIDE, target=gpu_target(DEVICE, "sm_80")) as engine:
        assert_rows_alone_equal_rows_together(engine, text(700))


def test_sparse_attention_by_lanes_gives_the_bits_of_bulk_copies() -> None:
    tensors, found = tensors_of(LONG), []
    for target in (HOPPER, BY_LANES):
        with engine_of(LONG, tensors, sparse="always", target=target) as engine:
            found.append(last_logits(engine, text(20_000)))
            assert engine.sparse_steps
    assert torch.equal(*found)

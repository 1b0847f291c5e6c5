"""Features of the CUDA engine on a real GPU: sparse attention, filtered draws, a model that drafts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from gpu_models import (
    DRAFTING,
    LONG,
    PROBE,
    WIDE,
    assert_rows_alone_equal_rows_together,
    engine_of,
    needs_hopper,
    text,
)

from keystroke.engine.base import Sampling
from keystroke.engine.cuda.engine import CudaEngine
from keystroke.engine.cuda.gpu import gpu_report
from keystroke.engine.sampler import choose
from keystroke.engine.speculative import ModelDrafter

pytestmark = needs_hopper


@pytest.fixture(scope="module")
def sparse() -> Iterator[CudaEngine]:
    with engine_of(LONG, kv_tokens=100_000, sparse="always") as engine:
        yield engine


@pytest.mark.parametrize("mode", ["dense", "sparse"])
def test_rows_at_a_long_context_are_bit_equal_alone_and_in_company(sparse: CudaEngine, mode: str) -> None:
    sparse.sparse_from = 16_384 if mode == "sparse" else 1 << 30
    assert_rows_alone_equal_rows_together(sparse, text(20_000))


def test_with_every_chunk_chosen_the_result_is_the_dense_one_bit_for_bit(sparse: CudaEngine) -> None:
    with sparse.session() as session:
        session.extend(text(9_000, 1))
        sparse.sparse_from = 1 << 30
        session.step(sampling=PROBE)
        dense = sparse._stepper.logits[0].clone()
        session.rollback(9_000)
        sparse.sparse_from, sparse.sparse_budget = 1_024, 64
        before = sparse.sparse_steps
        session.step(sampling=PROBE)
        sparse.sparse_budget = 32
        assert sparse.sparse_steps == before + 1
        assert torch.equal(dense, sparse._stepper.logits[0])


def test_random_attention_is_in_doubt_and_ends_in_the_dense_text() -> None:
    with engine_of(LONG, kv_tokens=100_000, sparse="auto") as engine, engine.session() as session:
        prompt = text(30_000, 2)
        session.extend(prompt)
        found = [session.step().tokens[0] for _ in range(6)]
        assert (engine.sparse_steps, engine.repeated_steps) == (1, 1)
        engine.sparse_from = 1 << 30
        session.rollback(30_000)
        assert [session.step().tokens[0] for _ in range(6)] == found


FILTERS = [
    {},
    {"min_p": 0.02},
    {"top_k": 40},
    {"top_p": 0.9},
    {"top_k": 20, "top_p": 0.8},
    {"temperature": 0.2, "top_k": 40},
    {"temperature": 3.0, "top_p": 0.5},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_the_device_draws_what_the_sampler_draws(sparse: CudaEngine, filters: dict[str, float]) -> None:
    with sparse.session() as session:
        session.extend(text(50, 3))
        for seed in range(16):
            sampling = Sampling(**{"temperature": 1.0, "seed": seed, **filters})  # type: ignore[arg-type]
            token = session.step(sampling=sampling).tokens[0]
            logits = sparse._stepper.logits[0].cpu().numpy()
            assert token == choose(logits, sampling, session.length - 1)


def test_a_model_on_the_same_gpu_drafts_without_changing_the_text() -> None:
    sampling = Sampling(temperature=0.7, top_p=0.9, seed=4)
    with engine_of(WIDE) as large, engine_of(DRAFTING, seed=1) as small:
        with large.session() as session:
            session.extend(text(64, 5))
            expected = [session.step(sampling=sampling).tokens[0] for _ in range(40)]
        for engine in (small, large):  # one that guesses badly, one that guesses all
            drafter = ModelDrafter(engine, large, sampling)
            with large.session() as session:
                session.extend(text(64, 5))
                seen: list[int] = []
                steps = 0
                while len(seen) < 40:
                    seen += session.step(drafter.propose(session.tokens, 7), sampling).tokens
                    steps += 1
                assert seen[:40] == expected
            drafter.close()
        assert steps <= 6


def test_the_report_names_the_gpu_and_the_room_it_has() -> None:
    suits, why = gpu_report(WIDE)
    assert suits, why
    assert "tokens of KV" in why
    suits, why = gpu_report(replace(WIDE, layers=4000))
    assert not suits
    assert "choose fewer bits" in why

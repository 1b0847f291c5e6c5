"""Sparse attention: its bounds hold, its choice is the stated one, and doubt ends in the whole context."""

from __future__ import annotations

import math
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from cuda_models import tiny_engine, tiny_spec
from hypothesis import given, settings
from torch import Tensor

from keystroke.engine.base import Sampling, StepRequest
from keystroke.engine.cuda.engine import CudaEngine
from keystroke.engine.cuda.plan import CHUNK, NEAR, PAGE, KvPrecision, Plan
from keystroke.engine.cuda.session import CudaSession
from keystroke.engine.cuda.sparse import PageBounds, Sparse

PROBE = Sampling(logprobs=0)  # chosen on the host: the step's buffers stay as it left them
LENGTH = 3000  # 32 near chunks and four far ones
TEXT = [(11 * i * i + 3 * i) % 203 for i in range(LENGTH + 8)]


def sparse_engine(
    mode: Sparse,
    *,
    budget: int = 8,
    layers: int = 1,
    start: int = 512,
    context: int = 3200,
    wide: bool = False,
    kv_precision: KvPrecision = "bf16",
) -> CudaEngine:
    spec = replace(tiny_spec(layers=layers, context=context), head_dim=128 if wide else 64)
    engine = tiny_engine(spec, kv_tokens=2 * context, sparse=mode, kv_precision=kv_precision)
    engine.sparse_from, engine.sparse_budget = start, budget
    engine._stepper.tune(in_flight=3, direct_rows=2, fused_rows=0)  # attended rows stay readable
    return engine


def chunk_spans(length: int) -> list[tuple[int, int]]:
    starts = [*range(0, min(length, NEAR), PAGE), *range(NEAR, length, CHUNK)]
    return list(zip(starts, [*starts[1:], length], strict=True))


def buffers(engine: CudaEngine, session: CudaSession) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [heads, d], keys and values [kv_heads, tokens, d] of the last layer after a step of one row."""
    spec = engine._stepper.plan.spec
    q = engine._stepper._buffers["queries"][0].view(torch.bfloat16).view(spec.heads, spec.head_dim).double()
    pages = torch.tensor(session._table.pages)
    shape = (len(pages), spec.kv_heads)
    k = engine._keys[-1, pages].view(*shape, PAGE, spec.head_dim).transpose(0, 1).flatten(1, 2)
    v = engine._values[-1, pages].view(*shape, spec.head_dim, PAGE).transpose(2, 3).transpose(0, 1)
    count = session.resident
    return q, k[:, :count].double(), v.flatten(1, 2)[:, :count].double()


def scores(engine: CudaEngine, q: Tensor, k: Tensor) -> Tensor:
    """log2 of the weight of every key for every head."""
    group = q.shape[0] // k.shape[0]
    return torch.einsum("hd,hsd->hs", q, k.repeat_interleave(group, 0)) * (
        math.log2(math.e) / math.sqrt(q.shape[1])
    )


@pytest.mark.parametrize("length", [LENGTH, 131_500])  # and 538 chunks: more than are looked at together
def test_no_chunk_weighs_more_than_its_bound_and_the_chosen_ones_are_those_with_the_best(length: int) -> None:
    with sparse_engine("always", context=length + 200) as engine, engine.session() as session:
        assert isinstance(session, CudaSession)
        if length > LENGTH:  # too much to read: keys and values are made up
            for tensor in (engine._keys, engine._values):
                tensor.normal_(generator=torch.Generator().manual_seed(1))
            engine._prefill.run = lambda *_, **_named: []  # type: ignore[method-assign]
        session.extend((TEXT * (length // LENGTH + 1))[:length])
        session.step(sampling=PROBE)
        assert engine.sparse_steps == 1
        q, k, v = buffers(engine, session)
        weights = scores(engine, q, k)
        spans = chunk_spans(session.resident)
        bounds = engine._stepper._buffers["chunk_bounds"].view(
            -1, q.shape[0], engine._stepper._parameters.partial_stride
        )[0, :, : len(spans)]
        candidates = range(1, len(spans) - 3)
        real = torch.stack([weights[:, a:b].mul(math.log(2)).logsumexp(1) / math.log(2) for a, b in spans], 1)
        assert (bounds[:, 1:-3] >= real[:, 1:-3]).all()
        attended = engine._stepper._buffers["attended"][0].view(torch.bfloat16).view(q.shape).double()
        for kv in range(k.shape[0]):
            heads = slice(kv * 2, kv * 2 + 2)
            behind = (bounds[heads, 1:-3].amax(1, keepdim=True) - bounds[heads, 1:-3]).amin(0)
            ranked = sorted(candidates, key=lambda c: (int(behind[c - 1].item() * 512), c))
            chosen = sorted([0, *ranked[:4], *range(len(spans) - 3, len(spans))])
            keys = torch.cat([torch.arange(*spans[c]) for c in chosen])
            for head in range(kv * 2, kv * 2 + 2):
                share = weights[head, keys].mul(math.log(2)).softmax(0)
                assert (share @ v[kv, keys] - attended[head]).norm() / attended[head].norm() < 0.02


@pytest.mark.parametrize("lent", [None, 2, 6])  # stages of the ring; by default as many as pay
def test_with_every_chunk_chosen_logits_equal_the_dense_ones_bit_for_bit(
    lent: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lent:
        monkeypatch.setattr(Plan, "lent_stages", lambda plan, tiles_n: lent)
    chooses_all_and_equals_dense(sparse_engine("always", budget=64, layers=2))


@pytest.mark.parametrize("lent", [None, 6])
@pytest.mark.parametrize("kv_precision", ["bf16", "int8"])
def test_blocks_that_share_a_chunk_gather_the_dense_result(
    lent: int | None, kv_precision: KvPrecision, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lent:
        monkeypatch.setattr(Plan, "lent_stages", lambda plan, tiles_n: lent)
    monkeypatch.setattr(Plan, "value_parts", lambda plan, tiles_n: 2)
    chooses_all_and_equals_dense(
        sparse_engine("always", budget=64, layers=2, wide=True, kv_precision=kv_precision)
    )


def chooses_all_and_equals_dense(engine: CudaEngine) -> None:
    with engine, engine.session() as session:
        session.extend(TEXT[:LENGTH])
        session.step(sampling=PROBE)
        assert engine.sparse_steps == 1
        sparse = engine._stepper.logits[0].clone()
        session.rollback(LENGTH)
        engine.sparse_from = 1 << 20
        session.step(sampling=PROBE)
        assert engine.sparse_steps == 1
        assert torch.equal(sparse, engine._stepper.logits[0])


def test_a_row_chooses_the_same_alone_and_in_company() -> None:
    with sparse_engine("always", layers=2) as engine, engine.session() as session:
        session.extend(TEXT[: LENGTH - 3])
        session.step(TEXT[LENGTH - 3 : LENGTH], sampling=PROBE)
        together = engine._stepper.logits[3].clone()
        session.extend(TEXT[:LENGTH])
        session.step(sampling=PROBE)
        assert torch.equal(engine._stepper.logits[0], together)


def test_a_session_that_chooses_and_one_that_reads_everything_share_a_step() -> None:
    with sparse_engine("always", layers=2, start=2000) as engine:
        texts = [TEXT[:LENGTH], TEXT[5:1705]]
        alone = []
        for text in texts:
            with engine.session() as session:
                session.extend(text)
                session.step(sampling=PROBE)
                alone.append(engine._stepper.logits[0].clone())
        assert engine.sparse_steps == 1
        with engine.session() as first, engine.session() as second:
            first.extend(texts[0])
            second.extend(texts[1])
            engine.step_many([StepRequest(first, sampling=PROBE), StepRequest(second, sampling=PROBE)])
            assert engine.sparse_steps == 2
            assert torch.equal(engine._stepper.logits[0], alone[0])
            assert torch.equal(engine._stepper.logits[1], alone[1])


def test_a_choice_that_cannot_be_shown_right_is_taken_again_with_the_whole_context() -> None:
    with sparse_engine("off") as dense, dense.session() as session:
        session.extend(TEXT[:LENGTH])
        expected = [session.step().tokens[0] for _ in range(3)]
    with sparse_engine("auto") as engine, engine.session() as session:
        session.extend(TEXT[:LENGTH])
        assert [session.step().tokens[0] for _ in range(3)] == expected
        assert (engine.sparse_steps, engine.repeated_steps) == (1, 1)  # then trusted again only later


def peaked(engine: CudaEngine, session: CudaSession, keys: list[int]) -> None:
    """Let every head attend to `keys` and to hardly anything else."""
    session.extend(TEXT[:LENGTH])
    session.step(sampling=PROBE)
    session.rollback(LENGTH)
    q = engine._stepper._buffers["queries"][0].view(torch.bfloat16).view(2, 2, 64).float()
    wish = q.mean(1)  # both heads of a group agree with their mean
    store = engine._keys.view(1, -1, 2, PAGE, 64)
    for page in session._table.pages:
        store[:, page] *= 0.01
    for key in keys:
        store[0, session._table.pages[key // PAGE], :, key % PAGE] = (wish * 30 / wish.norm()).bfloat16()
    if engine._bounds is not None:
        engine.invalidate_bounds(session._table.pages)
        session._bounded = 0


def test_peaked_attention_raises_no_doubt_and_stays_near_the_dense_result() -> None:
    with sparse_engine("auto", start=1 << 20) as engine, engine.session() as session:
        assert isinstance(session, CudaSession)
        peaked(engine, session, [1700, 2990])
        session.step(sampling=PROBE)
        dense = engine._stepper.logits[0].clone()
        session.rollback(LENGTH)
        engine.sparse_from = 512
        session.step(sampling=PROBE)
        assert (engine.sparse_steps, engine.repeated_steps) == (1, 0)
        error = (engine._stepper.logits[0] - dense).norm() / dense.norm()
        assert error < 0.02


def test_far_keys_that_may_outweigh_the_chosen_ones_raise_doubt() -> None:
    with sparse_engine("auto", start=1 << 20) as engine, engine.session() as session:
        assert isinstance(session, CudaSession)
        peaked(
            engine, session, list(range(100, 2900, 40))
        )  # one in every page: a budget of eight misses most
        session.step(sampling=PROBE)
        dense = engine._stepper.logits[0].clone()
        session.rollback(LENGTH)
        engine.sparse_from = 512
        session.step(sampling=PROBE)
        assert (engine.sparse_steps, engine.repeated_steps) == (1, 1)
        assert torch.equal(engine._stepper.logits[0], dense)


def test_followers_and_drafts_say_the_same_under_sparse_attention() -> None:
    with sparse_engine("always", layers=2) as engine:
        with engine.session() as session:
            session.extend(TEXT[:LENGTH])
            text = [session.step().tokens[0] for _ in range(6)]
        with engine.session() as session:
            session.extend(TEXT[:LENGTH])
            seen: list[int] = []
            for draft in (text[:2], [text[3], 0], []):
                seen += session.step(draft).tokens
            assert seen == text[: len(seen)]


@pytest.fixture(scope="module")
def bounded() -> CudaEngine:
    spec = replace(tiny_spec(layers=1, context=1024), intermediate=64)
    return tiny_engine(spec, kv_tokens=1 << 14, sparse="always")


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["extend", "rollback", "fork", "read"]), st.integers(0, 640), st.integers(0, 3)
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=25, deadline=None)
@given(OPERATIONS)
def test_bounds_follow_pages_through_extend_rollback_and_fork(
    bounded: CudaEngine, operations: list[tuple[str, int, int]]
) -> None:
    bounds = bounded._bounds
    assert isinstance(bounds, PageBounds)
    sessions = [bounded.session()]
    try:
        for kind, length, which in operations:
            session = sessions[which % len(sessions)]
            assert isinstance(session, CudaSession)
            if kind == "extend":
                session.extend([(length * i + which) % 203 for i in range(length)])
            elif kind == "rollback":
                session.rollback(min(length, session.length))
            elif kind == "fork" and len(sessions) < 4:
                other = session.fork()
                assert isinstance(other, CudaSession)
                sessions.append(other)
            elif kind == "read":
                bounds.update(session.take_unbounded_pages())
        for session in sessions:
            bounds.update(session.take_unbounded_pages())
            whole = torch.tensor(session._table.pages[: session.resident // PAGE], dtype=torch.long)
            keys = bounds._keys[:, whole]
            assert torch.equal(bounds.tensor[:, whole, :, 0], keys.amax(3))
            assert torch.equal(bounds.tensor[:, whole, :, 1], keys.amin(3))
    finally:
        for session in sessions:
            session.close()

"""Keys and values in bytes: the numbers stored are those stated, and nothing else changes."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from cuda_models import FAMILIES, dense_tensors, tiny_engine, tiny_spec, tiny_tensors, tiny_weights
from hypothesis import given, settings
from torch import Tensor

from keystroke.engine.base import Sampling
from keystroke.engine.checkpoint import open_checkpoint
from keystroke.engine.cuda.engine import CudaEngine
from keystroke.engine.cuda.plan import PAGE, KvPrecision, Plan, Precision
from keystroke.engine.cuda.quantisation import from_bytes, to_bytes
from keystroke.engine.cuda.reference import KvTransform, forward
from keystroke.engine.cuda.scales import measure_steps
from keystroke.engine.cuda.session import CudaSession
from keystroke.engine.cuda.weights import KvSteps, build_weights
from keystroke.engine.tokenizer import load_tokenizer

MODEL = Path(__file__).parents[3] / "models/keystroke-80m/keystroke-80m.gguf"
PROBE = Sampling(logprobs=0)  # chosen on the host: the step's buffers stay as it left them
TEXT = [(11 * i * i + 3 * i) % 203 for i in range(3000)]


def in_steps(steps: KvSteps) -> KvTransform:
    """A memory that keeps keys and values in bytes."""

    def kept(layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(  # type: ignore[return-value]
            from_bytes(to_bytes(x, size[layer])).to(x.dtype) * size[layer]
            for x, size in ((k, steps.keys), (v, steps.values))
        )

    return kept


def steps_of(engine: CudaEngine) -> KvSteps:
    steps = engine._prefill._steps
    assert steps is not None
    return steps


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [16, 150], ids=["as rows of a step", "through prefill"])
def test_logits_are_those_of_the_stored_precision(family: str, length: int) -> None:
    spec = tiny_spec(family, context=512)
    tensors, prompt = tiny_tensors(spec), TEXT[:length]
    with tiny_engine(spec, kv_precision="int8") as engine, engine.session() as session:
        session.extend(prompt)
        row = session.length - session.resident - 1
        session.step(sampling=PROBE)
        logits = engine._stepper.logits[row].clone()
        kept = in_steps(steps_of(engine))
    expected = forward(spec, tensors.__getitem__, prompt, kv_transform=kept)[-1]
    # Other roundings move some numbers over the edge of a step: near, not equal.
    assert (logits - expected).norm() / expected.norm() < 0.03


@pytest.mark.parametrize("length", [90, 200, 2900])
def test_attention_is_that_over_the_stored_bytes(length: int) -> None:
    spec = tiny_spec(layers=1, context=3200)
    with tiny_engine(spec, kv_precision="int8") as engine, engine.session() as session:
        assert isinstance(session, CudaSession)
        engine._stepper.tune(in_flight=3, direct_rows=2, fused_rows=0)  # attended rows stay readable
        session.extend(TEXT[:length])
        session.step(sampling=PROBE)
        buffers, steps = engine._stepper._buffers, steps_of(engine)
        q = buffers["queries"][0].view(torch.float16).view(4, 64).double()
        attended = buffers["attended"][0].view(torch.bfloat16).view(4, 64).double()
        pages = torch.tensor(session._table.pages)
        k = engine._keys[0, pages].view(-1, 2, PAGE, 64).transpose(0, 1).flatten(1, 2)
        v = engine._values[0, pages].view(-1, 2, 64, PAGE).transpose(2, 3).transpose(0, 1).flatten(1, 2)
        k, v = ((x[:, :length].double() - 128).repeat_interleave(2, 0) for x in (k, v))
    weights = (torch.einsum("hd,hsd->hs", q, k) / 8).softmax(1)
    expected = torch.einsum("hs,hsd->hd", weights, v) * steps.values[0].repeat_interleave(2, 0)
    assert (attended - expected).norm() / expected.norm() < 0.003  # attended rows are bf16


def test_far_keys_give_the_same_row_alone_and_in_company() -> None:
    spec = tiny_spec(layers=2, context=2600)
    tensors, prompt = tiny_tensors(spec), TEXT[:2500]
    with tiny_engine(spec, kv_precision="int8") as engine, engine.session() as session:
        session.extend(prompt[:2497])
        session.step(prompt[2497:], sampling=PROBE)
        together = engine._stepper.logits[3].clone()
        session.extend(prompt)
        session.step(sampling=PROBE)
        assert torch.equal(engine._stepper.logits[0], together)
        kept = in_steps(steps_of(engine))
    expected = forward(spec, tensors.__getitem__, prompt, kv_transform=kept)[-1]
    assert (together - expected).norm() / expected.norm() < 0.03


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_steps_folded_into_quantised_rows_leave_the_weights_as_they_are(precision: Precision) -> None:
    spec = replace(tiny_spec("qwen2", layers=1), hidden=256, context_length=256)
    before = tiny_weights(spec, precision, kv_precision="int8").dense(0).qkv
    with tiny_engine(spec, precision, kv_precision="int8") as engine, engine.session() as session:
        weights = engine._prefill._weights
        assert torch.equal(weights.dense(0).qkv, before)
        session.extend([1, 2, 3])
        session.step(sampling=PROBE)
        logits = engine._stepper.logits[2].clone()
        tensors, kept = dense_tensors(weights), in_steps(steps_of(engine))
    expected = forward(spec, tensors.__getitem__, [1, 2, 3], kv_transform=kept)[-1]
    assert (logits - expected).norm() / expected.norm() < 0.03


def test_a_bias_that_dwarfs_all_else_in_a_key_costs_the_rest_nothing() -> None:
    # As in Qwen2 models: one slow rotary pair of every key has a bias of a hundred.
    spec = tiny_spec("qwen2", layers=1, context=256)
    tensors = dict(tiny_tensors(spec))
    bias = tensors["model.layers.0.self_attn.k_proj.bias"].clone().view(2, 64)
    bias[:, 31] = 100.0
    tensors["model.layers.0.self_attn.k_proj.bias"] = bias.view(-1)
    weights = build_weights(Plan(spec, "bf16", 2, "int8"), lambda name, _: tensors[name], torch.device("cpu"))
    steps, prompt = measure_steps(weights), TEXT[:200]

    def floats(_: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k.to(torch.float8_e4m3fn).float(), v.to(torch.float8_e4m3fn).float()

    def rounded(_: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k.bfloat16().float(), v.bfloat16().float()

    exact = forward(spec, tensors.__getitem__, prompt)
    errors = [
        float((forward(spec, tensors.__getitem__, prompt, kv_transform=kept) - exact).norm() / exact.norm())
        for kept in (rounded, in_steps(steps), floats)
    ]
    assert errors[0] < errors[1] < errors[2] / 3


def test_rollback_extend_and_fork_equal_a_fresh_computation() -> None:
    prompt = TEXT[:20]

    def plain(engine: CudaEngine, prompt: list[int], count: int) -> list[int]:
        with engine.session() as session:
            session.extend(prompt)
            return [session.step().tokens[0] for _ in range(count)]

    with tiny_engine(tiny_spec(context=256), kv_precision="int8") as engine:
        with engine.session() as session:
            session.extend(prompt)
            for _ in range(3):
                session.step()
            with session.fork() as other:
                other.rollback(12)
                other.extend([*prompt[:12], 77, 78])
                branch = [other.step().tokens[0] for _ in range(3)]
            main = list(session.tokens) + [session.step().tokens[0] for _ in range(2)]
        assert branch == plain(engine, [*prompt[:12], 77, 78], 3)
        assert main == prompt + plain(engine, prompt, 5)


def test_bounds_are_over_the_stored_bytes_and_with_every_chunk_chosen_sparse_is_dense() -> None:
    spec = tiny_spec(layers=1, context=3200)
    with tiny_engine(spec, kv_tokens=6400, sparse="always", kv_precision="int8") as engine:
        engine.sparse_from, engine.sparse_budget = 512, 64
        with engine.session() as session:
            session.extend(TEXT[:2600])
            session.step(sampling=PROBE)
            assert engine.sparse_steps == 1
            sparse, bounds = engine._stepper.logits[0].clone(), engine._bounds
            assert bounds is not None
            pages = torch.tensor(session._table.pages[:40])
            keys = bounds._keys[:, pages].to(torch.float16) - 128
            assert torch.equal(bounds.tensor[:, pages, :, 0], keys.amax(3))
            assert torch.equal(bounds.tensor[:, pages, :, 1], keys.amin(3))
            q = engine._stepper._buffers["queries"][0].view(torch.float16).view(4, 64).double()
            near = keys[0, 1:32].double().repeat_interleave(2, 1)  # chunks of one page, but for the first
            weights = torch.einsum("hd,phsd->hps", q, near) / 8
            real = weights.logsumexp(2) / math.log(2)
            stride = engine._stepper._parameters.partial_stride
            found = engine._stepper._buffers["chunk_bounds"].view(-1, 4, stride)[0, :, 1:32]
            above = found - (weights.amax(2) / math.log(2) + 6)  # 64 keys as good as the best
            assert bool((found >= real).all())
            assert float(above.amin()) > -0.1
            assert float(above.mean()) < 20
            session.rollback(2600)
            engine.sparse_from = 1 << 20
            session.step(sampling=PROBE)
            assert torch.equal(sparse, engine._stepper.logits[0])


@pytest.fixture(scope="module")
def shared() -> CudaEngine:
    spec = replace(tiny_spec(layers=1, context=1024), intermediate=64)
    return tiny_engine(spec, kv_tokens=1 << 14, kv_precision="int8")


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["extend", "rollback", "fork"]), st.integers(0, 640), st.integers(0, 3)),
    min_size=1,
    max_size=10,
)


@settings(max_examples=12, deadline=None)
@given(OPERATIONS)
def test_pages_hold_the_bytes_of_their_text_through_extend_rollback_and_fork(
    shared: CudaEngine, operations: list[tuple[str, int, int]]
) -> None:
    """The first layer's values depend on a token alone: every slot must hold what its own token says."""
    weights, steps = shared._prefill._weights, steps_of(shared)
    table = torch.stack([_value_of(shared, token) for token in range(203)])
    sessions = [shared.session()]
    try:
        for kind, length, which in operations:
            session = sessions[which % len(sessions)]
            if kind == "extend":
                session.extend([(length * i + which) % 203 for i in range(length)])
            elif kind == "rollback":
                session.rollback(min(length, session.length))
            elif len(sessions) < 4:
                other = session.fork()
                assert isinstance(other, CudaSession)
                sessions.append(other)
        for session in sessions:
            spec, count = weights.plan.spec, session.resident
            pages = torch.tensor(session._table.pages, dtype=torch.long)
            held = shared._values[0, pages].view(len(pages), spec.kv_heads, spec.head_dim, PAGE)
            held = held.permute(0, 3, 1, 2).reshape(-1, spec.kv_heads, spec.head_dim)[:count]
            expected = table[torch.tensor(session.tokens[:count], dtype=torch.long)]
            apart = (held.int() - to_bytes(expected, steps.values[0]).int()).abs()
            assert count == 0 or int(apart.max()) <= 1  # a sum in another order may fall on the other side
    finally:
        for session in sessions:
            session.close()


@cache
def _value_of(engine: CudaEngine, token: int) -> Tensor:
    """[kv_heads, head_dim] of the first layer."""
    weights = engine._prefill._weights
    spec = weights.plan.spec
    width = spec.kv_heads * spec.head_dim
    x = weights.embedding[token].float()
    normed = engine._prefill._ops.normalise(x, None, None, weights.norms[0]).float()
    v = weights.dense(0).qkv[-width:].float() @ normed + weights.biases[0]["qkv"][-width:]
    return v.view(spec.kv_heads, spec.head_dim)


def test_memory_for_a_token_is_half() -> None:
    def size(kv: KvPrecision) -> int:
        return Plan(tiny_spec(), "bf16", 132, kv).kv_bytes_per_token

    assert size("int8") * 2 == size("bf16")


@pytest.mark.slow
def test_our_own_model_reads_real_text_with_bytes_as_it_does_with_floats() -> None:
    """The gate of 8-bit KV: divergence of what the model says of this file, from 32-bit keys and values."""
    tokens = load_tokenizer(MODEL).encode(Path(__file__).read_text())[:384]
    with open_checkpoint(MODEL) as checkpoint:
        spec = replace(checkpoint.spec, context_length=1024)

        @cache
        def tensor(name: str) -> Tensor:
            return torch.from_numpy(np.array(checkpoint.tensor(name), np.float32))

        weights = build_weights(Plan(spec, "bf16", 132), lambda name, _: tensor(name), torch.device("cpu"))
        steps = measure_steps(weights)
        with torch.inference_mode():
            exact = forward(spec, tensor, tokens).log_softmax(-1)
            found = forward(spec, tensor, tokens, kv_transform=in_steps(steps)).log_softmax(-1)
    divergence = (exact.exp() * (exact - found)).sum(-1).mean()
    assert 0 <= float(divergence) < 0.001
    assert (exact.argmax(-1) == found.argmax(-1)).float().mean() > 0.97

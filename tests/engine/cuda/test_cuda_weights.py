"""Packing, quantisation and the plan: bytes that say what the kernel will read."""

from __future__ import annotations

import lzma
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_models import CPU, dense_tensors, tiny_spec, tiny_tensors, tiny_weights

from keystroke.engine.checkpoint import open_checkpoint
from keystroke.engine.checkpoint.spec import tensor_shapes
from keystroke.engine.cuda.packing import gate_up_order, pack, plain_order, qkv_order, row_positions, unpack
from keystroke.engine.cuda.plan import Matrix, Plan, Precision
from keystroke.engine.cuda.quantisation import grouped_int4, rowwise_int8
from keystroke.engine.cuda.reference import forward
from keystroke.engine.cuda.target import HOPPER
from keystroke.engine.cuda.weights import build_weights
from keystroke.engine.tokenizer import load_tokenizer
from keystroke.errors import UnsupportedModel

MODEL = Path(__file__).parents[3] / "models/keystroke-80m/keystroke-80m.gguf"
TEXT = Path(__file__).parents[3] / "bench/data/long-text.txt.xz"


@pytest.mark.parametrize("split", [1, 2])
def test_packed_bf16_weights_come_back_bit_for_bit(split: int) -> None:
    weight = torch.randn(60, 256).to(torch.bfloat16)
    order, matrix = plain_order(60), Matrix(4, split, 256 // split, 0)
    packed = pack(weight, None, order, matrix)
    assert packed.numel() == matrix.bytes
    assert torch.equal(unpack(packed, row_positions(order, 60), matrix, 60), weight)


@pytest.mark.parametrize(("kind", "limit"), [(1, 0.008), (2, 0.095)])
def test_quantised_weights_come_back_within_their_grid(kind: int, limit: float) -> None:
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    order, matrix = plain_order(64), Matrix(4, 2, 256, kind)
    found = unpack(pack(weight, None, order, matrix), row_positions(order, 64), matrix, 64).float()
    assert (found - weight).norm() / weight.norm() < limit


def test_orders_are_permutations_that_keep_partners_in_one_tile() -> None:
    order = qkv_order(4, 2, 64)
    assert sorted(order.tolist()) == list(range(8 * 64))
    tile = order[:16].tolist()
    assert [b - a for a, b in zip(tile[:8], tile[8:], strict=True)] == [32] * 8
    order = gate_up_order(64)
    assert sorted(order.tolist()) == list(range(128))
    assert [b - a for a, b in zip(order[:8].tolist(), order[8:16].tolist(), strict=True)] == [64] * 8


def test_quantised_integers_stay_in_range_and_zero_stays_zero() -> None:
    rows = torch.cat((torch.zeros(1, 128), torch.randn(3, 128) * 5 + 3))
    values, scale = rowwise_int8(rows)
    assert int(values.abs().max()) == 127
    assert bool((values[0] == 0).all())
    assert bool((scale > 0).all())
    quads, zeros, steps = grouped_int4(rows)
    assert int(quads.min()) >= 0
    assert int(quads.max()) <= 15
    back = (quads.view(4, 2, 64) - zeros[..., None]) * steps[..., None]
    assert bool((back[0].abs() < 1e-20).all())


def test_prefill_sees_the_tensors_that_were_packed() -> None:
    spec = tiny_spec("llama")
    weights, tensors = tiny_weights(spec), tiny_tensors(spec)
    dense = weights.dense(1)
    assert torch.equal(dense.down, tensors["model.layers.1.mlp.down_proj.weight"])
    assert torch.equal(dense.gate_up[:192], tensors["model.layers.1.mlp.gate_proj.weight"])
    assert torch.equal(dense.qkv[256:384], tensors["model.layers.1.self_attn.k_proj.weight"])


def test_layers_are_kept_unpacked_where_there_is_room() -> None:
    weights = tiny_weights(tiny_spec(), "int8")
    fresh = weights.dense(1)
    bytes_of_all = 2 * 2 * sum(t.numel() for t in (fresh.qkv, fresh.output, fresh.gate_up, fresh.down))
    weights.keep_dense(bytes_of_all - 1)
    assert weights.dense(1) is not weights.dense(1)
    weights.keep_dense(bytes_of_all)
    assert weights.dense(1) is weights.dense(1)
    assert torch.equal(weights.dense(1).gate_up, fresh.gate_up)


@pytest.mark.parametrize("precision", ["bf16", "int8", "int4"])
@pytest.mark.parametrize(
    ("hidden", "heads", "kv_heads", "head_dim", "intermediate"),
    [(576, 9, 3, 64, 1536), (1536, 12, 2, 128, 8960), (3584, 28, 4, 128, 18944), (4096, 32, 8, 128, 14336)],
)
def test_plans_of_real_shapes_fit_shared_memory(
    precision: str, hidden: int, heads: int, kv_heads: int, head_dim: int, intermediate: int
) -> None:
    from dataclasses import replace

    spec = replace(
        tiny_spec(),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
    )
    plan = Plan(spec, precision, 132)  # type: ignore[arg-type]
    assert plan.max_rows >= 16
    for bucket in plan.buckets:
        assert bucket.ring_offset + bucket.stages * plan.stage_bytes(bucket.tiles_n) <= HOPPER.shared_bytes
        assert bucket.x_stride >= max(hidden, heads * head_dim, plan.down.inner)
    assert plan.output.inner * plan.output.split == heads * head_dim
    assert plan.down.inner * plan.down.split == intermediate


def test_a_shape_that_cannot_be_tiled_is_refused_in_a_sentence() -> None:
    from dataclasses import replace

    with pytest.raises(UnsupportedModel, match="head size"):
        Plan(replace(tiny_spec(), head_dim=80, heads=4), "bf16", 132)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"unrotated": frozenset({1})}, "layers without rotary embedding"),
        ({"activation": "gelu"}, "GELU"),
        ({"post_norms": True}, "norms after attention"),
        ({"embedding_scale": 8.0}, "a scaled embedding"),
        ({"attention_scale": 0.5}, "a scale of its own for attention"),
    ],
)
def test_layers_of_another_make_are_refused_in_a_sentence(changes: dict[str, Any], said: str) -> None:
    spec = replace(tiny_spec(), **changes)
    with pytest.raises(UnsupportedModel, match=f"does not run {said}.* use the CPU engine"):
        Plan(spec, "bf16", 132)


@pytest.mark.parametrize(("precision", "most", "agreement"), [("int8", 0.002, 0.97), ("int4", 0.1, 0.8)])
def test_our_own_model_reads_real_text_with_fewer_bits(
    precision: Precision, most: float, agreement: float
) -> None:
    """The gate of quantised weights, the head's included: divergence, in nats a token, of what the model says
    of a program from what it says in 32 bits. Four bits cost a model this small a lot; the gate is against
    worse."""
    program = lzma.decompress(TEXT.read_bytes()).decode()[:4000]  # always the same, so that the figures are
    tokens = load_tokenizer(MODEL).encode(program)[:384]
    with open_checkpoint(MODEL) as checkpoint:
        spec = replace(checkpoint.spec, context_length=1024)
        given = {
            name: torch.from_numpy(np.array(checkpoint.tensor(name), np.float32))
            for name in tensor_shapes(spec)
        }
    weights = build_weights(Plan(spec, precision, 132), lambda name, _: given[name], CPU)
    stored = dense_tensors(weights, given)
    with torch.inference_mode():
        exact = forward(spec, lambda name: given[name], tokens).log_softmax(-1)
        found = forward(replace(spec, tied=False), lambda name: stored[name], tokens).log_softmax(-1)
    divergence = float((exact.exp() * (exact - found)).sum(-1).mean())
    assert 0 <= divergence < most
    assert float((exact.argmax(-1) == found.argmax(-1)).float().mean()) > agreement

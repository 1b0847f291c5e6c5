"""Prefill by its parts: attention, and each kernel between products, against float64 and the libraries."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from gpu_models import DEVICE, FAMILIES, blocks, family, needs_hopper
from torch import Tensor

from keystroke.engine.checkpoint.spec import ModelSpec
from keystroke.engine.cuda.plan import PAGE, KvPrecision
from keystroke.engine.cuda.prefill_attention import PIECE, attend, piece_starts
from keystroke.engine.cuda.prefill_kernels import KernelOps, Portion, PrefillOps, TorchOps
from keystroke.engine.cuda.reference import rotate
from keystroke.engine.cuda.weights import KvSteps, Weights, random_weights

pytestmark = needs_hopper
ROWS, START, PAGES = 150, 77, 9
TABLE = [5, 2, 7, 0]


class Memory:
    """A model's weights, pages of keys and values, and one implementation of PrefillOps."""

    def __init__(self, spec: ModelSpec, ops: type[TorchOps | KernelOps], kv: KvPrecision = "bf16") -> None:
        self.weights: Weights = random_weights(spec, "bf16", DEVICE, blocks(), kv_precision=kv)
        kind = torch.bfloat16
        if kv == "int8":
            kind = torch.uint8
            steps = (noise(spec.layers, spec.kv_heads, spec.head_dim, seed=n).abs() for n in (3, 4))
            self.weights.kv_steps = KvSteps(*(0.01 + 0.01 * step for step in steps))
        shape = (spec.layers, PAGES, spec.kv_heads, PAGE * spec.head_dim)
        keys, values = (torch.zeros(shape, dtype=kind, device=DEVICE) for _ in range(2))
        self.keys = keys.view(*shape[:3], PAGE, spec.head_dim)
        self.values = values.view(*shape[:3], spec.head_dim, PAGE)
        self.ops: PrefillOps = ops(self.weights, self.keys, self.values)
        self.ops.begin(Portion(START, ROWS, torch.tensor(TABLE, device=DEVICE)))


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed))


def assert_rounded(found: Tensor, truth: Tensor) -> None:
    """As near as bf16 comes (8 significant bits: half a unit in the last place is at most 2**-8 of a number),
    but for what float32 lost before."""
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), truth, rtol=2**-8 * 1.02, atol=3e-6)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("given", ["nothing", "product", "product and bias"])
def test_rows_are_added_to_and_normalised(name: str, given: str) -> None:
    memory = Memory(family(name), KernelOps)
    spec = memory.weights.plan.spec
    x, weight = 3 * noise(ROWS, spec.hidden), memory.weights.norms[1]
    output = noise(ROWS, spec.hidden, seed=1).to(torch.bfloat16) if given != "nothing" else None
    bias = noise(spec.hidden, seed=2) if given == "product and bias" else None
    expected = x.double()
    for part in (output, bias):
        expected = expected if part is None else expected + part.double()
    found = memory.ops.normalise(x, output, bias, weight)
    torch.testing.assert_close(x.double(), expected, rtol=1e-6, atol=1e-6)
    assert_rounded(found, F.rms_norm(expected, (spec.hidden,), weight.double(), spec.norm_eps))


@pytest.mark.parametrize("biased", [False, True])
def test_gates_and_ups_are_activated(biased: bool) -> None:
    memory = Memory(replace(family("llama"), intermediate=1984), KernelOps)  # the last block is not full
    width = memory.weights.plan.spec.intermediate
    both = (4 * noise(ROWS, 2 * width)).to(torch.bfloat16)
    bias = noise(2 * width, seed=1) if biased else None
    gate, up = (both.double() if bias is None else both.double() + bias.double()).chunk(2, -1)
    assert_rounded(memory.ops.activate(both, bias), F.silu(gate) * up)


@pytest.mark.parametrize("name", FAMILIES)
def test_heads_are_turned_and_keys_and_values_stored(name: str) -> None:
    memory, spec, layer = Memory(family(name), KernelOps), family(name), 2
    qkv = noise(ROWS, (spec.heads + 2 * spec.kv_heads) * spec.head_dim).to(torch.bfloat16)
    bias = memory.weights.biases[layer].get("qkv")
    found = memory.ops.heads(qkv, bias, layer)
    wide = (qkv.double() if bias is None else qkv.double() + bias.double()).view(ROWS, -1, spec.head_dim)
    q, k, v = torch.split(wide, [spec.heads, spec.kv_heads, spec.kv_heads], 1)
    if spec.qk_norm:
        weights = memory.weights.qk_norms[layer].double()
        q, k = (
            F.rms_norm(t, (spec.head_dim,), w, spec.norm_eps) for t, w in zip((q, k), weights, strict=True)
        )
    angles = memory.weights.rope[START : START + ROWS].double()
    for got, truth in zip(
        found, (*(rotate(t, angles[..., 0], angles[..., 1]) for t in (q, k)), v), strict=True
    ):
        assert_rounded(got.transpose(0, 1), truth)
    for row in (0, 50, 51, ROWS - 1):
        page, slot = TABLE[(START + row) // PAGE], (START + row) % PAGE
        assert torch.equal(memory.keys[layer, page, :, slot], found[1][:, row])
        assert torch.equal(memory.values[layer, page, :, :, slot], found[2][:, row])
    assert not memory.keys[[0, 1, 3, 4, 5]].any(), "other layers are left alone"
    assert not memory.keys[layer, [1, 3, 4, 6, 8]].any(), "and pages of other sequences"


@pytest.mark.parametrize(("name", "kv"), list(product(FAMILIES, ("bf16", "int8"))))
def test_both_ways_store_and_read_the_same(name: str, kv: KvPrecision) -> None:
    """To a unit in the last place: sums of squares have another order, and a tie may fall the other way."""
    ours, library = Memory(family(name), KernelOps, kv), Memory(family(name), TorchOps, kv)
    spec = family(name)
    qkv = noise(ROWS, (spec.heads + 2 * spec.kv_heads) * spec.head_dim).to(torch.bfloat16)
    found, expected = (m.ops.heads(qkv, m.weights.biases[1].get("qkv"), 1) for m in (ours, library))
    for stored, truth in ((ours.keys, library.keys), (ours.values, library.values)):
        if kv == "int8":
            assert (stored.int() - truth.int()).abs().max() <= 1
            assert (stored != truth).float().mean() < 0.001
        else:
            torch.testing.assert_close(stored, truth, rtol=2**-7, atol=1e-5)
    for got, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(got, truth, rtol=2**-7, atol=1.0 if kv == "int8" else 1e-5)
    ours.keys.copy_(library.keys), ours.values.copy_(library.values)
    end = START + ROWS
    for first, until in ((0, end), (0, 2 * PAGE), (2 * PAGE, end)):
        both = (m.ops.context(1, first, until) for m in (ours, library))
        for got, truth in zip(*both, strict=True):
            assert got.shape == (spec.kv_heads, until - first, spec.head_dim)
            assert got.stride(-1) == 1
            assert torch.equal(got, truth)


@pytest.mark.parametrize(("rows", "start"), [(1000, 20_000), (1024, 20_000), (2048, 2 * PIECE), (700, 0)])
@pytest.mark.parametrize("width", [64, 128])
def test_attention_in_parts_is_as_near_the_truth_as_flash_attention(
    rows: int, start: int, width: int
) -> None:
    heads, kv_heads, end, behind = 12, 2, start + rows, piece_starts(start, rows)
    assert len(behind) == (start // PIECE if rows % 1024 == 0 else 0)
    q = (2 * noise(rows, heads, width)).to(torch.bfloat16).transpose(0, 1)
    k, v = (noise(kv_heads, end, width, seed=n).to(torch.bfloat16) for n in (1, 2))

    def part(first: int, until: int) -> tuple[Tensor, Tensor]:
        return k[:, first:until].contiguous(), v[:, first:until].contiguous()

    past = (part(first, first + PIECE) for first in behind)
    found = attend(q, *part(PIECE * len(behind), end), past)
    flash = torch.ops.aten._scaled_dot_product_flash_attention(
        q[None], k[None], v[None], 0.0, True, False, scale=width**-0.5
    )[0][0]
    hidden = torch.ones(rows, end, dtype=torch.bool, device=DEVICE).triu(start + 1)
    errors = torch.zeros(2, dtype=torch.float64)
    for head in range(heads):
        of = head * kv_heads // heads
        scores = (q[head].double() @ k[of].double().T * width**-0.5).masked_fill(hidden, float("-inf"))
        truth = scores.softmax(-1) @ v[of].double()
        for i, got in enumerate((found.view(rows, heads, width)[:, head], flash[head])):
            errors[i] += (got.double() - truth).square().sum().cpu()
    ours, library = errors.sqrt().tolist()
    # A part's rows are rounded before they meet, and once more after: two errors of one size are 2 ** 0.5.
    assert ours < 1.45 * library

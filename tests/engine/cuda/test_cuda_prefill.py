"""Prefill's own parts: what the GPU's flash attention asks of them also holds on a CPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from cuda_models import tiny_spec, tiny_weights

from keystroke.engine.cuda import prefill, prefill_attention
from keystroke.engine.cuda.driver import kernel_source
from keystroke.engine.cuda.plan import PAGE
from keystroke.engine.cuda.prefill import portion_size
from keystroke.engine.cuda.prefill_attention import PIECE, attend, piece_starts
from keystroke.engine.cuda.prefill_kernels import Portion, TorchOps


@pytest.mark.parametrize("pages", [1, 2, 5])
def test_gathered_values_lie_side_by_side_however_few_the_pages(pages: int) -> None:
    keys = torch.arange(8 * 2 * PAGE * 64).view(1, 8, 2, PAGE, 64)  # layers, pages, heads, slots, dimensions
    values = torch.arange(8 * 2 * 64 * PAGE).view(1, 8, 2, 64, PAGE)
    table = torch.tensor([3, 1, 7, 0, 5][:pages])
    end = pages * PAGE - 13
    between = TorchOps(tiny_weights(tiny_spec()), keys, values)
    between.begin(Portion(0, end, table))
    found = between.context(0, 0, end)
    for flat in found:
        assert flat.shape == (2, end, 64)
        assert flat.stride(-1) == 1
    for position in (0, end - 1):
        page, slot = table[position // PAGE], position % PAGE
        assert torch.equal(found[0][:, position], keys[0, page, :, slot])
        assert torch.equal(found[1][:, position], values[0, page, :, :, slot])


@pytest.mark.parametrize(
    ("rows", "near", "cuts"), [(5, 5, (0, 7)), (5, 9, (0, 64, 128)), (1, 1, (0, 1, 2, 9))]
)
def test_attention_in_parts_is_attention(rows: int, near: int, cuts: tuple[int, ...]) -> None:
    noise = torch.Generator().manual_seed(0)
    past, end = cuts[-1], cuts[-1] + near
    q = 3 * torch.randn(4, rows, 16, generator=noise)
    k, v = (torch.randn(2, end, 16, generator=noise) for _ in range(2))
    whole = attend(q, k, v)
    seen = torch.ones(rows, end, dtype=torch.bool).tril(end - rows)
    truth = F.scaled_dot_product_attention(q[None], k[None], v[None], seen, enable_gqa=True)[0]
    torch.testing.assert_close(whole.float(), truth.transpose(0, 1).reshape(rows, -1), rtol=2**-8, atol=1e-6)
    behind = ((k[:, a:b], v[:, a:b]) for a, b in pairwise(cuts))
    apart = attend(q, k[:, past:], v[:, past:], behind)
    torch.testing.assert_close(apart.float(), whole.float(), rtol=2**-7, atol=1e-6)


def test_pieces_of_the_past_are_whole_and_only_full_portions_have_them() -> None:
    assert PIECE % PAGE == 0
    assert [len(piece_starts(start, 2048)) for start in (0, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE)] == [
        0,
        0,
        1,
        1,
        3,
    ]
    assert piece_starts(3 * PIECE - 1, 1024) == [0, PIECE]
    assert piece_starts(3 * PIECE, 2047) == []


def test_prefill_over_pieces_of_the_past_gives_the_same_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tiny_spec()
    weights, text = tiny_weights(spec), [7 * i % 200 for i in range(300)]
    found = []
    for piece, rows in ((PIECE, 1024), (64, 1), (128, 10)):
        monkeypatch.setattr(prefill_attention, "PIECE", piece)
        monkeypatch.setattr(prefill, "PIECE", piece)
        monkeypatch.setattr(prefill_attention, "_ROWS", rows)
        keys = torch.zeros(spec.layers, 6, spec.kv_heads, PAGE, spec.head_dim, dtype=torch.bfloat16)
        values = torch.zeros(spec.layers, 6, spec.kv_heads, spec.head_dim, PAGE, dtype=torch.bfloat16)
        run = prefill.Prefill(weights, keys, values).run
        run(text[:150], 0, [4, 2, 5])
        run(text[150:], 150, [4, 2, 5, 0, 3])
        found.append((keys, values))
    for keys, values in found[1:]:
        torch.testing.assert_close(keys, found[0][0], rtol=0.02, atol=0.02)
        torch.testing.assert_close(values, found[0][1], rtol=0.02, atol=0.02)


def test_portions_shrink_as_the_context_grows_so_that_an_interrupt_never_waits_long() -> None:
    spec = replace(tiny_spec(), hidden=1536, layers=28, heads=12, kv_heads=2, head_dim=128, intermediate=8960)
    sizes = [portion_size(spec, start, 8192) for start in range(0, 262_144, 4096)]
    assert sizes == sorted(sizes, reverse=True)
    assert [sizes.count(n) for n in (8192, 4096)] == [14, 20]
    assert portion_size(spec, 1 << 20, 8192) == 2048
    assert portion_size(spec, 1 << 20, 256) == 256


def test_kernels_of_prefill_are_part_of_the_package() -> None:
    source = kernel_source(parts=("prefill.cu",))
    for name in ("add_and_normalise", "place_heads", "collect_pages", "activate"):
        assert f"void {name}(" in source

"""Prefill's own parts: what the GPU's flash attention asks of them also holds on a CPU."""

from __future__ import annotations

import pytest
import torch
from cuda_models import tiny_spec, tiny_weights

from keystroke.engine.cuda.between import Library, Portion
from keystroke.engine.cuda.driver import kernel_source
from keystroke.engine.cuda.plan import PAGE


@pytest.mark.parametrize("pages", [1, 2, 5])
def test_gathered_values_lie_side_by_side_however_few_the_pages(pages: int) -> None:
    keys = torch.arange(8 * 2 * PAGE * 64).view(1, 8, 2, PAGE, 64)  # layers, pages, heads, slots, dimensions
    values = torch.arange(8 * 2 * 64 * PAGE).view(1, 8, 2, 64, PAGE)
    table = torch.tensor([3, 1, 7, 0, 5][:pages])
    end = pages * PAGE - 13
    between = Library(tiny_weights(tiny_spec()), keys, values)
    between.begin(Portion(0, end, table))
    found = between.context(0)
    for flat in found:
        assert flat.shape == (2, end, 64)
        assert flat.stride(-1) == 1
    for position in (0, end - 1):
        page, slot = table[position // PAGE], position % PAGE
        assert torch.equal(found[0][:, position], keys[0, page, :, slot])
        assert torch.equal(found[1][:, position], values[0, page, :, :, slot])


def test_kernels_of_prefill_are_part_of_the_package() -> None:
    source = kernel_source(parts=("prefill.cu",))
    for name in ("add_and_normalise", "place_heads", "collect_pages", "activate"):
        assert f"void {name}(" in source

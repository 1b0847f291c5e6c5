"""Prefill's own parts: what the GPU's flash attention asks of them also holds on a CPU."""

from __future__ import annotations

import pytest
import torch

from keystroke.engine.cuda.plan import PAGE
from keystroke.engine.cuda.prefill import Prefill


@pytest.mark.parametrize("pages", [1, 2, 5])
def test_gathered_values_lie_side_by_side_however_few_the_pages(pages: int) -> None:
    values = torch.arange(8 * 2 * 64 * PAGE).view(8, 2, 64, PAGE)  # pages, heads, dimensions, slots
    table = torch.tensor([3, 1, 7, 0, 5][:pages])
    end = pages * PAGE - 13
    found = Prefill._context(values.transpose(-1, -2), table, end)
    assert found.shape == (2, end, 64)
    assert found.stride(-1) == 1
    for position in (0, end - 1):
        assert torch.equal(found[:, position], values[table[position // PAGE], :, :, position % PAGE])

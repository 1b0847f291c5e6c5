"""Laying weights out anew changes none of them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from keystroke.engine.onnx.blocks import read_blocks

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))
from stored_models import KINDS, random_blocks, widened


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_keeps_its_value(kind: str) -> None:
    rows, columns = 24, 768
    stored = random_blocks(kind, rows, columns)
    blocks = read_blocks(stored, kind)
    codes = blocks.packed
    if blocks.bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(rows, -1, blocks.block)
    steps = codes.astype(np.float64) - (1 << (blocks.bits - 1))
    values = (steps * blocks.scales.reshape(rows, -1, 1)).reshape(rows, columns)
    if blocks.offsets is not None:
        values += np.repeat(blocks.offsets, 32, axis=1)
    expected = widened(kind, stored)
    assert np.abs(values - expected).max() < 3e-7 * np.abs(expected).max()

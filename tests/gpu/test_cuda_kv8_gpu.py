"""Keys and values in bytes on a real GPU: numbers, and rows alone and in company."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from gpu_models import (
    FAMILIES,
    LONG,
    assert_rows_alone_equal_rows_together,
    engine_of,
    family,
    last_logits,
    needs_hopper,
    tensors_of,
    text,
)
from torch import Tensor

from keystroke.engine.cuda.engine import CudaEngine
from keystroke.engine.cuda.quantisation import from_bytes, to_bytes
from keystroke.engine.cuda.reference import forward

pytestmark = needs_hopper


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_as_near_the_truth_as_the_stored_precision_allows(name: str) -> None:
    spec = family(name)
    tensors = tensors_of(spec)
    with engine_of(spec, tensors, kv_precision="int8") as engine:
        steps = engine._prefill._steps
        assert steps is not None

        def kept(layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            size = steps.keys[layer].to(k.dtype), steps.values[layer].to(v.dtype)
            return from_bytes(to_bytes(k, size[0])) * size[0], from_bytes(to_bytes(v, size[1])) * size[1]

        for length in (1, 16, 50, 300, 2500):
            prompt = text(length)
            logits = last_logits(engine, prompt)
            truth = forward(spec, tensors.__getitem__, prompt, torch.float64)[-1]
            rounded = forward(spec, tensors.__getitem__, prompt, torch.bfloat16)[-1].double()
            stored = forward(spec, tensors.__getitem__, prompt, torch.float64, kept)[-1]
            allowed = 1.25 * (stored - truth).norm() + (rounded - truth).norm()
            assert (logits - truth).norm() <= allowed, length


@pytest.fixture(scope="module")
def engine() -> Iterator[CudaEngine]:
    with engine_of(LONG, kv_tokens=100_000, sparse="always", kv_precision="int8") as found:
        yield found


@pytest.mark.parametrize("mode", ["dense", "sparse"])
@pytest.mark.parametrize("length", [600, 20_000])
def test_rows_are_bit_equal_in_every_bucket(engine: CudaEngine, mode: str, length: int) -> None:
    engine.sparse_from = 512 if mode == "sparse" else 1 << 30
    assert_rows_alone_equal_rows_together(engine, text(length))

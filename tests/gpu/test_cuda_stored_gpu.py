"""Weights as files store them, on a real GPU: against float64 of those very weights, alone and in company."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from gpu_models import (
    DEVICE,
    QUANTISED,
    assert_rows_alone_equal_rows_together,
    blocks,
    last_logits,
    needs_hopper,
    text,
)
from torch import Tensor

from keystroke.engine.checkpoint.spec import tensor_shapes
from keystroke.engine.cuda.driver import GpuLauncher
from keystroke.engine.cuda.engine import CudaEngine
from keystroke.engine.cuda.plan import EIGHT, EIGHT_OFFSET, SIX, SIX_OFFSET, Formats, Plan
from keystroke.engine.cuda.reference import forward
from keystroke.engine.cuda.stored import Codes, typical_formats
from keystroke.engine.cuda.weights import build_weights, random_codes, random_tensor

pytestmark = needs_hopper
# Units in parts (head, wide down) and whole; V in a format of its own; every format once.
SPEC = replace(QUANTISED, name="stored", layers=3)
OTHERS = Formats(SIX_OFFSET, EIGHT_OFFSET, EIGHT, SIX, EIGHT, EIGHT_OFFSET, SIX, frozenset({1}))


USUAL = typical_formats(SPEC)


@pytest.fixture(scope="module", params=[USUAL, USUAL.compacted(), OTHERS], ids=["usual", "compact", "others"])
def model(request: pytest.FixtureRequest) -> Iterator[tuple[CudaEngine, dict[str, Tensor]]]:
    generator = torch.Generator(device=DEVICE).manual_seed(3)
    given: dict[str, Tensor | Codes] = {}
    for name, shape in tensor_shapes(SPEC).items():
        matrix = len(shape) == 2
        given[name] = random_codes(shape, generator) if matrix else random_tensor(name, shape, generator)  # type: ignore[arg-type]
    truth = {name: each.weights() if isinstance(each, Codes) else each for name, each in given.items()}
    plan = Plan(SPEC, "stored", blocks(), stored=request.param)
    weights = build_weights(plan, lambda name, _: given[name], DEVICE)
    with CudaEngine(weights, GpuLauncher(plan, DEVICE), 16_384) as engine:
        yield engine, truth


def test_logits_are_nearer_the_stored_weights_than_plain_bf16(
    model: tuple[CudaEngine, dict[str, Tensor]],
) -> None:
    engine, truth = model
    for length in (1, 16, 300):
        prompt = text(length)
        exact = forward(SPEC, truth.__getitem__, prompt, torch.float64)[-1]
        rounded = forward(SPEC, truth.__getitem__, prompt, torch.bfloat16)[-1].double()
        assert (last_logits(engine, prompt) - exact).norm() <= (rounded - exact).norm()


def test_rows_alone_equal_rows_together(model: tuple[CudaEngine, dict[str, Tensor]]) -> None:
    assert_rows_alone_equal_rows_together(model[0], text(200))

"""Files of random weights in published sizes, and what llama.cpp's benchmark says of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from bench.cuda_rows.cuda_parts import PARTS
from bench.cuda_rows.llama_peer import speeds_of
from bench.random_models import SHAPES, write_model

from keystroke.engine.checkpoint import open_checkpoint
from keystroke.engine.cuda.target import HOPPER
from keystroke.engine.cuda.weights import plan_of, random_plan

_WITH_FILES = {name: part for name, part in PARTS.items() if part.file}
# What follows from the number of layers and tokens alone, and in which order a file has its heads.
_OF_SIZE = {"LAYERS", "VOCAB", "WIDE_LOW", "WINDOWED_LOW", "DELTA_LOW", "DELTA_LAYERS", "DELTA_TILED"}


@pytest.mark.parametrize("name", _WITH_FILES)
def test_a_file_has_the_kernel_of_the_random_weights_that_stand_for_it(name: str, tmp_path: Path) -> None:
    """Otherwise rows with and without a file would time different things."""
    part, path = _WITH_FILES[name], tmp_path / "model.gguf"
    shape = SHAPES[part.file]
    # One expert more than a row uses is enough, and makes the file small.
    experts = part.spec.experts
    count = 0 if experts is None else -(-(experts.top + 1) // 32) * 32
    spec = part.spec if experts is None else replace(part.spec, experts=replace(experts, count=count))
    write_model(path, replace(shape, vocab=256, experts=count), 8)
    with open_checkpoint(path) as checkpoint:
        of_file = plan_of(checkpoint, "stored", 132, "bf16", HOPPER).macros(1, shape="near")
    expected = random_plan(spec, "stored", 132).macros(1, shape="near")
    assert of_file.keys() == expected.keys()
    assert {n for n in expected if of_file[n] != expected[n]} <= _OF_SIZE


def test_speeds_are_medians_of_single_tokens_behind_others_and_of_a_prompt_behind_none() -> None:
    row = {"n_prompt": 0, "n_gen": 0, "n_depth": 0, "samples_ts": [1.0]}
    rows = [
        {**row, "n_prompt": 8192, "samples_ts": [900.0, 1000.0, 950.0]},
        {**row, "n_prompt": 8192, "n_depth": 1024, "samples_ts": [1.0]},
        {**row, "n_gen": 128, "samples_ts": [2.0]},
        {**row, "n_gen": 128, "n_depth": 1024, "samples_ts": [31.0, 30.0, 29.0]},
    ]
    assert speeds_of(rows) == {("prefill", 8192): 950.0, ("decode", 1024): 30.0}

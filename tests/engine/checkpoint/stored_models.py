"""GGUF files whose matrices are random blocks of the types that are run as they are stored."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoint_models import gguf_name, reference, write_gguf
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from keystroke.config import load_settings
from keystroke.engine.checkpoint import open_checkpoint
from keystroke.engine.onnx import native
from keystroke.engine.onnx.convert import convert_stored
from keystroke.engine.onnx.engine import OnnxEngine, OnnxGraph, OnnxOptions
from keystroke.engine.onnx.stored import native_weights

UInt8 = np.ndarray[Any, np.dtype[np.uint8]]
KINDS = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"),
    *("Q3_K", "MXFP4", "IQ4_NL", "IQ4_XS"),
)
COMPILED_KINDS = (*KINDS, "Q2_K")  # what the compiled operators run
# Where a block's half-precision numbers lie, and how large each is in units of the first: so that weights are
# spread evenly around zero. Last, what a weight's deviation is in those units.
_HALVES: dict[str, tuple[dict[int, float], float]] = {
    "Q4_0": ({0: 1}, 4.6),
    "Q4_1": ({0: 1, 2: -7.5}, 4.6),
    "Q5_0": ({0: 1}, 9.2),
    "Q5_1": ({0: 1, 2: -15.5}, 9.2),
    "Q8_0": ({0: 1}, 74),
    "Q4_K": ({0: 1, 2: 7.5}, 250),
    "Q5_K": ({0: 1, 2: 15.5}, 500),
    "Q6_K": ({208: 1}, 1370),
    "Q3_K": ({108: 1}, 42),
    "MXFP4": ({}, 1),
    "IQ4_NL": ({0: 1}, 70),
    "IQ4_XS": ({0: 1}, 1300),
    "Q2_K": ({80: 1, 82: 1.5}, 12),
}


def random_blocks(kind: str, rows: int, columns: int, deviation: float = 0.06, seed: int = 0) -> UInt8:
    """A matrix of this type, [rows, bytes]: every bit of its codes and scales is random."""
    dice = np.random.default_rng([seed, rows, columns, COMPILED_KINDS.index(kind)])
    values, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = dice.integers(0, 256, (rows, columns // values, size), dtype=np.uint8)
    halves, spread = _HALVES[kind]
    unit = deviation / spread * dice.uniform(0.5, 1.5, (rows, columns // values, 1))
    for at, factor in halves.items():
        blocks[:, :, at : at + 2] = (unit * factor).astype("<f2").view(np.uint8)
    if kind == "MXFP4":  # an exponent: values are up to 6 times 2 to the power of it less 127
        blocks[:, :, 0] = 127 + np.round(np.log2(deviation / 3.2)) + dice.integers(-1, 2, blocks.shape[:2])
    return blocks.reshape(rows, -1)


def widened(kind: str, blocks: UInt8) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What the blocks stand for, according to the `gguf` package."""
    wide: np.ndarray[Any, Any] = gguf.dequantize(blocks, GGMLQuantizationType[kind])
    return wide.astype(np.float64)


def write_stored(
    path: Path, family: str, kinds: Sequence[str], *, attention_biases: float | None = None, **sizes: Any
) -> None:
    """A small model whose matrices take the `kinds` in turn; biases of queries and keys as given."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64} | sizes
    model = reference(family, **sizes)
    if attention_biases is not None:
        for name, value in model.named_parameters():
            if name.endswith(("q_proj.bias", "k_proj.bias")):
                value.data[:: value.numel() // 4] = attention_biases  # a few channels, as in real ones
    turn = itertools.cycle(kinds)
    replaced = {}
    for index, (name, value) in enumerate(model.state_dict().items()):
        if value.ndim == 2 and not (name == "lm_head.weight" and model.config.tie_word_embeddings):
            kind = next(turn)
            replaced[gguf_name(name, family)] = (
                kind,
                random_blocks(kind, value.shape[0], value.shape[1], seed=index),
            )
    write_gguf(path, model, family, replaced=replaced)


def opened(path: Path, cache: Path, kernels: str, **options: Any) -> OnnxEngine:
    """An engine on stored weights, with our own operators ("native") or the runtime's ("portable")."""
    library = native.operators_library(load_settings().paths.cache) if kernels == "native" else None
    if kernels == "native" and library is None:
        pytest.skip("no C compiler here, or not the vectors")
    with open_checkpoint(path) as checkpoint:
        model = convert_stored(checkpoint, native=library is not None, cache=cache)
        stored = native_weights(checkpoint, library) if library is not None else None
        graph = OnnxGraph(model, checkpoint.spec, "stored", stored)
        return OnnxEngine(graph, OnnxOptions(**{"threads": 2, **options}))

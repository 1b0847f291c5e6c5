"""Which models can run on their weights as stored, and the mapped weights for such a graph.

Does not import the `onnx` package. The weights are views of the mapped file, except the query and key
matrices of Llama files, whose rows are reordered in a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from keystroke.engine.checkpoint import EMBEDDING, Checkpoint, tensor_shapes
from keystroke.engine.checkpoint.ggml_types import STORAGE_TYPES

_KNOWN = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
_WITH_MINIMUM = frozenset({"Q4_1", "Q5_1", "Q4_K", "Q5_K"})
TYPES = {kind.name: number for number, kind in STORAGE_TYPES.items() if kind.name in _KNOWN}
# Limits of native/operators.c: it reads 16 rows of weights at a time, and heads of a bounded size.
_LEAST_ROWS, _MOST_HEAD, _MOST_GROUP = 16, 256, 64


@dataclass(frozen=True, slots=True)
class NativeWeights:
    """The library of native operators and the matrices by name, for a graph without weights."""

    library: Path
    tables: dict[str, npt.NDArray[np.uint8]]


def can_run_stored(checkpoint: Checkpoint) -> bool:
    """Whether every matrix is of a type that can run as it is stored."""
    shapes = tensor_shapes(checkpoint.spec)
    return all(
        checkpoint.storage(name) in TYPES and shape[0] >= _LEAST_ROWS
        for name, shape in shapes.items()
        if len(shape) == 2
    )


def fits_native_operators(checkpoint: Checkpoint) -> bool:
    """Whether the native operators support this model's heads."""
    spec = checkpoint.spec
    return spec.head_dim <= _MOST_HEAD and spec.heads // spec.kv_heads <= _MOST_GROUP


def portable_bytes(checkpoint: Checkpoint) -> int:
    """The approximate size of the matrices in the layout of ONNX Runtime's operators: 4 or 8 bits per weight,
    a float32 scale per block and, for types with a minimum, an offset per 32 weights."""
    spec, total = checkpoint.spec, 0
    for name, shape in tensor_shapes(spec).items():
        if len(shape) == 2:
            kind = checkpoint.storage(name)
            size = shape[0] * shape[1]
            bits, block = (4, 32) if kind.startswith("Q4") else (8, 16 if kind == "Q6_K" else 32)
            each = size * bits // 8 + 4 * size // block + 4 * size // 32 * (kind in _WITH_MINIMUM)
            total += 2 * each if name == EMBEDDING and spec.tied else each
    return total


def stored_tables(checkpoint: Checkpoint) -> dict[str, npt.NDArray[np.uint8]]:
    """Every matrix of the model, mapped."""
    names = [name for name, shape in tensor_shapes(checkpoint.spec).items() if len(shape) == 2]
    return {name: np.ascontiguousarray(checkpoint.raw(name)[0], dtype=np.uint8) for name in names}

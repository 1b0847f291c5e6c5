"""Which models can run on their weights as stored, and the mapped weights for such a graph.

Does not import the `onnx` package. The weights are views of the mapped file, except the query and key
matrices of Llama files, whose rows are reordered in a copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from keystroke.engine.checkpoint import EMBEDDING, Checkpoint, ModelSpec, tensor_shapes
from keystroke.engine.checkpoint.ggml_types import STORAGE_TYPES

_KNOWN = frozenset(
    {
        "Q4_0",
        "Q4_1",
        "Q5_0",
        "Q5_1",
        "Q8_0",
        "Q2_K",
        "Q3_K",
        "Q4_K",
        "Q5_K",
        "Q6_K",
        "MXFP4",
        "IQ4_NL",
        "IQ4_XS",
    }
)
_SIXTEENS = ("Q3_K", "Q6_K")  # a scale for 16 weights
_WITH_MINIMUM = frozenset({"Q4_1", "Q5_1", "Q4_K", "Q5_K"})
PLAIN = {"F32": 0, "F16": 1, "BF16": 30}  # plain numbers, for families of the native operators
TYPES = {kind.name: number for number, kind in STORAGE_TYPES.items() if kind.name in _KNOWN}
# Limits of native/operators.c: it reads 16 rows of weights at a time, and heads of a bounded size.
_LEAST_ROWS, _MOST_HEAD, _MOST_GROUP = 16, 576, 64


@dataclass(frozen=True, slots=True)
class NativeWeights:
    """The library of native operators and the matrices by name, for a graph without weights."""

    library: Path
    tables: dict[str, npt.NDArray[np.uint8]]
    # The types of the matrices and the norms and biases, for models that `fits_plan`; else empty.
    types: dict[str, int] = field(default_factory=dict)
    vectors: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is multiplied with rows; the kernels of a convolution are not."""
    return len(shape) == 2 and not name.endswith("conv1d.weight")


def needs_native_operators(spec: ModelSpec) -> str | None:
    """The first feature of a model that only the native operators run; None if there is none."""
    named = (
        ("a mixture of experts", spec.experts is not None),
        ("linear attention", spec.delta is not None),
        ("latent attention", spec.latent is not None),
        ("attention with sinks", spec.sinks),
        ("gated attention", spec.gated_attention),
        ("heads that are rotated in part", spec.rotated != spec.head_dim),
        ("queries that grow with their position", spec.rope.query_growth != 0.0),
    )
    return next((name for name, there in named if there), None)


def fits_plan(spec: ModelSpec) -> bool:
    """Whether native/plan.h runs such a model, if its matrices are stored in blocks."""
    plain = spec.activation == "silu" and not spec.post_norms and spec.embedding_scale == 1.0
    return plain and needs_native_operators(spec) is None and spec.window_rope is None and not spec.predictor


def can_run_stored(checkpoint: Checkpoint) -> bool:
    """Whether every matrix is of a type that can run as it is stored. Models of the native operators may also
    have plain numbers, of 16 bits if they are large."""
    families = needs_native_operators(checkpoint.spec) is not None
    for name, shape in tensor_shapes(checkpoint.spec).items():
        if not is_matrix(name, shape):
            continue
        kind = checkpoint.storage(name)
        blocks = kind in TYPES and shape[0] >= _LEAST_ROWS
        if not blocks and not (families and kind in PLAIN):
            return False
    return True


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
    names = [name for name, shape in tensor_shapes(checkpoint.spec).items() if is_matrix(name, shape)]
    return {name: table_of(checkpoint, name)[0] for name in names}


def native_weights(checkpoint: Checkpoint, library: Path, *, adapted: bool = False) -> NativeWeights:
    """The weights that the native operators need and, for a model without an adapter, those of its plan."""
    tables = stored_tables(checkpoint)
    if adapted or not fits_plan(checkpoint.spec):
        return NativeWeights(library, tables)
    shapes = tensor_shapes(checkpoint.spec)
    vectors = {
        name: np.ascontiguousarray(checkpoint.tensor(name), np.float32)
        for name, shape in shapes.items()
        if len(shape) == 1
    }
    types = {name: TYPES[checkpoint.storage(name)] for name in tables}
    return NativeWeights(library, tables, types, vectors)


def table_of(checkpoint: Checkpoint, name: str) -> tuple[npt.NDArray[np.uint8], str]:
    """A matrix as rows of bytes, mapped where the file holds it so, and its type."""
    values, kind = checkpoint.raw(name)
    return np.ascontiguousarray(values).view(np.uint8), kind

"""Converts checkpoints to ONNX graphs and caches them by content.

The same weights and settings give the same cache entry, wherever the model is stored. Loading a cached model
does not import the `onnx` package.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from keystroke.engine.checkpoint import Checkpoint, ModelSpec, tensor_shapes
from keystroke.engine.onnx.cache import ConversionCache
from keystroke.engine.onnx.precision import FORMAT, OPERATORS, PRECISIONS, STORED, Precision
from keystroke.engine.onnx.stored import needs_native_operators, portable_bytes
from keystroke.errors import ConfigError

if TYPE_CHECKING:
    import onnx

    from keystroke.engine.onnx.data_file import DataFile

MODEL, WEIGHTS = "model.onnx", "weights.bin"
Progress = Callable[[int, int], None]


def convert_model(
    checkpoint: Checkpoint,
    *,
    precision: str,
    native: bool = False,
    progress: Progress | None = None,
    cache: Path | None = None,
    adapted: bool = False,
) -> Path:
    """The ONNX model of this checkpoint at this precision ("int4", "int8", "fp16", "fp32"), its attention by
    our own operator (`native`) or by the runtime's. `adapted`: the graph takes an adapter's matrices as
    inputs.

    `progress(done, total)` counts parameters and is only called if the model has to be built. Raises
    ModelError if the cache folder is full or cannot be written."""
    chosen = PRECISIONS.get(precision)
    if chosen is None:
        known = ", ".join(PRECISIONS)
        raise ConfigError(
            f"{precision!r} is not a precision of this engine; choose one of {known}", param="precision"
        )

    def build(sink: DataFile) -> onnx.ModelProto:
        # Imported here: a cached model runs without `onnx`.
        from keystroke.engine.onnx.graph import Builder
        from keystroke.engine.onnx.half_attention import HalfBuilder

        made = HalfBuilder if native else Builder
        return made(checkpoint, chosen, sink, progress, adapted=adapted).model()

    settings = {"precision": asdict(chosen), "operators": OPERATORS if native else 0, **_adapter_key(adapted)}
    return _cached_model(
        checkpoint, chosen.name, settings, build, converted_bytes(checkpoint.spec, chosen), cache
    )


def convert_stored(
    checkpoint: Checkpoint,
    *,
    native: bool,
    progress: Progress | None = None,
    cache: Path | None = None,
    adapted: bool = False,
    predictor: bool = False,
) -> Path:
    """The ONNX model that runs this checkpoint's matrices as they are stored: with our own operators
    (`native`) only a graph, with the runtime's a graph and a rearranged copy of the matrices. The checkpoint
    must be one that `can_run_stored`. `predictor`: only the layer that predicts the token after the next one.
    Raises ModelError as `converted` does."""

    def build(sink: DataFile) -> onnx.ModelProto:
        if native and needs_native_operators(checkpoint.spec) is not None:
            from keystroke.engine.onnx.family_graph import FamilyBuilder, PredictorBuilder

            made = PredictorBuilder if predictor else FamilyBuilder
            return made(checkpoint, STORED, sink, progress).model()
        if native:
            from keystroke.engine.onnx.stored_graph import StoredBuilder

            return StoredBuilder(checkpoint, STORED, sink, progress, adapted=adapted).model()
        from keystroke.engine.onnx.portable_graph import PortableBuilder

        return PortableBuilder(checkpoint, STORED, sink, progress, adapted=adapted).model()

    settings = {"precision": "stored", "operators": OPERATORS if native else 0, **_adapter_key(adapted)}
    settings |= {"predictor": 1} if predictor else {}
    room = graph_bytes(checkpoint) + (0 if native else portable_bytes(checkpoint))
    label = "predictor" if predictor else "stored" if native else "portable"
    return _cached_model(checkpoint, label, settings, build, room, cache)


def _adapter_key(adapted: bool) -> dict[str, object]:
    """Part of the cache key; empty without an adapter, so that older entries stay valid."""
    return {"adapted": 1} if adapted else {}


def _cached_model(
    checkpoint: Checkpoint,
    label: str,
    settings: Mapping[str, object],
    build: Callable[[DataFile], onnx.ModelProto],
    room: int,
    cache: Path | None,
) -> Path:
    """The model that `build` makes of this checkpoint, from the cache if it has it."""

    def make(folder: Path) -> None:
        from keystroke.engine.onnx.data_file import DataFile

        with (folder / WEIGHTS).open("wb") as file:
            model = build(DataFile(file, WEIGHTS))
        (folder / MODEL).write_bytes(model.SerializeToString())

    # An extended context changes the graph, a name does not.
    spec = repr(replace(checkpoint.spec, name=""))
    key = {"weights": checkpoint.fingerprint(), "spec": spec, "format": FORMAT, **settings}
    name = f"{checkpoint.spec.name}-{label}"
    return conversion_cache(cache).entry(name, json.dumps(key, sort_keys=True), make, room) / MODEL


def conversion_cache(folder: Path | None = None) -> ConversionCache:
    """The cache of converted models in `folder`, by default the user's cache folder."""
    return ConversionCache((folder or platformdirs.user_cache_path("keystroke", appauthor=False)) / "onnx")


def converted_bytes(spec: ModelSpec, precision: Precision) -> int:
    """The approximate size of the converted model on disk."""
    wide = 4 if precision.name == "fp32" else 2
    total = spec.vocab_size * spec.hidden * wide + 4 * spec.context_length * spec.head_dim
    shapes = tensor_shapes(spec)
    matrices = [shape for name, shape in shapes.items() if len(shape) == 2 and "embed_tokens" not in name]
    if spec.tied:
        matrices.append((spec.vocab_size, spec.hidden))
    for rows, columns in matrices:
        bits = precision.head_bits if rows == spec.vocab_size else precision.body_bits
        overhead = 5 * rows * -(-columns // precision.block) if bits else 0  # scales and zero points
        total += rows * columns * bits // 8 + overhead if bits else rows * columns * wide
    return total + sum(4 * shape[0] for shape in shapes.values() if len(shape) == 1)


def graph_bytes(checkpoint: Checkpoint) -> int:
    """The size of a graph without its matrices: rotary tables, norms and biases."""
    spec = checkpoint.spec
    vectors = sum(shape[0] for shape in tensor_shapes(spec).values() if len(shape) == 1)
    return 4 * (spec.context_length * spec.head_dim + vectors) + (1 << 20)

"""A checkpoint as ONNX Runtime wants it: built once, kept in the cache, found again by content.

Law: the same weights and settings give the same entry, wherever the model lies. A model that is there is
found without loading what would build it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import platformdirs

from keystroke.engine.checkpoint import Checkpoint, ModelSpec, tensor_shapes
from keystroke.engine.onnx.cache import Cache
from keystroke.engine.onnx.precision import FORMAT, PRECISIONS, Precision
from keystroke.errors import ConfigError

MODEL, WEIGHTS = "model.onnx", "weights.bin"
Progress = Callable[[int, int], None]


def converted(
    checkpoint: Checkpoint, *, precision: str, progress: Progress | None = None, cache: Path | None = None
) -> Path:
    """The ONNX model of this checkpoint at this precision ("int4", "int8", "fp16", "fp32").

    `progress(done, total)` counts parameters and is called only when the model has to be built. Raises
    ModelError if the cache folder has no room or cannot be written."""
    chosen = PRECISIONS.get(precision)
    if chosen is None:
        known = ", ".join(PRECISIONS)
        raise ConfigError(
            f"{precision!r} is not a precision of this engine; choose one of {known}", param="precision"
        )

    def make(folder: Path) -> None:
        from keystroke.engine.onnx import graph  # here: a converted model is run without `onnx`
        from keystroke.engine.onnx.data_file import DataFile

        with (folder / WEIGHTS).open("wb") as file:
            model = graph.build(checkpoint, chosen, DataFile(file, WEIGHTS), progress)
        (folder / MODEL).write_bytes(model.SerializeToString())

    settings = {
        "weights": checkpoint.fingerprint(),
        "spec": repr(
            replace(checkpoint.spec, name="")
        ),  # an extended context changes the graph, a name does not
        "precision": asdict(chosen),
        "kv": np.dtype(chosen.kv).name,  # differs between machines, which may share a home folder
        "format": FORMAT,
    }
    place = model_cache(cache).entry(
        f"{checkpoint.spec.name}-{precision}",
        json.dumps(settings, sort_keys=True),
        make,
        stored_bytes(checkpoint.spec, chosen),
    )
    return place / MODEL


def model_cache(folder: Path | None = None) -> Cache:
    """The cache of converted models, at its usual place unless told otherwise."""
    return Cache((folder or platformdirs.user_cache_path("keystroke", appauthor=False)) / "onnx")


def stored_bytes(spec: ModelSpec, precision: Precision) -> int:
    """About how many bytes the converted model takes on disk."""
    wide = 4 if precision.name == "fp32" else 2
    total = spec.vocab_size * spec.hidden * wide + 4 * spec.context_length * spec.head_dim
    shapes = tensor_shapes(spec)
    matrices = [shape for name, shape in shapes.items() if len(shape) == 2 and "embed_tokens" not in name]
    if spec.tied:
        matrices.append((spec.vocab_size, spec.hidden))
    for rows, columns in matrices:
        bits = precision.head_bits if rows == spec.vocab_size else precision.body_bits
        overhead = (
            5 * rows * -(-columns // precision.block) if bits else 0
        )  # a scale and at most one zero point
        total += rows * columns * bits // 8 + overhead if bits else rows * columns * wide
    return total + sum(4 * shape[0] for shape in shapes.values() if len(shape) == 1)

"""The ONNX backend for the registry: whether it runs on this machine, and how it is loaded.

Importing this module does not import ONNX Runtime.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from keystroke.config import Settings
from keystroke.engine.backends import LoadArguments
from keystroke.engine.checkpoint import Checkpoint, ModelSpec, extend_context, open_checkpoint
from keystroke.engine.library import Progress
from keystroke.engine.memory import available_bytes
from keystroke.errors import ConfigError, NotEnoughMemory, UnsupportedModel

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from keystroke.engine.base import Engine
    from keystroke.engine.disk_prefixes import DiskPrefixes
    from keystroke.engine.onnx.stored import NativeWeights

# A model that is not stored in blocks is quantised. Below this many parameters, four bits cost more quality
# than they save time; above, memory traffic decides.
FOUR_BITS_FROM = 3_000_000_000
_EXPERTS_SHARE = 0.75  # of a plain step's bytes in a mixture such as Coder-30B-A3B


def unavailable_reason() -> str | None:
    if importlib.util.find_spec("onnxruntime") is None:
        return "the embedded engine needs ONNX Runtime: pip install onnxruntime"
    return None


def load(request: LoadArguments) -> Engine:
    from keystroke.engine.onnx.convert import convert_model, converted_bytes
    from keystroke.engine.onnx.engine import OnnxEngine, OnnxGraph, OnnxOptions
    from keystroke.engine.onnx.precision import PRECISIONS
    from keystroke.engine.onnx.stored import NativeWeights, can_run_stored, needs_native_operators
    from keystroke.engine.speculative.cost import remember_expert_cost

    settings, progress, adapter = request.settings, request.progress, request.adapter
    precision, stored, predictor = request.precision, None, None
    with open_checkpoint(request.path) as checkpoint:
        checkpoint.read_predictor()
        if settings.engine.context > checkpoint.spec.context_length:
            checkpoint.spec = extend_context(checkpoint.spec, settings.engine.context)
        spec = checkpoint.spec
        if adapter is not None:
            adapter.check(spec)
        feature = needs_native_operators(spec)
        if adapter is not None and feature is not None:
            raise UnsupportedModel(f"{spec.name} has {feature}, which adapters cannot be added to so far")
        if precision == "auto":
            smaller = "int4" if spec.parameters >= FOUR_BITS_FROM else "int8"
            precision = "stored" if can_run_stored(checkpoint) else smaller
        if feature is not None:
            model, stored, predictor = _as_family(checkpoint, settings, progress, precision)
        elif precision == "stored":
            model, stored = _as_stored(checkpoint, settings, progress, adapted=adapter is not None)
        else:
            _check_memory(spec, converted_bytes(spec, PRECISIONS[precision]), precision)
            own = None if precision == "fp32" else _find_operators(checkpoint, settings, progress)
            stored = NativeWeights(own, {}) if own is not None else None
            model = convert_model(
                checkpoint,
                precision=precision,
                native=own is not None,
                progress=lambda done, total: progress(f"converting {spec.name} to {precision}", done, total),
                cache=settings.paths.cache,
                adapted=adapter is not None,
            )
    made = f"{precision}/{stored is not None}" + (f"/{adapter.digest}" if adapter is not None else "")
    options = OnnxOptions(
        threads=settings.engine.threads,
        kv_budget=_kv_budget(settings),
        context_length=settings.engine.context or None,
        exact=settings.engine.exact,
        free_memory=available_bytes if settings.engine.kv_budget_mb is None else lambda: None,
        disk_prefixes=_open_prefixes(request.path, made, settings),
    )
    engine = OnnxEngine(OnnxGraph(model, spec, precision, stored, adapter, predictor), options)
    remember_expert_cost(engine, spec.experts, _EXPERTS_SHARE)
    return engine


def _as_family(
    checkpoint: Checkpoint, settings: Settings, progress: Progress, precision: str
) -> tuple[Path, NativeWeights, Path | None]:
    """The graph of a model that only the native operators run, its matrices, as they are stored or converted
    to `precision`, and the graph of its predictor, if it has one. Raises UnsupportedModel without operators,
    ConfigError."""
    from keystroke.engine.onnx.convert import convert_stored
    from keystroke.engine.onnx.native import start_compiling
    from keystroke.engine.onnx.packing import pack_tables, read_ahead
    from keystroke.engine.onnx.precision import PRECISIONS
    from keystroke.engine.onnx.stored import NativeWeights, can_run_stored, stored_tables
    from keystroke.engine.onnx.tables import convert_tables

    spec, cache = checkpoint.spec, settings.paths.cache
    if precision != "stored":
        _require_operators(checkpoint, settings, progress)  # before minutes of conversion
        checkpoint = convert_tables(
            checkpoint,
            PRECISIONS[precision],
            progress=lambda done, total: progress(f"converting {spec.name} to {precision}", done, total),
            cache=cache,
        )
    elif not can_run_stored(checkpoint):
        raise ConfigError(
            f"{spec.name} has matrices of types that cannot run as they are stored; "
            "set model.precision to int8 or int4, which converts them"
        )
    tables = stored_tables(checkpoint)
    _check_memory(spec, _resident_bytes(spec, tables), precision)
    # The disk and the compiler work at the same time, and the graph is built meanwhile.
    if settings.engine.kernels == "auto":
        start_compiling(cache)
    read_ahead(tables)
    model = convert_stored(
        checkpoint,
        native=True,
        progress=lambda done, total: progress(f"laying out {spec.name}", done, total),
        cache=cache,
    )
    predictor = (
        convert_stored(checkpoint, native=True, cache=cache, predictor=True) if spec.predictor else None
    )
    own = _require_operators(checkpoint, settings, progress)
    tables = pack_tables(own, checkpoint, tables, settings.engine.threads)
    return model, NativeWeights(own, tables), predictor


def _require_operators(checkpoint: Checkpoint, settings: Settings, progress: Progress) -> Path:
    """The native operators, for a model that needs them. Raises UnsupportedModel."""
    from keystroke.engine.onnx.native import unavailable_reason as native_reason

    own = _find_operators(checkpoint, settings, progress)
    if own is None:
        automatic = settings.engine.kernels == "auto"
        reason = native_reason(settings.paths.cache) if automatic else "engine.kernels is not auto"
        raise UnsupportedModel(
            f"{checkpoint.spec.name} needs the compiled operators, and there are none: "
            f"{reason or 'its heads are too large for them'}"
        )
    return own


def _resident_bytes(spec: ModelSpec, tables: dict[str, npt.NDArray[np.uint8]]) -> int:
    """The memory that a model's mapped matrices need to run well. Of experts a quarter: the file is mapped,
    and only those that tokens use are read."""
    experts = sum(table.nbytes for name, table in tables.items() if ".mlp.experts." in name)
    return sum(table.nbytes for table in tables.values()) - experts + experts // 4


def _as_stored(
    checkpoint: Checkpoint, settings: Settings, progress: Progress, *, adapted: bool = False
) -> tuple[Path, NativeWeights | None]:
    """The graph that runs a model's matrices as they are stored, and its native weights if the native
    operators are available. Raises ConfigError for unsupported matrix types."""
    from keystroke.engine.onnx.convert import convert_stored
    from keystroke.engine.onnx.stored import TYPES, can_run_stored, native_weights, portable_bytes

    spec, cache = checkpoint.spec, settings.paths.cache
    if not can_run_stored(checkpoint):
        raise ConfigError(
            f"{spec.name} has matrices that are not stored as {', '.join(TYPES)}; "
            "set model.precision to int8 or int4, which converts them"
        )
    own = _find_operators(checkpoint, settings, progress)
    weights = native_weights(checkpoint, own, adapted=adapted) if own is not None else None
    need = sum(table.nbytes for table in weights.tables.values()) if weights else portable_bytes(checkpoint)
    _check_memory(spec, need, "stored")
    model = convert_stored(
        checkpoint,
        native=own is not None,
        progress=lambda done, total: progress(f"laying out {spec.name}", done, total),
        cache=cache,
        adapted=adapted,
    )
    return model, weights


def _find_operators(checkpoint: Checkpoint, settings: Settings, progress: Progress) -> Path | None:
    """The native operators, compiled for this machine; None if unavailable or not wanted."""
    from keystroke.engine.onnx.native import must_compile, operators_library
    from keystroke.engine.onnx.stored import fits_native_operators

    cache = settings.paths.cache
    if settings.engine.kernels != "auto" or not fits_native_operators(checkpoint):
        return None
    if compiling := must_compile(cache):
        progress("compiling operators for this processor", 0, 1)
    own = operators_library(cache)
    if compiling:
        progress("compiling operators for this processor", 1, 1)
    return own


def _kv_budget(settings: Settings) -> int:
    """Bytes for KV caches: the setting, or half of the free memory, between 512 MB and 16 GB."""
    if settings.engine.kv_budget_mb is not None:
        return settings.engine.kv_budget_mb << 20
    free = available_bytes()
    return min(max((free or 2 << 30) // 2, 512 << 20), 16 << 30)


def _open_prefixes(path: Path, made: str, settings: Settings) -> DiskPrefixes | None:
    """The prefixes on disk for this model; `made` describes how it is run."""
    from keystroke.engine.disk_prefixes import prefixes_of_model
    from keystroke.engine.onnx.precision import FORMAT, OPERATORS

    how = f"{made}/{FORMAT}/{OPERATORS}/{settings.engine.exact}/{settings.engine.context}"
    return prefixes_of_model(path, how, settings)


def _check_memory(spec: ModelSpec, need: int, precision: str) -> None:
    have = available_bytes()
    if have is not None and need > have:
        raise NotEnoughMemory(
            f"{spec.name} needs about {need / 2**30:.1f} GB at {precision} "
            f"and {have / 2**30:.1f} GB are free; "
            f"close other programs{', set model.precision to int4' * (precision != 'int4')} "
            "or choose a smaller model"
        )

"""The MLX backend for the registry: whether it runs on this machine, and how it is loaded.

Importing this module does not import MLX.
"""

from __future__ import annotations

import importlib.util
import platform
from typing import TYPE_CHECKING

from keystroke.engine.backends import LoadArguments
from keystroke.engine.checkpoint import extend_context, open_checkpoint
from keystroke.engine.memory import available_bytes
from keystroke.errors import ConfigError, NotEnoughMemory, UnsupportedModel

if TYPE_CHECKING:
    from keystroke.engine.base import Engine

FORMAT = 1  # increased when the same weights give other values
_PRECISIONS = ("auto", "stored", "fp16", "fp32")


def unavailable_reason() -> str | None:
    if platform.system() != "Darwin" or platform.machine() != "arm64":
        return "MLX runs on Macs with Apple silicon"
    if importlib.util.find_spec("mlx") is None:
        return "MLX is not installed: pip install 'keystroke[mlx]'"
    return None


def load(request: LoadArguments) -> Engine:
    if importlib.util.find_spec("mlx") is None:
        raise ConfigError("engine.kind is mlx, but MLX is not installed: pip install 'keystroke[mlx]'")
    from keystroke.engine.disk_prefixes import prefixes_of_model
    from keystroke.engine.mlx.engine import MlxEngine, MlxOptions
    from keystroke.engine.mlx.weights import read_weights, runs_on_gpu, weight_bytes
    from keystroke.engine.speculative.find_head import head_of_model
    from keystroke.engine.speculative.head_file import open_head

    settings, progress, adapter = request.settings, request.progress, request.adapter
    if request.precision not in _PRECISIONS:
        raise ConfigError(
            f"the MLX engine has no precision {request.precision}; set model.precision to stored or fp16"
        )
    drafts = settings.speculation.enabled and runs_on_gpu()
    with open_checkpoint(request.path) as checkpoint:
        if drafts:
            checkpoint.read_predictor()
        if settings.engine.context > checkpoint.spec.context_length:
            checkpoint.spec = extend_context(checkpoint.spec, settings.engine.context)
        spec = checkpoint.spec
        if adapter is not None:
            adapter.check(spec)
            if (feature := spec.unsupported_feature()) is not None:
                raise UnsupportedModel(f"{spec.name} has {feature}, which adapters cannot be added to so far")
        need, free = weight_bytes(checkpoint), available_bytes()
        if free is not None and need > free:
            raise NotEnoughMemory(
                f"{spec.name} needs about {need / 2**30:.1f} GB and {free / 2**30:.1f} GB are free; "
                "close other programs or choose a smaller model"
            )
        weights = read_weights(
            checkpoint, lambda done, total: progress(f"loading {spec.name}", done, total), adapter
        )
    head = None
    if drafts and not spec.predictor and spec.unsupported_feature() is None:
        head = head_of_model(request.path, spec, settings)
    budget = settings.engine.kv_budget_mb
    made = f"mlx-{FORMAT}/{weights.dtype}/{settings.engine.context}" + (
        f"/{adapter.digest}" if adapter is not None else ""
    )
    engine = MlxEngine(
        spec,
        weights,
        MlxOptions(
            kv_budget=_kv_budget(free, need) if budget is None else budget << 20,
            context_length=settings.engine.context or None,
            draft_head=None if head is None else open_head(head),
        ),
    )
    if settings.speculation.enabled:
        engine.measure_drafts()
    # Prefixes with the keys and values of a layer that drafts are of no use without it.
    made += "/drafts" if engine.drafts else ""
    engine.disk_prefixes = prefixes_of_model(request.path, made, settings)
    return engine


def _kv_budget(free: int | None, weights: int) -> int:
    """Half of the memory that is left beside the weights, between 256 MB and 16 GB: memory is shared with
    every other program."""
    left = (4 << 30) if free is None else free - weights
    return min(max(left // 2, 256 << 20), 16 << 30)

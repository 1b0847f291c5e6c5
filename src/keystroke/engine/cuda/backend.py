"""The CUDA backend for the registry: whether it runs here, and how to load it. Does not import torch."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from keystroke.config import Settings
from keystroke.engine.backends import LoadArguments
from keystroke.engine.checkpoint import open_checkpoint
from keystroke.engine.library import no_progress
from keystroke.engine.locate import resolve, table_for
from keystroke.engine.unsupported_gpu import unsupported_gpu
from keystroke.errors import ConfigError, KeystrokeError, ModelError

if TYPE_CHECKING:
    from keystroke.engine.base import Engine
    from keystroke.engine.cuda.gpu import ExpertPlacement
    from keystroke.engine.cuda.plan import KvPrecision
    from keystroke.engine.cuda.sparse import Sparse

# Files that an NVIDIA driver creates; the second is that of Linux inside Windows.
_DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/dev/dxg"))
_EXPERTS_SHARE = 0.2  # of a plain step's time; fitted to 2 to 16 rows of Coder-30B-A3B (log/mixtures-gpu.md)
# A GPU keeps 4-bit files as they are stored and reads other weights in 16 bits, fast enough for what fits its
# memory; fewer bits are a choice.
GpuPrecision = Literal["auto", "bf16", "int8", "int4", "stored"]
PRECISIONS: dict[str, GpuPrecision] = {
    "auto": "auto",
    "fp16": "bf16",
    "int8": "int8",
    "int4": "int4",
    "stored": "stored",
}


@functools.cache
def unavailable_reason() -> str | None:
    """Checks for the driver first: importing torch takes seconds."""
    if not _has_driver():
        return unsupported_gpu() or "no NVIDIA driver was found; check nvidia-smi"
    try:
        check_machine()
    except KeystrokeError as error:
        return str(error)
    return None


def check_machine() -> None:
    """Raises ConfigError or ModelError, saying what to do, unless the CUDA engine runs on this machine."""
    if not _has_driver() and (other := unsupported_gpu()) is not None:
        raise ModelError(other)
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("the CUDA engine needs the extra packages: pip install 'keystroke[cuda]'")
    from keystroke.engine.cuda.gpu import gpu_target, nvidia_gpu

    gpu_target(nvidia_gpu())


def load(request: LoadArguments) -> Engine:
    check_machine()
    from keystroke.engine.cuda.engine import load_cuda
    from keystroke.engine.speculative.cost import remember_expert_cost
    from keystroke.engine.speculative.find_head import head_of_model

    path, settings, kv_tokens = request.path, request.settings, request.kv_tokens
    precision = _gpu_precision(request.precision)
    if kv_tokens is None and settings.speculation.draft_model is not None:
        kv_tokens = 4 * _context(path, settings)  # leaves memory for the draft model
    engine = load_cuda(
        path,
        precision=precision,
        context=settings.engine.context or None,
        kv_tokens=kv_tokens,
        kv_bytes=_bytes(settings.engine.kv_budget_mb),
        sparse=cast("Sparse", settings.engine.sparse),  # the settings allow the same values
        kv_precision=cast("KvPrecision", settings.engine.kv_precision),
        draft_head=lambda spec: head_of_model(path, spec, settings),
        adapter=request.adapter,
        target=settings.engine.cuda_target,
        experts=cast("ExpertPlacement", settings.engine.experts),
        expert_bytes=_bytes(settings.engine.expert_budget_mb),
        cache=settings.paths.cache,
        exact=settings.engine.exact,
        threads=settings.engine.threads,
    )
    remember_expert_cost(engine, engine.spec.experts, _EXPERTS_SHARE)
    return engine


def report(model: str, settings: Settings) -> tuple[bool, str]:
    """Whether this machine's GPU, its driver and its memory suit `model`, and one sentence about it."""
    try:
        check_machine()
        path = resolve(model, settings, no_progress)
        named = table_for(model, settings)
        wanted = named.precision if named is not None else "auto"
        precision = _gpu_precision(wanted if wanted != "auto" else settings.model.precision)
        from keystroke.engine.cuda.gpu import gpu_report
        from keystroke.engine.cuda.stored import choose_precision

        with open_checkpoint(path) as checkpoint:
            spec = checkpoint.spec
            meant, stored = choose_precision(checkpoint, precision)
    except KeystrokeError as error:
        return False, str(error)
    kv_precision = cast("KvPrecision", settings.engine.kv_precision)
    placement = cast("ExpertPlacement", settings.engine.experts)
    most = _bytes(settings.engine.expert_budget_mb)
    return gpu_report(spec, meant, kv_precision, stored, settings.engine.cuda_target, placement, most)


def _bytes(megabytes: int | None) -> int | None:
    return None if megabytes is None else megabytes << 20


def _has_driver() -> bool:
    return any(path.exists() for path in _DRIVERS)


def _gpu_precision(precision: str) -> GpuPrecision:
    found = PRECISIONS.get(precision)
    if found is None:
        known = ", ".join(PRECISIONS)
        raise ConfigError(
            f"the CUDA engine has no precision {precision!r}; set model.precision to one of {known}"
        )
    return found


def _context(path: Path, settings: Settings) -> int:
    with open_checkpoint(path) as checkpoint:
        return settings.engine.context or checkpoint.spec.context_length

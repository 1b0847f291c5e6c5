"""Checks the GPU of this machine: whether the engine runs on it, and whether a model fits. Allocates
nothing."""

from __future__ import annotations

import torch

from keystroke.engine.checkpoint.spec import ModelSpec
from keystroke.engine.cuda.plan import Formats, KvPrecision, Plan, Precision
from keystroke.engine.cuda.target import INSTEAD, Target, target_for
from keystroke.errors import KeystrokeError, ModelError, NotEnoughMemory

_MOST_SPARE = 4 << 30
_FEWEST_TOKENS = 1024  # of KV; with less room a model is not loaded


def spare_bytes(total: int) -> int:
    """Memory that the KV cache leaves for prefill and other programs."""
    return min(_MOST_SPARE, total // 6)


def kv_token_capacity(plan: Plan, free: int, total: int, each: int, most: int | None = None) -> int:
    """How many tokens with KV of `each` bytes fit in the free memory, or in `most` bytes of it. Raises
    NotEnoughMemory if they are too few."""
    tokens = int((free - spare_bytes(total)) * 0.9) // each
    if tokens < _FEWEST_TOKENS:
        raise NotEnoughMemory(
            f"{plan.spec.name} in {plan.precision} leaves {max(free, 0) / 1e9:.1f} of the GPU's "
            f"{total / 1e9:.0f} GB, too little for a context; choose fewer bits (model.precision), a "
            "smaller model, or engine.kv_budget_mb so that models share the memory"
        )
    wanted = 16 * plan.spec.context_length if most is None else max(most // each, _FEWEST_TOKENS)
    return min(tokens, wanted)


def nvidia_gpu() -> torch.device:
    """The first GPU. Raises ModelError if torch has none."""
    if torch.version.hip is not None:
        raise ModelError(f"the CUDA engine needs an NVIDIA GPU, and this torch is built for AMD's; {INSTEAD}")
    if torch.version.cuda is None:
        raise ModelError(
            "the installed torch was built without CUDA; install one with it "
            "(https://pytorch.org), or use the CPU engine"
        )
    if not torch.cuda.is_available():
        raise ModelError(
            f"no usable NVIDIA GPU was found: it needs a driver for CUDA {torch.version.cuda}; "
            "check nvidia-smi, or use the CPU engine"
        )
    return torch.device("cuda", 0)


def gpu_target(device: torch.device, wanted: str = "auto") -> Target:
    """The compile target of this GPU. Raises as `target_for` does."""
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    room: int = getattr(properties, "shared_memory_per_block_optin", 0)  # missing in torch's stubs
    return target_for(capability, room, wanted)


def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def gpu_report(
    spec: ModelSpec,
    precision: Precision = "bf16",
    kv_precision: KvPrecision = "bf16",
    stored: Formats | None = None,
    target: str = "auto",
) -> tuple[bool, str]:
    """Whether this machine's GPU suits a model, and one sentence about it. `stored`: the formats of precision
    "stored"."""
    try:
        device = nvidia_gpu()
        kind = gpu_target(device, target)
        plan = Plan(spec, precision, multiprocessors(device), kv_precision, stored, kind)
        rows = plan.max_rows
    except KeystrokeError as error:
        return False, str(error)
    free, total = torch.cuda.mem_get_info(device)
    need = plan.packed_bytes + spec.vocab_size * spec.hidden * 2 + spare_bytes(total)
    name = torch.cuda.get_device_name(device)
    sizes = f"{name}: {free / 1e9:.0f} of {total / 1e9:.0f} GB free"
    if free < need:
        lack = f"{spec.name} in {precision} needs {need / 1e9:.0f} GB"
        return False, f"{sizes}, but {lack}; choose fewer bits (model.precision) or a smaller model"
    tokens = (free - need) // plan.kv_bytes_per_token
    room = f"leaves room for {tokens:,} tokens of KV in {kv_precision}"
    how = f"kernels for {kind.name}, up to {rows} rows a step"
    return True, f"{sizes}; {how}; {spec.name} in {precision} {room}"

"""The GPU of this machine: whether the engine runs on it, and whether a model fits.

Law: looks and says, in one sentence with what to do; it allocates nothing.
"""

from __future__ import annotations

import torch

from keystroke.engine.checkpoint.spec import ModelSpec, within_window
from keystroke.engine.cuda.plan import Formats, KvPrecision, Plan, Precision
from keystroke.errors import ModelError

SPARE_BYTES = 4 << 30  # left to prefill and to others when KV memory takes the rest


def hopper() -> torch.device:
    """The first GPU. Raises ModelError where there is none that the kernel is made for."""
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
    major, minor = torch.cuda.get_device_capability(0)
    if major != 9:
        raise ModelError(
            f"the CUDA engine is built for Hopper GPUs (compute capability 9.0), not {major}.{minor}; "
            "use the CPU engine or a remote server"
        )
    return torch.device("cuda", 0)


def gpu_report(
    spec: ModelSpec,
    precision: Precision = "bf16",
    kv_precision: KvPrecision = "bf16",
    stored: Formats | None = None,
) -> tuple[bool, str]:
    """Whether this machine's GPU suits a model, and one sentence about it. `stored`: what its matrices are
    kept in, where they are kept as stored."""
    try:
        device = hopper()
        blocks = torch.cuda.get_device_properties(device).multi_processor_count
        plan = Plan(within_window(spec), precision, blocks, kv_precision, stored)
    except ModelError as error:
        return False, str(error)
    free, total = torch.cuda.mem_get_info(device)
    need = plan.streamed_bytes + spec.vocab_size * spec.hidden * 2 + SPARE_BYTES
    name = torch.cuda.get_device_name(device)
    sizes = f"{name}: {free / 1e9:.0f} of {total / 1e9:.0f} GB free"
    if free < need:
        return False, f"{sizes}, but {spec.name} in {precision} needs {need / 1e9:.0f} GB; choose fewer bits"
    tokens = (free - need) // plan.kv_bytes_per_token
    room = f"leaves room for {tokens:,} tokens of KV in {kv_precision}"
    return True, f"{sizes}; {spec.name} in {precision} {room}"

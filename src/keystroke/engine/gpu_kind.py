"""GPUs that are none of NVIDIA's: what this machine has, and what to use there instead.

Looks at the system's own lists and imports nothing heavy; it runs no program and opens no device.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

_AMD = "0x1002"  # as PCI numbers makers
_CARDS = Path("/sys/class/drm")
_APPLE = (
    "Apple GPU: the CUDA engine needs an NVIDIA one; the embedded engine runs on the processor, and a server "
    "that uses the GPU (llama.cpp, Ollama, MLX) answers through [models.NAME] with its base_url"
)
_RADEON = (
    "AMD GPU: the CUDA engine needs an NVIDIA one; the embedded engine runs on the processor, and a server "
    "that uses the GPU (llama.cpp, Ollama, vLLM) answers through [models.NAME] with its base_url"
)


def other_gpu(cards: Path = _CARDS) -> str | None:
    """One sentence about a GPU of Apple or AMD, with what to use; None where neither is found."""
    if sys.platform == "darwin":
        return _APPLE if platform.machine() == "arm64" else None
    for vendor in sorted(cards.glob("card*/device/vendor")):
        try:
            if vendor.read_text().strip() == _AMD:
                return _RADEON
        except OSError:
            continue
    return None

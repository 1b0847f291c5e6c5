"""Detects GPUs of Apple and AMD, which the CUDA engine does not support, and says what to use instead.

Reads the system's device list; runs no program and opens no device.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

_AMD = "0x1002"  # PCI vendor id
_CARDS = Path("/sys/class/drm")
_APPLE = (
    "Apple GPU: the MLX engine uses it (pip install 'keystroke[mlx]'); the CUDA engine needs an NVIDIA one, "
    "and the embedded engine runs on the processor"
)
_RADEON = (
    "AMD GPU: the CUDA engine needs an NVIDIA one; the embedded engine runs on the processor, and a server "
    "that uses the GPU (llama.cpp, Ollama, vLLM) answers through [models.NAME] with its base_url"
)


def unsupported_gpu(cards: Path = _CARDS) -> str | None:
    """One sentence about a GPU of Apple or AMD and what to use instead; None if there is neither."""
    if sys.platform == "darwin":
        return _APPLE if platform.machine() == "arm64" else None
    for vendor in sorted(cards.glob("card*/device/vendor")):
        try:
            if vendor.read_text().strip() == _AMD:
                return _RADEON
        except OSError:
            continue
    return None

"""The embedded engine: Llama, Qwen2 and Qwen3 models on ONNX Runtime, on the CPU of any laptop.

ONNX Runtime (1.31, seen on Linux) tells its maker about the machine as soon as it is imported: a device
id, the processor, the program's path. Nothing leaves the machine here, so it is told not to, before anything
below this package imports it.
"""

from __future__ import annotations

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

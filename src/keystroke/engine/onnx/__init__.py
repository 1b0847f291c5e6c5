"""The embedded engine: models of the Llama family on ONNX Runtime, on any CPU.

ONNX Runtime 1.31 on Linux sends telemetry (device id, processor, program path) when it is imported. It is
disabled here, before any module of this package imports it.
"""

from __future__ import annotations

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

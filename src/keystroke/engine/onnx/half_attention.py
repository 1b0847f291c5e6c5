"""A graph whose attention is the native operator, with keys and values in half precision.

Keys and values are appended in place, and a row's result only depends on the tokens before it, so that no
padding is needed.
"""

from __future__ import annotations

import numpy as np
import onnx

from keystroke.engine.onnx.graph import MICROSOFT, Builder

DOMAIN = "keystroke"


class HalfBuilder(Builder):
    """Converted matrices with the runtime's operators, and native attention."""

    domains = (MICROSOFT, DOMAIN)
    returns_kv = False
    padding = 0

    @property
    def kv(self) -> type[np.float16]:
        return np.float16

    @property
    def rotation(self) -> type[np.float32]:
        return np.float32

    def _attend(self, layer: int, name: str, qkv: str) -> str:
        spec = self.spec
        return self._node(
            "HalfAttention",
            [qkv, *self._rope(layer), f"key.{layer}", f"value.{layer}", "last"],
            [f"{name}.out"],
            domain=DOMAIN,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            scale=spec.query_scale,
            window=spec.window if layer in spec.windowed else 0,
        )[0]

    def _further_inputs(self) -> list[onnx.ValueInfoProto]:
        return []

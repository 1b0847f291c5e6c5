"""How the embedded engine stores weights, keys and values. Does not import the `onnx` package."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Attention kernels choose their order of summation by the number of rows. With at least three, a row's result
# does not depend on the other rows, so that speculation, prefix reuse and forks give exactly the text of
# plain decoding. Runs with fewer rows are padded for attention.
MIN_ATTENTION_ROWS = 3
FORMAT = 4  # part of the cache key: increment it whenever the graph changes
OPERATORS = 5  # likewise for the native operators, when their inputs or rounding change


@dataclass(frozen=True, slots=True)
class Precision:
    """How weights are stored. 0 bits means 16-bit floats on disk, 32-bit in memory (the reference)."""

    name: str
    body_bits: int
    head_bits: int
    block: int
    symmetric: bool
    # 4: the kernels quantise activations to 8 bits, which makes them fast.
    accuracy_level: int = 4

    @property
    def kv(self) -> type[np.float16] | type[np.float32]:
        """The type of keys and values."""
        return np.float32 if self.name == "fp32" else np.float16


# The matrices of a GGUF file as they are, in whatever types they are stored.
STORED = Precision("stored", body_bits=4, head_bits=8, block=32, symmetric=True)
PRECISIONS = {
    # Four bits in the output head cost as much quality as in all other matrices together.
    "int4": Precision("int4", body_bits=4, head_bits=8, block=32, symmetric=False),
    "int8": Precision("int8", body_bits=8, head_bits=8, block=64, symmetric=True),
    "fp16": Precision("fp16", body_bits=0, head_bits=0, block=0, symmetric=True),
    "fp32": Precision("fp32", body_bits=0, head_bits=0, block=0, symmetric=True),
}

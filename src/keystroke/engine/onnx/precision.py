"""How the embedded engine stores weights, keys and values, and what its kernels ask for.

Facts that graph, cache and sessions share. Imports nothing that builds graphs: a model already
converted runs without the `onnx` package ever being loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Attention kernels choose their order of summation by the number of rows. With at least three, a row's result
# does not depend on its company, so a token's KV and logits are a function of the tokens before it alone:
# speculation, prefix reuse and forks give the very text of plain decoding. Fewer are padded, for attention.
MIN_ATTENTION_ROWS = 3
FORMAT = 4  # part of the cache key: raise it whenever the graph changes
OPERATORS = 3  # likewise for our own operators: raise it with what they ask for, or round in another way


@dataclass(frozen=True, slots=True)
class Precision:
    """How weights are stored. 0 bits means 16-bit floats on disk, 32-bit in memory (the reference)."""

    name: str
    body_bits: int
    head_bits: int
    block: int
    symmetric: bool
    # 4 lets the kernels quantise activations to 8 bits, which is where the speed comes from.
    accuracy_level: int = 4

    @property
    def kv(self) -> type[np.float16] | type[np.float32]:
        """What keys and values are kept in. The reference keeps everything."""
        return np.float32 if self.name == "fp32" else np.float16


# The matrices of a GGUF file as they are, in whatever types they are stored.
STORED = Precision("stored", body_bits=4, head_bits=8, block=32, symmetric=True)
PRECISIONS = {
    # The head decides between near-ties, and four bits there cost as much quality as everywhere else.
    "int4": Precision("int4", body_bits=4, head_bits=8, block=32, symmetric=False),
    "int8": Precision("int8", body_bits=8, head_bits=8, block=64, symmetric=True),
    "fp16": Precision("fp16", body_bits=0, head_bits=0, block=0, symmetric=True),
    "fp32": Precision("fp32", body_bits=0, head_bits=0, block=0, symmetric=True),
}

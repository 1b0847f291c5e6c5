"""A graph of stored weights for ONNX Runtime's own operators, for machines without a compiler.

The weights are rearranged for MatMulNBits. That operator has no minimum per block, so that the sum of a
block's activations times its offset is a separate product.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from keystroke.engine.checkpoint import EMBEDDING
from keystroke.engine.onnx.blocks import Blocks, read_blocks
from keystroke.engine.onnx.graph import MICROSOFT, Builder


class PortableBuilder(Builder):
    @functools.cached_property
    def _sums(self) -> dict[str, str]:
        """The block sums by input, which several products may share."""
        return {}

    def _embed(self, ids: str) -> str:
        self._constant("last.axis", [3])  # not -1, which the runtime gets wrong if there are no rows
        blocks = self._blocks(EMBEDDING)
        rows = blocks.packed.shape[0]
        self._weight("embed.rows.q", blocks.packed.reshape(rows, -1))
        self._weight("embed.rows.s", blocks.scales.reshape(rows, -1))
        (values,) = self._node(
            "GatherBlockQuantized",
            ["embed.rows.q", ids, "embed.rows.s"],
            ["embed.values"],
            domain=MICROSOFT,
            gather_axis=0,
            quantize_axis=1,
            bits=blocks.bits,
            block_size=blocks.block,
        )
        self._advance(rows * self.spec.hidden)
        if blocks.offsets is None:
            return values
        self._weight("embed.offsets", blocks.offsets)
        (offsets,) = self._node("Gather", ["embed.offsets", ids], ["embed.offset"], axis=0)
        (spread,) = self._node("Unsqueeze", [offsets, "last.axis"], ["embed.spread"])
        (added,) = self._node("Add", [self._in_blocks(values, self.spec.hidden), spread], ["embed.added"])
        self._constant("embed.whole", [0, 0, self.spec.hidden])
        return self._node("Reshape", [added, "embed.whole"], ["embed"])[0]

    def _mlp(self, layer: int, prefix: str, x: str) -> str:
        if self.adapted:
            return super()._mlp(layer, prefix, x)
        name, bias = f"l{layer}.mlp", self.spec.mlp_bias
        gate = self._linear(f"{name}.gate", x, [f"{prefix}.mlp.gate_proj"], bias=bias)
        up = self._linear(f"{name}.up", x, [f"{prefix}.mlp.up_proj"], bias=bias)
        return self._linear(
            f"{name}.down", self._apply_gate(name, gate, up), [f"{prefix}.mlp.down_proj"], bias=bias
        )

    def _linear(
        self, name: str, x: str, sources: Sequence[str], *, bias: bool, bits: int | None = None
    ) -> str:
        """One product per projection, since their storage types may differ."""
        parts = [self._product(f"{name}.{i}", x, source, bias=bias) for i, source in enumerate(sources)]
        return parts[0] if len(parts) == 1 else self._node("Concat", parts, [f"{name}.all"], axis=-1)[0]

    def _product(self, name: str, x: str, source: str, *, bias: bool) -> str:
        blocks = self._blocks(f"{source}.weight")
        rows, count, _ = blocks.packed.shape
        self._weight(f"{name}.q", blocks.packed)
        self._weight(f"{name}.s", blocks.scales)
        added = ""
        if bias:
            added = f"{name}.bias"
            self._weight(added, self.checkpoint.tensor(f"{source}.bias").astype(np.float32))
        (out,) = self._node(
            "MatMulNBits",
            [x, f"{name}.q", f"{name}.s", "", "", added],
            [f"{name}.y"],
            domain=MICROSOFT,
            K=count * blocks.block,
            N=rows,
            bits=blocks.bits,
            block_size=blocks.block,
            accuracy_level=self.precision.accuracy_level,
        )
        self._advance(rows * count * blocks.block)
        if blocks.offsets is None:
            return out
        self._weight(f"{name}.o", blocks.offsets.T)
        (shift,) = self._node(
            "MatMul", [self._block_sums(x, count * blocks.block), f"{name}.o"], [f"{name}.shift"]
        )
        return self._node("Add", [out, shift], [f"{name}.all"])[0]

    def _block_sums(self, x: str, width: int) -> str:
        if x not in self._sums:
            inputs = [self._in_blocks(x, width), "last.axis"]
            self._sums[x] = self._node("ReduceSum", inputs, [f"{x}.sums"], keepdims=0)[0]
        return self._sums[x]

    def _in_blocks(self, x: str, width: int) -> str:
        self._constant(f"{x}.shape", [0, 0, width // 32, 32])
        return self._node("Reshape", [x, f"{x}.shape"], [f"{x}.blocks"])[0]

    def _blocks(self, source: str) -> Blocks:
        stored, kind = self.checkpoint.raw(source)
        return read_blocks(np.asarray(stored, np.uint8), kind)

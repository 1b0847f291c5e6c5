"""A graph whose native operators read the matrices of a GGUF file as they are stored.

The matrices are inputs of the graph, which the engine binds to the mapped file: as initializers the runtime
would copy them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper

from keystroke.engine.checkpoint import EMBEDDING
from keystroke.engine.onnx.half_attention import DOMAIN, HalfBuilder
from keystroke.engine.onnx.stored import PLAIN, TYPES, fits_plan, table_of


class StoredBuilder(HalfBuilder):
    @functools.cached_property
    def _matrices(self) -> dict[str, onnx.ValueInfoProto]:
        """The graph inputs for the matrices, by name."""
        return {}

    @functools.cached_property
    def _types(self) -> dict[str, int]:
        """Their GGUF type numbers."""
        return {}

    def _embed(self, ids: str) -> str:
        table, kind = self._stored_input(EMBEDDING)
        return self._node(
            "StoredRows", [ids, table], ["embed"], domain=DOMAIN, type=kind, width=self.spec.hidden
        )[0]

    def _further_inputs(self) -> list[onnx.ValueInfoProto]:
        return list(self._matrices.values())

    def _mlp(self, layer: int, prefix: str, x: str) -> str:
        # An adapter adds to both halves before they are multiplied, so that they cannot be one operator.
        if self.spec.activation != "silu" or self.adapted:
            return super()._mlp(layer, prefix, x)
        name, bias = f"l{layer}.mlp", self.spec.mlp_bias
        sources = [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"]
        hidden = self._product(f"{name}.in", x, sources, bias=bias, gated=True)
        return self._linear(f"{name}.down", hidden, [f"{prefix}.mlp.down_proj"], bias=bias)

    def _norm(self, name: str, x: str, source: str, *, epsilon: float | None = None) -> str:
        if not self._planned:
            return super()._norm(name, x, source, epsilon=epsilon)
        self._weight(f"{name}.g", self.checkpoint.tensor(source).astype(np.float32))
        return self._node(
            "StoredNorm", [x, f"{name}.g"], [f"{name}.y"], domain=DOMAIN, epsilon=float(self.spec.norm_eps)
        )[0]

    def _skip_norm(self, name: str, x: str, skip: str, source: str, *, last: bool = False) -> tuple[str, str]:
        if not self._planned:
            return super()._skip_norm(name, x, skip, source, last=last)
        (total,) = self._node("Add", [skip, x], [f"{name}.sum"])
        return self._norm(name, total, source), total

    def _normalise_heads(self, name: str, prefix: str, qkv: str) -> str:
        if not self._planned:
            return super()._normalise_heads(name, prefix, qkv)
        spec, gains = self.spec, [f"{name}.q.g", f"{name}.k.g"]
        for gain, letter in zip(gains, "qk", strict=True):
            norm = self.checkpoint.tensor(f"{prefix}.self_attn.{letter}_norm.weight")
            self._weight(gain, norm.astype(np.float32))
        sizes = {"heads": spec.heads, "kv_heads": spec.kv_heads, "width": spec.head_dim, "gated": 0}
        return self._node(
            "SplitHeads",
            [qkv, *gains],
            [f"{name}.heads"],
            domain=DOMAIN,
            epsilon=float(spec.norm_eps),
            **sizes,
        )[0]

    @property
    def _planned(self) -> bool:
        """Whether plan.py runs this model too, with the same bits: its norms are ours, then."""
        return fits_plan(self.spec) and not self.adapted

    def _linear(
        self, name: str, x: str, sources: Sequence[str], *, bias: bool, bits: int | None = None
    ) -> str:
        return self._product(name, x, sources, bias=bias, gated=False)

    def _product(self, name: str, x: str, sources: Sequence[str], *, bias: bool, gated: bool) -> str:
        tables = [self._stored_input(f"{source}.weight") for source in sources]
        added = ""
        if bias:
            added = f"{name}.bias"
            self._weight(added, np.concatenate([self.checkpoint.tensor(f"{s}.bias") for s in sources]))
        return self._node(
            "StoredMatMul",
            [x, added, *(table for table, _ in tables)],
            [f"{name}.y"],
            domain=DOMAIN,
            types=[kind for _, kind in tables],
            gated=int(gated),
        )[0]

    def _stored_input(self, name: str) -> tuple[str, int]:
        """The graph input for a matrix and its GGUF type number. A tied head is the embedding."""
        if name not in self._matrices:
            rows, kind = table_of(self.checkpoint, name)
            self._types[name] = (TYPES | PLAIN)[kind]
            # Without sizes: it may be bound to a packed copy.
            self._matrices[name] = helper.make_tensor_value_info(name, TensorProto.UINT8, [None, None])
            self._advance(rows.size)
        return name, self._types[name]

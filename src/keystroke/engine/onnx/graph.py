"""Builds the ONNX graph of a checkpoint.

One graph serves prefill, decoding and verification: any number of rows in, logits only for the requested
rows. KV buffers are inputs and outputs in the same memory, so that a run appends in place and a rollback only
reduces a length.

Inputs   input_ids int64 [1, rows] · logit_rows int64 [n] (indices into the rows) · count int64 [1] (rows)
         pad [1, p, qkv width] (p rows of zeros for attention only: see MIN_ATTENTION_ROWS)
         last int32 [1] (position of the last row, padding included) · total int32 [1] (last + 1)
         key.i / value.i [1, kv_heads, capacity, head_dim]
         adapter.i.PRODUCT.down [in, rank] / .up [rank, out], in a graph built for an adapter
Outputs  logits float32 [n, vocab] · new_key.i / new_value.i, to be bound to the input's own memory
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import onnx
from onnx import TensorProto, helper

from keystroke.engine.adapter import PRODUCTS, AdapterShape, product_sizes
from keystroke.engine.checkpoint import Checkpoint, ModelSpec, rope_tables
from keystroke.engine.families.family import ELSEWHERE
from keystroke.engine.onnx.precision import MIN_ATTENTION_ROWS, Precision
from keystroke.engine.onnx.quantise import quantise
from keystroke.engine.onnx.stored import needs_native_operators
from keystroke.errors import UnsupportedModel

MICROSOFT = "com.microsoft"
# On ARM the runtime's attention computes with 16-bit numbers in 16 bits; elsewhere it widens them first.
_ADDS_IN_HALF = platform.machine() in ("aarch64", "arm64")
_LARGE_SCORE = 512.0  # before scaling; beyond this, 16-bit numbers are at least 0.5 apart


class WeightSink(Protocol):
    """Stores arrays and returns the initializer to put in the graph."""

    def add(self, name: str, array: np.ndarray) -> TensorProto: ...


Progress = Callable[[int, int], None]


class Builder:
    """Builds one graph. Subclasses override `_embed`, `_linear`, `_mlp` and `_attend` for other storage of
    the matrices and other operators."""

    domains: tuple[str, ...] = (MICROSOFT,)
    returns_kv = True  # whether attention returns the keys and values
    padding = MIN_ATTENTION_ROWS  # extra positions in the rotary tables
    asks_rows = True  # whether the logits of some rows only are asked for
    runs_families = False  # whether layers beyond Llama's can be built

    def __init__(
        self,
        checkpoint: Checkpoint,
        precision: Precision,
        sink: WeightSink,
        progress: Progress | None,
        *,
        adapted: bool = False,
    ) -> None:
        """`adapted`: every matrix product of a layer has an adapter, whose matrices are inputs."""
        feature = needs_native_operators(checkpoint.spec)
        if feature is not None and not self.runs_families:
            raise UnsupportedModel(
                f"{checkpoint.spec.name} has {feature}, which only the compiled operators run: install a C "
                f"compiler (cc, gcc or clang) and leave engine.kernels at auto, or {ELSEWHERE}"
            )
        self.checkpoint = checkpoint
        self.adapted = adapted
        self._adapter: list[onnx.ValueInfoProto] = []
        self.spec: ModelSpec = checkpoint.spec
        self.precision = precision
        self.sink = sink
        self.progress = progress
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[TensorProto] = []
        self._done = 0

    @property
    def kv(self) -> type[np.float16] | type[np.float32]:
        """The type of keys and values: that of the precision, unless attention would overflow."""
        return np.float32 if _ADDS_IN_HALF and self._large_scores else self.precision.kv

    @property
    def rotation(self) -> type[np.float16] | type[np.float32]:
        """The type of the rotary tables."""
        return self.kv

    def model(self) -> onnx.ModelProto:
        spec = self.spec
        self._tables()
        self._constant("zero", [0])
        self._constant("one", [1])
        residual = self._scale_embedding(self._embed("input_ids"))
        normed = self._norm("norm.first", residual, "model.layers.0.input_layernorm.weight")
        for layer in range(spec.layers):
            prefix = f"model.layers.{layer}"
            attention = self._attention(layer, prefix, normed)
            before_mlp = f"{prefix}.post_attention_layernorm.weight"
            if spec.post_norms:
                attention = self._norm(f"l{layer}.norm.attn", attention, before_mlp)
                before_mlp = f"{prefix}.pre_feedforward_layernorm.weight"
            normed, residual = self._skip_norm(f"l{layer}.norm.mlp", attention, residual, before_mlp)
            mlp = self._mlp(layer, prefix, normed)
            if spec.post_norms:
                mlp = self._norm(f"l{layer}.norm.out", mlp, f"{prefix}.post_feedforward_layernorm.weight")
            if layer + 1 < spec.layers:
                following = f"model.layers.{layer + 1}.input_layernorm.weight"
                normed, residual = self._skip_norm(f"l{layer}.norm.next", mlp, residual, following)
        self._head(mlp, residual)
        return self._assemble()

    @functools.cached_property
    def _large_scores(self) -> bool:
        """Whether biases alone make attention scores too large for 16 bits, as in Qwen2.5."""
        spec = self.spec
        if not spec.qkv_bias or spec.qk_norm:
            return False
        for layer in range(spec.layers):
            query, key = (
                np.abs(self.checkpoint.tensor(f"model.layers.{layer}.self_attn.{name}_proj.bias"))
                .astype(np.float32)
                .reshape(spec.kv_heads, -1, spec.head_dim)
                for name in "qk"
            )
            if (query * key).sum(axis=-1).max() > _LARGE_SCORE:
                return True
        return False

    # Parts of the network

    def _tables(self) -> None:
        spec, length = self.spec, self.spec.context_length + self.padding
        tables = {"rope": rope_tables(spec, length)}
        if spec.window_rope is not None:
            tables["rope.window"] = rope_tables(replace(spec, rope=spec.window_rope), length)
        if spec.unrotated:  # rotation by zero, so that all layers use the same operator
            cos, sin = tables["rope"]
            tables["rope.none"] = (np.ones_like(cos), np.zeros_like(sin))
        for name, (cos, sin) in tables.items():
            self._weight(f"{name}.cos", cos.astype(self.rotation))
            self._weight(f"{name}.sin", sin.astype(self.rotation))

    def _rope(self, layer: int) -> list[str]:
        """The names of a layer's rotary tables."""
        spec = self.spec
        name = "rope.window" if layer in spec.windowed and spec.window_rope is not None else "rope"
        if layer in spec.unrotated:
            name = "rope.none"
        return [f"{name}.cos", f"{name}.sin"]

    def _scale_embedding(self, rows: str) -> str:
        if self.spec.embedding_scale == 1.0:
            return rows
        self._weight("embed.scale", np.array([self.spec.embedding_scale], np.float32))
        return self._node("Mul", [rows, "embed.scale"], ["embed.scaled"])[0]

    def _embed(self, ids: str) -> str:
        # 16-bit floats, gathered by row: the table is memory-mapped, so that only used rows are read.
        table = self.checkpoint.tensor("model.embed_tokens.weight")
        kind = np.float32 if self.precision.name == "fp32" else np.float16
        self._weight("embed", table.astype(kind))
        self._advance(table.size)
        (rows,) = self._node("Gather", ["embed", ids], ["embed.rows"], axis=0)
        if kind is np.float32:
            return rows
        return self._node("Cast", [rows], ["embed.float"], to=TensorProto.FLOAT)[0]

    def _attention(self, layer: int, prefix: str, x: str) -> str:
        spec, name = self.spec, f"l{layer}.attn"
        projections = [f"{prefix}.self_attn.{p}_proj" for p in "qkv"]
        qkv = self._linear(f"{name}.qkv", x, projections, bias=spec.qkv_bias)
        qkv = self._add_correction(layer, "qkv", x, qkv)
        if spec.qk_norm:
            qkv = self._normalise_heads(name, prefix, qkv)
        out = self._attend(layer, name, qkv)
        mixed = self._linear(f"{name}.o", out, [f"{prefix}.self_attn.o_proj"], bias=spec.o_bias)
        return self._add_correction(layer, "output", out, mixed)

    def _attend(self, layer: int, name: str, qkv: str) -> str:
        spec, half = self.spec, self.kv is np.float16
        if half:
            (qkv,) = self._node("Cast", [qkv], [f"{name}.half"], to=TensorProto.FLOAT16)
        (qkv,) = self._node("Concat", [qkv, "pad"], [f"{name}.padded"], axis=1)
        (out, _, _) = self._node(
            "GroupQueryAttention",
            [qkv, "", "", f"key.{layer}", f"value.{layer}", "last", "total", *self._rope(layer)],
            [f"{name}.out", f"new_key.{layer}", f"new_value.{layer}"],
            domain=MICROSOFT,
            num_heads=spec.heads,
            kv_num_heads=spec.kv_heads,
            scale=spec.query_scale,
            do_rotary=1,
            rotary_interleaved=0,
            **({"local_window_size": spec.window} if layer in spec.windowed else {}),
        )
        (out,) = self._node("Slice", [out, "zero", "count", "one"], [f"{name}.rows"])
        if half:
            (out,) = self._node("Cast", [out], [f"{name}.float"], to=TensorProto.FLOAT)
        return out

    def _normalise_heads(self, name: str, prefix: str, qkv: str) -> str:
        """Normalise each query and key head before the rotation, as in Qwen3."""
        spec = self.spec
        sizes = [spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.kv_heads * spec.head_dim]
        self._constant(f"{name}.sizes", sizes)
        q, k, v = self._node(
            "Split", [qkv, f"{name}.sizes"], [f"{name}.q", f"{name}.k", f"{name}.v"], axis=-1
        )
        normed = []
        for part, heads, letter in ((q, spec.heads, "q"), (k, spec.kv_heads, "k")):
            self._constant(f"{part}.split", [0, 0, heads, spec.head_dim])
            self._constant(f"{part}.join", [0, 0, heads * spec.head_dim])
            (split,) = self._node("Reshape", [part, f"{part}.split"], [f"{part}.heads"])
            scaled = self._norm(f"{part}.norm", split, f"{prefix}.self_attn.{letter}_norm.weight")
            normed += self._node("Reshape", [scaled, f"{part}.join"], [f"{part}.normed"])
        return self._node("Concat", [*normed, v], [f"{name}.qkv.normed"], axis=-1)[0]

    def _mlp(self, layer: int, prefix: str, x: str) -> str:
        name = f"l{layer}.mlp"
        bias = self.spec.mlp_bias
        both = self._linear(f"{name}.in", x, [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"], bias=bias)
        both = self._add_correction(layer, "gate_up", x, both)
        gate, up = self._node("Split", [both], [f"{name}.gate", f"{name}.up"], axis=-1, num_outputs=2)
        hidden = self._apply_gate(name, gate, up)
        narrow = self._linear(f"{name}.down", hidden, [f"{prefix}.mlp.down_proj"], bias=bias)
        return self._add_correction(layer, "down", hidden, narrow)

    def _add_correction(self, layer: int, product: str, x: str, y: str) -> str:
        """`y`, a product of `x`, plus the adapter's correction; `y` itself in a graph without adapter."""
        if not self.adapted:
            return y
        name, spec = f"adapter.{layer}.{product}", self.spec
        rows, columns = product_sizes(AdapterShape.of(spec, 1))[PRODUCTS.index(product)]
        for side, shape in (("down", [columns, "rank"]), ("up", ["rank", rows])):
            self._adapter.append(helper.make_tensor_value_info(f"{name}.{side}", TensorProto.FLOAT, shape))
        (thin,) = self._node("MatMul", [x, f"{name}.down"], [f"{name}.thin"])
        (added,) = self._node("MatMul", [thin, f"{name}.up"], [f"{name}.added"])
        return self._node("Add", [y, added], [f"{name}.y"])[0]

    def _apply_gate(self, name: str, gate: str, up: str) -> str:
        if self.spec.activation == "gelu":
            (active,) = self._node("Gelu", [gate], [f"{name}.gelu"], approximate="tanh")
        else:
            (active,) = self._node("QuickGelu", [gate], [f"{name}.silu"], domain=MICROSOFT, alpha=1.0)
        return self._node("Mul", [active, up], [f"{name}.hidden"])[0]

    def _head(self, mlp: str, residual: str) -> None:
        (last_mlp,) = self._node("Gather", [mlp, "logit_rows"], ["head.mlp"], axis=1)
        (last_residual,) = self._node("Gather", [residual, "logit_rows"], ["head.residual"], axis=1)
        normed, _ = self._skip_norm("head.norm", last_mlp, last_residual, "model.norm.weight", last=True)
        self._logits(normed)

    def _logits(self, normed: str) -> None:
        source = "model.embed_tokens" if self.spec.tied else "lm_head"
        logits = self._linear("head", normed, [source], bias=False, bits=self.precision.head_bits)
        self._constant("logits.shape", [-1, self.spec.vocab_size])
        self._node("Reshape", [logits, "logits.shape"], ["logits"])

    # Nodes and weights

    def _linear(
        self, name: str, x: str, sources: Sequence[str], *, bias: bool, bits: int | None = None
    ) -> str:
        """x @ W.T (+ b), with W the named projections stacked by rows: one product instead of three."""
        bits = self.precision.body_bits if bits is None else bits
        parts = [self.checkpoint.tensor(f"{s}.weight") for s in sources]
        weight = np.concatenate(parts) if len(parts) > 1 else parts[0]
        added = ""
        if bias:
            added = f"{name}.bias"
            self._weight(added, np.concatenate([self.checkpoint.tensor(f"{s}.bias") for s in sources]))
        rows, columns = weight.shape
        if bits:
            packed = quantise(
                weight, bits=bits, block=self.precision.block, symmetric=self.precision.symmetric or bits == 8
            )
            self._weight(f"{name}.q", packed.packed)
            self._weight(f"{name}.s", packed.scales)
            zeros = ""
            if packed.zero_points is not None:
                zeros = f"{name}.z"
                self._weight(zeros, packed.zero_points)
            (out,) = self._node(
                "MatMulNBits",
                [x, f"{name}.q", f"{name}.s", zeros, "", added],
                [f"{name}.y"],
                domain=MICROSOFT,
                K=columns,
                N=rows,
                bits=bits,
                block_size=self.precision.block,
                accuracy_level=self.precision.accuracy_level,
            )
        else:
            out = self._float_linear(name, x, weight, added)
        self._advance(weight.size)
        return out

    def _float_linear(self, name: str, x: str, weight: np.ndarray, bias: str) -> str:
        kind = np.float32 if self.precision.name == "fp32" else np.float16
        self._weight(f"{name}.w", np.ascontiguousarray(weight.T.astype(kind)))
        matrix = f"{name}.w"
        if kind is np.float16:
            (matrix,) = self._node("Cast", [matrix], [f"{name}.w32"], to=TensorProto.FLOAT)
        (out,) = self._node("MatMul", [x, matrix], [f"{name}.y"])
        return self._node("Add", [out, bias], [f"{name}.yb"])[0] if bias else out

    def _norm(self, name: str, x: str, source: str, *, epsilon: float | None = None) -> str:
        self._weight(f"{name}.g", self.checkpoint.tensor(source).astype(np.float32))
        return self._node(
            "SimplifiedLayerNormalization",
            [x, f"{name}.g"],
            [f"{name}.y"],
            axis=-1,
            epsilon=float(self.spec.norm_eps if epsilon is None else epsilon),
        )[0]

    def _skip_norm(self, name: str, x: str, skip: str, source: str, *, last: bool = False) -> tuple[str, str]:
        """Normalised (x + skip), and x + skip itself, in one operator."""
        self._weight(f"{name}.g", self.checkpoint.tensor(source).astype(np.float32))
        outputs = [f"{name}.y"] if last else [f"{name}.y", "", "", f"{name}.sum"]
        self._node(
            "SkipSimplifiedLayerNormalization",
            [x, skip, f"{name}.g"],
            outputs,
            domain=MICROSOFT,
            epsilon=float(self.spec.norm_eps),
        )
        return f"{name}.y", f"{name}.sum"

    def _node(
        self, op: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = "", **attributes: object
    ) -> list[str]:
        self.nodes.append(
            helper.make_node(op, list(inputs), list(outputs), name=outputs[0], domain=domain, **attributes)
        )
        return list(outputs)

    def _weight(self, name: str, array: np.ndarray) -> None:
        self.initializers.append(self.sink.add(name, np.ascontiguousarray(array)))

    def _constant(self, name: str, values: Sequence[int]) -> None:
        self.initializers.append(helper.make_tensor(name, TensorProto.INT64, [len(values)], list(values)))

    @functools.cached_property
    def _total(self) -> int:
        """The parameters that `_advance` counts up to; counting them takes milliseconds."""
        return self.spec.parameters + (self.spec.vocab_size * self.spec.hidden if self.spec.tied else 0)

    def _advance(self, parameters: int) -> None:
        self._done += parameters
        if self.progress is not None:
            self.progress(min(self._done, self._total), self._total)

    def _further_inputs(self) -> list[onnx.ValueInfoProto]:
        """Additional inputs of this builder's operators."""
        width = (self.spec.heads + 2 * self.spec.kv_heads) * self.spec.head_dim
        kv = helper.np_dtype_to_tensor_dtype(np.dtype(self.kv))
        return [
            helper.make_tensor_value_info("total", TensorProto.INT32, [1]),
            helper.make_tensor_value_info("count", TensorProto.INT64, [1]),
            helper.make_tensor_value_info("pad", kv, [1, "padding", width]),
        ]

    @property
    def _kv_layers(self) -> Sequence[int]:
        """The layers whose keys and values are inputs."""
        return self.spec.attention_layers

    def _further_outputs(self) -> list[onnx.ValueInfoProto]:
        return []

    def _assemble(self) -> onnx.ModelProto:
        spec = self.spec
        cache = [1, spec.kv_heads, "capacity", spec.head_dim]
        kv = helper.np_dtype_to_tensor_dtype(np.dtype(self.kv))
        inputs = [
            helper.make_tensor_value_info("input_ids", TensorProto.INT64, [1, "rows"]),
            helper.make_tensor_value_info("last", TensorProto.INT32, [1]),
            *self._further_inputs(),
            *self._adapter,
        ]
        if self.asks_rows:
            inputs.append(helper.make_tensor_value_info("logit_rows", TensorProto.INT64, ["asked"]))
        outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["asked", spec.vocab_size])]
        outputs += self._further_outputs()
        for layer in self._kv_layers:
            for kind in ("key", "value"):
                inputs.append(helper.make_tensor_value_info(f"{kind}.{layer}", kv, cache))
                if self.returns_kv:
                    outputs.append(helper.make_tensor_value_info(f"new_{kind}.{layer}", kv, cache))
        graph = helper.make_graph(
            self.nodes, spec.name or spec.architecture, inputs, outputs, self.initializers
        )
        opsets = [helper.make_opsetid("", 21), *(helper.make_opsetid(each, 1) for each in self.domains)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)

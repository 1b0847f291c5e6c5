"""Graphs of the native operators: for families with experts, sinks, gates, linear or latent attention, and
for the layer that predicts the token after the next one.

Matrices are inputs of the graph, as in `stored_graph`; they may also be plain numbers. There is no version
for ONNX Runtime's own operators.

A model with a predictor has the further input `previous` [1, 1, hidden], the normalised stream of the token
before the first row, and the output `hidden` [1, rows, hidden], that of every row. The predictor's keys and
values of a row come from its token and the stream of the one before: they depend on the tokens up to that row
alone, and are reused, copied and taken back like all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import onnx
from onnx import TensorProto, helper

from keystroke.engine.checkpoint import EMBEDDING
from keystroke.engine.checkpoint.spec import DeltaSpec, ExpertsSpec, LatentSpec
from keystroke.engine.onnx.half_attention import DOMAIN
from keystroke.engine.onnx.recurrent import RECURRENT, recurrent_shapes
from keystroke.engine.onnx.stored import PLAIN
from keystroke.engine.onnx.stored_graph import StoredBuilder

_MOST_TABLES = 3  # of one product


class FamilyBuilder(StoredBuilder):
    runs_families = True

    def _embed(self, ids: str) -> str:
        table, kind = self._stored_input(EMBEDDING)
        if kind not in PLAIN.values():
            return super()._embed(ids)
        return self._node("PlainRows", [ids, table], ["embed"], domain=DOMAIN, type=kind)[0]

    # The predictor

    def _head(self, mlp: str, residual: str) -> None:
        if not self.spec.predictor:
            return super()._head(mlp, residual)
        stream, _ = self._skip_norm("head.norm", mlp, residual, "model.norm.weight", last=True)
        self._node("Identity", [stream], ["hidden"])
        self._logits(self._node("Gather", [stream, "logit_rows"], ["head.rows"], axis=1)[0])
        self._constant("minus one", [-1])
        (before,) = self._node("Slice", [stream, "zero", "minus one", "one"], ["mtp.before"])
        (shifted,) = self._node("Concat", ["previous", before], ["mtp.shifted"], axis=1)
        x = self._norm("mtp.first", self._join_inputs(shifted), "mtp.layers.0.input_layernorm.weight")
        at, spec = "mtp.layers.0.self_attn", self.spec
        pair = self._linear("mtp.kv", x, [f"{at}.k_proj", f"{at}.v_proj"], bias=spec.qkv_bias)
        if spec.qk_norm:
            norm = self._vector("mtp.k.norm", f"{at}.k_norm.weight")
            sizes = {"heads": 0, "kv_heads": spec.kv_heads, "width": spec.head_dim, "gated": 0}
            (pair,) = self._node(
                "SplitHeads",
                [pair, "", norm],
                ["mtp.k"],
                domain=DOMAIN,
                epsilon=float(spec.norm_eps),
                **sizes,
            )
        self._append_only(spec.layers, pair)
        return None

    def _join_inputs(self, stream: str) -> str:
        """The predictor's input: of the embedding of a token, and the stream of the one before."""
        parts = [
            self._norm(f"mtp.{name}", x, f"mtp.pre_fc_norm_{name}.weight")
            for name, x in (("embedding", "embed"), ("hidden", stream))
        ]
        (both,) = self._node("Concat", parts, ["mtp.both"], axis=-1)
        return self._linear("mtp.fc", both, ["mtp.fc"], bias=False)

    def _append_only(self, layer: int, pair: str) -> None:
        """Keys and values without any query. The empty output keeps the node in the graph."""
        self._node(
            "FamilyAttention",
            [pair, *self._rope(layer), f"key.{layer}", f"value.{layer}", "last", ""],
            ["predicted"],
            domain=DOMAIN,
            heads=0,
            kv_heads=self.spec.kv_heads,
            scale=1.0,
            window=0,
            rotary=self.spec.rotated,
            growth=0.0,
            growth_every=0,
        )

    def _further_outputs(self) -> list[onnx.ValueInfoProto]:
        if not self.spec.predictor:
            return []
        sizes: dict[str, list[object]] = {"hidden": [1, "rows", self.spec.hidden], "predicted": [1, 0, 0]}
        return [helper.make_tensor_value_info(name, TensorProto.FLOAT, size) for name, size in sizes.items()]

    def _linear(
        self, name: str, x: str, sources: Sequence[str], *, bias: bool, bits: int | None = None
    ) -> str:
        """Neighbours that are stored in blocks are one product; plain numbers are one each."""
        parts: list[str] = []
        for plain, group in groupby(sources, key=self._is_plain):
            members = list(group)
            step = 1 if plain else _MOST_TABLES
            for at in range(0, len(members), step):
                some = members[at : at + step]
                part = f"{name}.{len(parts)}"
                make = self._plain_product if plain else self._stored_product
                parts.append(make(part, x, some, bias))
        return parts[0] if len(parts) == 1 else self._node("Concat", parts, [f"{name}.all"], axis=-1)[0]

    def _is_plain(self, source: str) -> bool:
        return self._stored_input(f"{source}.weight")[1] in PLAIN.values()

    def _stored_product(self, name: str, x: str, sources: Sequence[str], bias: bool) -> str:
        return self._product(name, x, sources, bias=bias, gated=False)

    def _plain_product(self, name: str, x: str, sources: Sequence[str], bias: bool) -> str:
        table, kind = self._stored_input(f"{sources[0]}.weight")
        added = self._vector(f"{name}.bias", f"{sources[0]}.bias") if bias else ""
        return self._node("PlainMatMul", [x, added, table], [f"{name}.y"], domain=DOMAIN, type=kind)[0]

    def _vector(self, name: str, source: str) -> str:
        self._weight(name, self.checkpoint.tensor(source).astype(np.float32))
        return name

    # Attention

    def _attention(self, layer: int, prefix: str, x: str) -> str:
        spec, name = self.spec, f"l{layer}.attn"
        if spec.delta is not None and layer in spec.delta.layers:
            return self._delta(spec.delta, layer, f"{prefix}.linear_attn", x)
        if spec.latent is not None:
            return self._latent(spec.latent, layer, f"{prefix}.self_attn", x)
        projections = [f"{prefix}.self_attn.{p}_proj" for p in "qkv"]
        mixed = qkv = self._linear(f"{name}.qkv", x, projections, bias=spec.qkv_bias)
        heads = {"heads": spec.heads, "kv_heads": spec.kv_heads, "width": spec.head_dim}
        heads |= {"gated": int(spec.gated_attention)}
        if spec.qk_norm or spec.gated_attention:
            norms = ["", ""]
            if spec.qk_norm:
                norms = [
                    self._vector(f"{name}.{part}.norm", f"{prefix}.self_attn.{part}_norm.weight")
                    for part in "qk"
                ]
            (qkv,) = self._node(
                "SplitHeads",
                [mixed, *norms],
                [f"{name}.heads"],
                domain=DOMAIN,
                epsilon=float(spec.norm_eps),
                **heads,
            )
        out = self._attend_family(layer, name, qkv)
        if spec.gated_attention:
            (out,) = self._node(
                "GateHeads", [out, mixed], [f"{name}.gated"], domain=DOMAIN, epsilon=0.0, **heads
            )
        return self._linear(f"{name}.o", out, [f"{prefix}.self_attn.o_proj"], bias=spec.o_bias)

    def _attend_family(self, layer: int, name: str, qkv: str) -> str:
        spec, rope = self.spec, self.spec.rope
        if not spec.sinks and not rope.query_growth and spec.rotated == spec.head_dim:
            return self._attend(layer, name, qkv)
        at = f"model.layers.{layer}.self_attn.sinks"
        return self._node(
            "FamilyAttention",
            [
                *(qkv, *self._rope(layer), f"key.{layer}", f"value.{layer}", "last"),
                self._vector(f"{name}.sinks", at) if spec.sinks else "",
            ],
            [f"{name}.out"],
            domain=DOMAIN,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            scale=spec.query_scale,
            window=spec.window if layer in spec.windowed else 0,
            rotary=spec.rotated,
            growth=rope.query_growth,
            growth_every=rope.original_context,
        )[0]

    def _latent(self, latent: LatentSpec, layer: int, at: str, x: str) -> str:
        name, heads = f"l{layer}.attn", self.spec.heads
        queries = x
        if latent.query_rank:
            queries = self._linear(f"{name}.q_a", x, [f"{at}.q_a_proj"], bias=False)
            queries = self._norm(
                f"{name}.q_a.norm", queries, f"{at}.q_a_layernorm.weight", epsilon=latent.norm_eps
            )
        source = f"{at}.q_b_proj" if latent.query_rank else f"{at}.q_proj"
        queries = self._linear(f"{name}.q", queries, [source], bias=False)
        mixed = self._linear(f"{name}.kv", x, [f"{at}.kv_a_proj_with_mqa"], bias=False)
        absorbed = self._heads_product(f"{name}.k_b", queries, f"{at}.k_b_proj", latent.unrotated, 0)
        (qkv,) = self._node(
            "JoinLatent",
            [*(queries, absorbed, mixed), self._vector(f"{name}.kv.norm", f"{at}.kv_a_layernorm.weight")],
            [f"{name}.heads"],
            domain=DOMAIN,
            heads=heads,
            rank=latent.rank,
            unrotated=latent.unrotated,
            rotated=latent.rotated,
            interleaved=int(latent.interleaved),
            epsilon=latent.norm_eps,
        )
        out = self._attend_family(layer, name, qkv)
        out = self._heads_product(f"{name}.v_b", out, f"{at}.v_b_proj", latent.rank, latent.rotated)
        return self._linear(f"{name}.o", out, [f"{at}.o_proj"], bias=False)

    def _heads_product(self, name: str, x: str, source: str, width: int, skipped: int) -> str:
        """`width` numbers of every head, after the first `skipped`, with the head's own matrix."""
        table, kind = self._stored_input(f"{source}.weight")
        sizes = {"heads": self.spec.heads, "type": kind, "width": width, "skipped": skipped}
        return self._node("HeadsMatMul", [x, table], [f"{name}.y"], domain=DOMAIN, **sizes)[0]

    def _delta(self, delta: DeltaSpec, layer: int, at: str, x: str) -> str:
        name = f"l{layer}.delta"
        sources = [f"{at}.in_proj_{part}" for part in ("qkv", "z", "b", "a")]
        mixed = self._linear(f"{name}.in", x, sources, bias=False)
        vectors = ("conv1d.weight", "decay", "dt_bias", "norm.weight")
        (out,) = self._node(
            "DeltaNet",
            [
                mixed,
                *(self._vector(f"{name}.{each}", f"{at}.{each}") for each in vectors),
                *(f"{each}.{layer}" for each in RECURRENT),
                "control",
            ],
            [f"{name}.out"],
            domain=DOMAIN,
            key_heads=delta.key_heads,
            value_heads=delta.value_heads,
            key_size=delta.key_size,
            value_size=delta.value_size,
            kernel=delta.kernel,
            tiled=int(delta.tiled),
            epsilon=float(self.spec.norm_eps),
        )
        return self._linear(f"{name}.o", out, [f"{at}.out_proj"], bias=False)

    def _further_inputs(self) -> list[onnx.ValueInfoProto]:
        inputs, delta = super()._further_inputs(), self.spec.delta
        if self.spec.predictor:
            inputs.append(
                helper.make_tensor_value_info("previous", TensorProto.FLOAT, [1, "before", self.spec.hidden])
            )
        if delta is None:
            return inputs
        inputs.append(helper.make_tensor_value_info("control", TensorProto.INT64, [4]))
        for layer in sorted(delta.layers):
            for name, shape in zip(RECURRENT, recurrent_shapes(delta), strict=True):
                inputs.append(helper.make_tensor_value_info(f"{name}.{layer}", TensorProto.FLOAT, shape))
        return inputs

    # Feed-forward

    def _mlp(self, layer: int, prefix: str, x: str) -> str:
        experts = self.spec.experts
        if experts is not None and layer not in experts.dense:
            return self._experts(experts, f"l{layer}.mlp", f"{prefix}.mlp", x)
        return self._feed_forward(f"l{layer}.mlp", f"{prefix}.mlp", x, bias=self.spec.mlp_bias)

    def _feed_forward(self, name: str, at: str, x: str, *, bias: bool) -> str:
        sources = [f"{at}.gate_proj", f"{at}.up_proj"]
        if any(map(self._is_plain, sources)):
            gate, up = (self._linear(f"{name}.{i}", x, [s], bias=bias) for i, s in enumerate(sources))
            hidden = self._apply_gate(name, gate, up)
        else:
            hidden = self._product(f"{name}.in", x, sources, bias=bias, gated=True)
        return self._linear(f"{name}.down", hidden, [f"{at}.down_proj"], bias=bias)

    def _experts(self, experts: ExpertsSpec, name: str, at: str, x: str) -> str:
        scores = self._linear(f"{name}.router", x, [f"{at}.gate"], bias=experts.router_bias)
        selection = ""
        if experts.selection_bias:
            selection = self._vector(f"{name}.selection", f"{at}.gate.e_score_correction_bias")
        shared = gate = ""
        if experts.shared:
            shared = self._feed_forward(f"{name}.shared", f"{at}.shared_expert", x, bias=False)
            if experts.shared_gate:
                gate = self._linear(f"{name}.shared.gate", x, [f"{at}.shared_expert_gate"], bias=False)
        parts = ["gate_up", "gate_up", "down"] if experts.fused else ["gate", "up", "down"]
        tables = [self._stored_input(f"{at}.experts.{part}_proj.weight") for part in parts]
        biases = ["", "", ""]
        if experts.bias:
            biases = [self._vector(f"{name}.{part}.bias", f"{at}.experts.{part}_proj.bias") for part in parts]
        return self._node(
            "Experts",
            [x, scores, selection, *(table for table, _ in tables), *biases, shared, gate],
            [f"{name}.experts"],
            domain=DOMAIN,
            types=[kind for _, kind in tables],
            count=experts.count,
            top=experts.top,
            width=experts.width,
            normalised=int(experts.normalised),
            sigmoid=int(experts.sigmoid),
            fused=int(experts.fused),
            scale=float(experts.scale),
            limit=float(experts.limit),
        )[0]


class PredictorBuilder(FamilyBuilder):
    """The predictor alone: `input_ids` and, for each of them, the stream of the token before in `previous` ->
    `logits` of the tokens after, and `hidden`, the predictor's own stream, from which it can continue."""

    asks_rows = False

    def model(self) -> onnx.ModelProto:
        spec, at = self.spec, "mtp.layers.0"
        self._tables()
        self._embed("input_ids")
        residual = self._join_inputs("previous")
        normed = self._norm("mtp.first", residual, f"{at}.input_layernorm.weight")
        attention = self._attention(spec.layers, at, normed)
        before_mlp = f"{at}.post_attention_layernorm.weight"
        normed, residual = self._skip_norm("mtp.norm.mlp", attention, residual, before_mlp)
        mlp = self._mlp(spec.layers, at, normed)
        stream, _ = self._skip_norm("mtp.norm.out", mlp, residual, "mtp.norm.weight", last=True)
        self._node("Identity", [stream], ["hidden"])
        self._logits(stream)
        return self._assemble()

    @property
    def _kv_layers(self) -> Sequence[int]:
        return (self.spec.layers,)

    def _further_inputs(self) -> list[onnx.ValueInfoProto]:
        rows = helper.make_tensor_value_info("previous", TensorProto.FLOAT, [1, "rows", self.spec.hidden])
        return [*self._matrices.values(), rows]

    def _further_outputs(self) -> list[onnx.ValueInfoProto]:
        return super()._further_outputs()[:1]

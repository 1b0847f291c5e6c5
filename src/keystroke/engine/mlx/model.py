"""The forward pass in MLX, from the specification of a model.

Keys and values are immutable arrays that each run replaces: sessions share them until one of them writes, and
MLX reuses the memory where there is no other reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from keystroke.engine.checkpoint import ModelSpec
from keystroke.engine.checkpoint.rope import inverse_frequencies
from keystroke.engine.checkpoint.spec import LatentSpec, RopeSpec
from keystroke.engine.mlx.delta_net import DeltaInputs, DeltaLayer, DeltaRun, DeltaState
from keystroke.engine.mlx.weights import (
    ExpertMatrices,
    MlxWeights,
    WeightMatrix,
    split_products,
    take_stacked,
)

# Keys and values of every layer with attention, [1, kv heads, capacity, head size]. Latents are both.
LayerCache = tuple[mx.array, ...]
Cache = list[LayerCache]


@dataclass(frozen=True, slots=True)
class MlxRun:
    """The results of a run. Nothing is computed yet."""

    logits: mx.array | None  # of the last rows, as many as were asked for
    cache: Cache  # with all rows
    states: list[DeltaRun]  # what recurrent layers made of the rows
    embedded: mx.array  # [1, rows, hidden]
    residuals: list[mx.array]  # the residual stream before the layers that were asked for, [1, rows, hidden]


class MlxModel:
    def __init__(self, spec: ModelSpec, weights: MlxWeights) -> None:
        self.spec = spec
        self.dtype = weights.dtype
        self._vectors = weights.vectors
        self._embedding = weights.matrices["model.embed_tokens"]
        self.head = self._embedding if spec.tied else weights.matrices["lm_head"]
        self._frequencies = _frequencies(spec)
        window = spec if spec.window_rope is None else replace(spec, rope=spec.window_rope)
        self._window_frequencies = _frequencies(window)
        self._layers = [MlxLayer(self, weights, n, f"model.layers.{n}") for n in range(spec.layers)]
        # Nothing may be left to compute: arrays can be shared between threads, computations cannot.
        mx.eval(self._frequencies, self._window_frequencies)

    @property
    def arrays_per_layer(self) -> int:
        return 1 if self.spec.latent is not None else 2

    @property
    def attention_layers(self) -> int:
        """The number of layers with keys and values."""
        return sum(layer.delta is None for layer in self._layers)

    def new_cache(self, capacity: int, layers: int) -> Cache:
        shape = (1, self.spec.kv_heads, capacity, self.spec.head_dim)
        return [
            tuple(mx.zeros(shape, self.dtype) for _ in range(self.arrays_per_layer)) for _ in range(layers)
        ]

    def embed(self, tokens: Sequence[int]) -> mx.array:
        x = self._embedding.rows(mx.array(list(tokens))).astype(self.dtype)[None]
        return x if self.spec.embedding_scale == 1.0 else x * self.spec.embedding_scale

    def run(
        self,
        tokens: Sequence[int],
        start: int,
        rows: int,
        cache: Cache,
        states: Sequence[DeltaState] = (),
        reads: Sequence[int] = (),
    ) -> MlxRun:
        """Run `tokens` from `start` on, with the logits of the last `rows`, the `states` of recurrent layers
        at `start`, and the residual streams before the layers `reads`, the end of all layers included."""
        x = embedded = self.embed(tokens)
        following: Cache = []
        runs: list[DeltaRun] = []
        residuals: list[mx.array] = []
        caches, held = iter(cache), iter(states)
        for number, layer in enumerate(self._layers):
            if number in reads:
                residuals.append(x)
            if layer.delta is not None:
                x, run = layer.recur(x, next(held), max(rows - 1, 0))
                runs.append(run)
            else:
                x, now = layer(x, start, next(caches))
                following.append(now)
        if len(self._layers) in reads:
            residuals.append(x)
        logits = None
        if rows:
            logits = self.head(self.norm(x[:, -rows:], "model.norm"))[0].astype(mx.float32)
        return MlxRun(logits, following, runs, embedded, residuals)

    def repeat(
        self, states: Sequence[DeltaState], inputs: Sequence[DeltaInputs], rows: int
    ) -> list[DeltaState]:
        """The states of recurrent layers after the first `rows` of `inputs`."""
        layers = [layer.delta for layer in self._layers if layer.delta is not None]
        return [
            layer.repeat(state, each, rows) for layer, state, each in zip(layers, states, inputs, strict=True)
        ]

    def norm(self, x: mx.array, name: str, epsilon: float | None = None) -> mx.array:
        return mx.fast.rms_norm(x, self._vectors[name], epsilon or self.spec.norm_eps)

    def vector(self, name: str) -> mx.array | None:
        return self._vectors.get(name)

    def rotate(self, x: mx.array, start: int, layer: int) -> mx.array:
        spec = self.spec
        if layer in spec.unrotated:
            return x
        windowed = layer in spec.windowed and spec.window_rope is not None
        rope = spec.window_rope if windowed and spec.window_rope is not None else spec.rope
        frequencies = self._window_frequencies if windowed else self._frequencies
        pairs = spec.latent is not None and spec.latent.interleaved
        turned = mx.fast.rope(
            x, spec.rotated, traditional=pairs, base=None, scale=1.0, offset=start, freqs=frequencies
        )
        if rope.scaling != "yarn" or rope.attention_factor == 1.0:
            return turned
        scaled = turned[..., : spec.rotated] * rope.attention_factor
        return mx.concatenate([scaled, turned[..., spec.rotated :]], axis=-1)


class MlxLayer:
    def __init__(self, model: MlxModel, weights: MlxWeights, number: int, at: str) -> None:
        """The layer with the weights `at`."""
        self._model, self._number, self._at = model, number, at
        spec, found = model.spec, weights.matrices
        attention = f"{self._at}.self_attn"
        self.delta: DeltaLayer | None = None
        self._window = spec.window if number in spec.windowed else 0
        if spec.delta is not None and number in spec.delta.layers:
            self.delta = DeltaLayer(spec, weights, f"{self._at}.linear_attn")
        elif spec.latent is not None:
            self._queries = [found[name] for name in _query_names(spec.latent, attention)]
            self._latents = found[f"{attention}.kv_a_proj_with_mqa"]
            self._key_up, self._value_up = (
                found[f"{attention}.{part}_b_proj"].experts(spec.heads) for part in "kv"
            )
        else:
            self._qkv = take_stacked([f"{attention}.{part}_proj" for part in "qkv"], found)
        if self.delta is None:
            self._out = found[f"{attention}.o_proj"]
        self._feed_forward: Callable[[mx.array], mx.array]
        if spec.has_experts(number):
            self._feed_forward = _Mixture(model, weights, f"{self._at}.mlp")
        else:
            self._feed_forward = GatedNetwork(found, f"{self._at}.mlp", spec.activation)

    def __call__(self, x: mx.array, start: int, kept: LayerCache) -> tuple[mx.array, LayerCache]:
        attend = self._attend if self._model.spec.latent is None else self._attend_latents
        attended, now = attend(self._normalise(x), start, kept)
        return self._add_residual(x, attended), now

    def recur(self, x: mx.array, state: DeltaState, drafted: int) -> tuple[mx.array, DeltaRun]:
        assert self.delta is not None
        out, run = self.delta(self._normalise(x), state, drafted)
        return self._add_residual(x, out), run

    def _normalise(self, x: mx.array) -> mx.array:
        return self._model.norm(x, f"{self._at}.input_layernorm")

    def _add_residual(self, x: mx.array, attended: mx.array) -> mx.array:
        """The layer's result, from its input and the output of its attention."""
        model, at = self._model, self._at
        if not model.spec.post_norms:
            x = x + attended
            return x + self._feed_forward(model.norm(x, f"{at}.post_attention_layernorm"))
        x = x + model.norm(attended, f"{at}.post_attention_layernorm")
        fed = self._feed_forward(model.norm(x, f"{at}.pre_feedforward_layernorm"))
        return x + model.norm(fed, f"{at}.post_feedforward_layernorm")

    def _attend(self, x: mx.array, start: int, kept: LayerCache) -> tuple[mx.array, LayerCache]:
        model, spec, rows = self._model, self._model.spec, x.shape[1]
        gates = 2 if spec.gated_attention else 1
        sizes = [gates * spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim]
        parts = split_products(self._qkv, x, [sizes[0], sizes[0] + sizes[1]])

        q, k, v = (
            part.reshape(1, rows, count, -1)
            for part, count in zip(parts, (spec.heads, spec.kv_heads, spec.kv_heads), strict=True)
        )
        gate = None
        if spec.gated_attention:
            q, gate = mx.split(q, 2, axis=-1)
        if spec.qk_norm:
            q = model.norm(q, f"{self._at}.self_attn.q_norm")
            k = model.norm(k, f"{self._at}.self_attn.k_norm")
        q, k, v = (each.swapaxes(1, 2) for each in (q, k, v))
        q, k = model.rotate(q, start, self._number), model.rotate(k, start, self._number)
        if spec.rope.query_growth:
            q = q * _growth(spec.rope, start, rows).astype(q.dtype)
        place, end = mx.array([start]), start + rows
        keys = mx.slice_update(kept[0], k, place, axes=(2,))
        values = mx.slice_update(kept[1], v, place, axes=(2,))
        sinks = f"{self._at}.self_attn.sinks"
        out = mx.fast.scaled_dot_product_attention(
            q,
            keys[:, :, :end],
            values[:, :, :end],
            scale=spec.query_scale,
            mask=_mask(start, rows, self._window),
            sinks=model.vector(sinks),
        )
        out = out.swapaxes(1, 2)
        if gate is not None:
            out = out * mx.sigmoid(gate)
        return self._out(out.reshape(1, rows, -1)), (keys, values)

    def _attend_latents(self, x: mx.array, start: int, kept: LayerCache) -> tuple[mx.array, LayerCache]:
        model, spec, rows = self._model, self._model.spec, x.shape[1]
        latent, at = spec.latent, f"{self._at}.self_attn"
        assert latent is not None
        queries = self._queries[0](x)
        if latent.query_rank:
            queries = self._queries[1](model.norm(queries, f"{at}.q_a_layernorm", latent.norm_eps))
        queries = queries.reshape(rows, spec.heads, -1).swapaxes(0, 1)
        plain, turned = mx.split(queries, [latent.unrotated], axis=-1)
        mixed, key = mx.split(self._latents(x), [latent.rank], axis=-1)
        mixed = model.norm(mixed, f"{at}.kv_a_layernorm", latent.norm_eps)
        q = mx.concatenate([turned, self._key_up.product(plain)], axis=-1)[None]
        k = mx.concatenate([key, mixed], axis=-1)[:, None]
        q, k = model.rotate(q, start, self._number), model.rotate(k, start, self._number)
        keys, end = mx.slice_update(kept[0], k, mx.array([start]), axes=(2,)), start + rows
        seen = keys[:, :, :end]
        out = mx.fast.scaled_dot_product_attention(
            q, seen, seen[..., latent.rotated :], scale=spec.query_scale, mask=_mask(start, rows, 0)
        )
        out = self._value_up.product(out[0]).swapaxes(0, 1)
        return self._out(out.reshape(1, rows, -1)), (keys,)


def _query_names(latent: LatentSpec, at: str) -> list[str]:
    return [f"{at}.q_a_proj", f"{at}.q_b_proj"] if latent.query_rank else [f"{at}.q_proj"]


class GatedNetwork:
    def __init__(self, found: dict[str, WeightMatrix], at: str, activation: str) -> None:
        self._in = take_stacked([f"{at}.gate_proj", f"{at}.up_proj"], found)
        self._down, self._width = found[f"{at}.down_proj"], found[f"{at}.down_proj"].columns
        self._activation = _gelu if activation == "gelu" else _silu

    def __call__(self, x: mx.array) -> mx.array:
        gate, up = split_products(self._in, x, [self._width])
        return self._down(self._activation(gate) * up)


class _Mixture:
    """A router and experts, of which every token uses some."""

    def __init__(self, model: MlxModel, weights: MlxWeights, at: str) -> None:
        experts = model.spec.experts
        assert experts is not None
        self._spec, self._router = experts, weights.matrices[f"{at}.gate"]
        self._selection = weights.vectors.get(f"{at}.gate.e_score_correction_bias")
        names = ("gate_up",) if experts.fused else ("gate", "up")
        found = weights.matrices
        self._in: list[ExpertMatrices] = [
            found[f"{at}.experts.{n}_proj"].experts(experts.count) for n in names
        ]
        self._down = found[f"{at}.experts.down_proj"].experts(experts.count)
        self._shared = None
        if experts.shared:
            self._shared = GatedNetwork(found, f"{at}.shared_expert", "silu")
        self._shared_gate = found.get(f"{at}.shared_expert_gate")

    def __call__(self, x: mx.array) -> mx.array:
        spec, rows = self._spec, x[0]
        scores = self._router(rows).astype(mx.float32)
        scores = mx.sigmoid(scores) if spec.sigmoid else mx.softmax(scores, axis=-1)
        ranked = scores if self._selection is None else scores + self._selection
        chosen = mx.argpartition(-ranked, spec.top - 1, axis=-1)[:, : spec.top]
        chosen = mx.sort(chosen, axis=-1)  # in a fixed order, so that sums are
        shares = mx.take_along_axis(scores, chosen, axis=-1)
        if spec.normalised:
            shares = shares / shares.sum(axis=-1, keepdims=True)
        shares = (shares * spec.scale).astype(x.dtype)
        wide = rows[:, None, None, :]
        made = [matrix(wide, chosen) for matrix in self._in]
        gate, up = mx.split(made[0], 2, axis=-1) if spec.fused else made
        if spec.limit:
            gate = mx.minimum(gate, spec.limit)
            up = mx.clip(up, -spec.limit, spec.limit)
            hidden = gate * mx.sigmoid(gate * 1.702) * (up + 1)
        else:
            hidden = _silu(gate) * up
        out = self._down(hidden, chosen)[:, :, 0, :]
        mixed = (out * shares[..., None]).sum(axis=1)
        if self._shared is not None:
            added = self._shared(rows)
            if self._shared_gate is not None:
                added = added * mx.sigmoid(self._shared_gate(rows))
            mixed = mixed + added
        return mixed[None]


def _growth(rope: RopeSpec, start: int, rows: int) -> mx.array:
    """The factors by which queries grow with their position, [rows, 1]."""
    turns = np.arange(start, start + rows) // rope.original_context
    return mx.array((1 + rope.query_growth * np.log1p(turns)).astype(np.float32))[:, None]


def _silu(x: mx.array) -> mx.array:
    return x * mx.sigmoid(x)


def _gelu(x: mx.array) -> mx.array:
    return 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _frequencies(spec: ModelSpec) -> mx.array:
    """As MLX takes them: positions a radian."""
    return mx.array((1.0 / inverse_frequencies(spec)).astype(np.float32))


def _mask(start: int, rows: int, window: int) -> str | mx.array | None:
    """Which keys a row sees: those before it, and of these the last `window` if it has one."""
    end = start + rows
    if not window or end <= window:
        return None if rows == 1 else "causal"
    position, key = mx.arange(start, end)[:, None], mx.arange(end)[None]
    return (key <= position) & (key > position - window)

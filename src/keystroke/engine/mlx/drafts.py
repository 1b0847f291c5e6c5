"""Layers that draft on MLX: the MTP layer of a model's own files, and a trained draft head.

Both read a token and the stream of the token before, and have one layer of keys and values, the last of a
session's. What they write beyond the session's tokens is overwritten when these are known.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from keystroke.engine.mlx.model import GatedNetwork, LayerCache, MlxLayer, MlxModel, MlxRun
from keystroke.engine.mlx.weights import MlxWeights, scaled_rows, split_products, take_stacked
from keystroke.engine.speculative.head_file import HeadWeights
from keystroke.engine.speculative.layer_draft import LayerDrafter


class MlxDrafter(LayerDrafter, ABC):
    most: int  # tokens of a draft
    nbytes: int  # of its weights
    reads: tuple[int, ...]  # layers before which the model's residual stream is read; their number: the end

    def __init__(self, model: MlxModel) -> None:
        self._model = model

    @abstractmethod
    def stream(self, residuals: Sequence[mx.array]) -> mx.array:
        """What the layer reads of each token, [1, rows, hidden], from the residual streams at `reads`."""

    @abstractmethod
    def write(self, embedded: mx.array, before: mx.array, start: int, kept: LayerCache) -> LayerCache:
        """Keys and values with those of tokens from `start` on, and the stream `before` each of them."""

    @abstractmethod
    def step(
        self, embedded: mx.array, before: mx.array, position: int, kept: LayerCache
    ) -> tuple[mx.array, LayerCache]:
        """The layer's own stream after one token, from which it can continue, and its keys and values."""

    @abstractmethod
    def logits(self, stream: mx.array) -> mx.array: ...

    def token_of(self, row: int) -> int:
        """The token of a row of logits."""
        return row

    def follow(
        self, run: MlxRun, start: int, before: mx.array | None, kept: LayerCache
    ) -> tuple[mx.array, LayerCache]:
        """After a run of the model: the stream of its rows, [rows, hidden], and the keys and values."""
        streams = self.stream(run.residuals)
        first = mx.zeros_like(streams[:, :1]) if before is None else before[None, None]
        shifted = mx.concatenate([first, streams[:, :-1]], axis=1)
        return streams[0], self.write(run.embedded, shifted, start, kept)

    def next_logits(
        self, token: int, position: int, before: mx.array, kept: LayerCache
    ) -> tuple[mx.array, mx.array, LayerCache]:
        """Of one token: the logits of what follows it, its stream [hidden], and the keys and values."""
        embedded = self._model.embed([token])
        stream, now = self.step(embedded, before[None, None], position, kept)
        return self.logits(stream)[0, 0].astype(mx.float32), stream[0, 0], now


class MlxPredictor(MlxDrafter):
    most = 3  # later ones are rarely right: there is one layer, trained to predict one token

    def __init__(self, model: MlxModel, weights: MlxWeights) -> None:
        super().__init__(model)
        names = [name for name in weights.matrices if name.startswith("mtp.")]
        self.nbytes = sum(array.nbytes for name in names for array in weights.matrices[name].arrays)
        self._layer = MlxLayer(model, weights, model.spec.layers, "mtp.layers.0")
        self._join = weights.matrices["mtp.fc"]
        self.reads = (model.spec.layers,)

    def stream(self, residuals: Sequence[mx.array]) -> mx.array:
        return self._model.norm(residuals[0], "model.norm")

    def write(self, embedded: mx.array, before: mx.array, start: int, kept: LayerCache) -> LayerCache:
        return self.step(embedded, before, start, kept)[1]  # the rest is never computed

    def step(
        self, embedded: mx.array, before: mx.array, position: int, kept: LayerCache
    ) -> tuple[mx.array, LayerCache]:
        norm = self._model.norm
        parts = [norm(embedded, "mtp.pre_fc_norm_embedding"), norm(before, "mtp.pre_fc_norm_hidden")]
        out, now = self._layer(self._join(mx.concatenate(parts, axis=-1)), position, kept)
        return norm(out, "mtp.norm"), now

    def logits(self, stream: mx.array) -> mx.array:
        return self._model.head(stream)


class MlxDraftHead(MlxDrafter):
    most = 6

    def __init__(self, model: MlxModel, head: HeadWeights) -> None:
        """Raises UsageError for a head of another model."""
        super().__init__(model)
        config = self._config = head.config
        config.check_target(model.spec)
        self.reads = config.layers
        found = {f"head.{name}": scaled_rows(*pair, model.dtype) for name, pair in head.matrices.items()}
        self._norms = {name: mx.array(norm).astype(model.dtype) for name, norm in head.norms.items()}
        mx.eval([array for matrix in found.values() for array in matrix.arrays], *self._norms.values())
        self.nbytes = sum(array.nbytes for matrix in found.values() for array in matrix.arrays)
        self._fuse, self._out, self._rows = (found[f"head.{name}"] for name in ("fuse", "o_proj", "out"))
        self._qkv = take_stacked([f"head.{part}_proj" for part in "qkv"], found)
        self._network = GatedNetwork(found, "head", "silu")
        self._vocabulary: npt.NDArray[np.int32] = head.vocabulary

    def token_of(self, row: int) -> int:
        return int(self._vocabulary[row])

    def stream(self, residuals: Sequence[mx.array]) -> mx.array:
        even = [mx.fast.rms_norm(each, None, self._config.norm_eps) for each in residuals]
        return self._fuse(mx.concatenate(even, axis=-1))

    def write(self, embedded: mx.array, before: mx.array, start: int, kept: LayerCache) -> LayerCache:
        return self._queries(embedded, before, start, kept)[1]

    def step(
        self, embedded: mx.array, before: mx.array, position: int, kept: LayerCache
    ) -> tuple[mx.array, LayerCache]:
        queries, now = self._queries(embedded, before, position, kept)
        # Of the first token there is none before: heads were trained without an entry for it.
        keys, values = (each[:, :, 1 : position + 1] for each in now)
        scale = self._config.head_dim**-0.5
        out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale)
        stream = before + self._out(out.swapaxes(1, 2).reshape(1, 1, -1))
        return stream + self._network(self._normalise(stream, "mlp_norm")), now

    def logits(self, stream: mx.array) -> mx.array:
        return self._rows(self._normalise(stream, "norm"))

    def _queries(
        self, embedded: mx.array, before: mx.array, start: int, kept: LayerCache
    ) -> tuple[mx.array, LayerCache]:
        config, rows, rotate = self._config, embedded.shape[1], self._model.rotate
        both = [self._normalise(embedded, "token_norm"), self._normalise(before, "hidden_norm")]
        width, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        parts = split_products(self._qkv, mx.concatenate(both, axis=-1), [width, width + keys])
        q, k, v = (part.reshape(1, rows, -1, config.head_dim).swapaxes(1, 2) for part in parts)
        place = mx.array([start])
        now = (
            mx.slice_update(kept[0], rotate(k, start, 0), place, axes=(2,)),
            mx.slice_update(kept[1], v, place, axes=(2,)),
        )
        return rotate(q, start, 0), now

    def _normalise(self, x: mx.array, name: str) -> mx.array:
        return mx.fast.rms_norm(x, self._norms[name], self._config.norm_eps)

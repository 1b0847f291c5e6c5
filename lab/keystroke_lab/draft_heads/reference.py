"""The reference implementation of a draft head, in plain numpy.

Float32, one token at a time: the tests compare the CUDA kernel and the trained module with it. The caller
supplies the target's features; the head keeps one key and one value per token of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from keystroke.engine.checkpoint.rope import rope_tables
from keystroke.engine.checkpoint.spec import ModelSpec
from keystroke.engine.speculative.head_file import HeadWeights

Float32 = npt.NDArray[np.float32]
Choose = Callable[[Float32, int], int]  # logits over the head's vocabulary, place in the draft -> row


class ReferenceHead:
    """Entry i of its memory is for the feature of token i and token i + 1."""

    def __init__(self, weights: HeadWeights, spec: ModelSpec, embedding: Float32) -> None:
        """`embedding` is the target's, [vocabulary, hidden]. Raises UsageError for another target's head."""
        weights.config.check_target(spec)
        self.config, self.vocabulary = weights.config, weights.vocabulary
        self._embedding = embedding
        self._matrices = {name: weights.matrix(name) for name in weights.matrices}
        self._norms = weights.norms
        self._cosines, self._sines = rope_tables(spec, spec.context_length)
        self._keys: list[Float32] = []
        self._values: list[Float32] = []
        self._last = np.zeros(0, np.float32)  # the result of the newest entry

    @property
    def length(self) -> int:
        return len(self._keys)

    def forget(self, length: int) -> None:
        """Keep the first `length` entries. Call `observe` before drafting again."""
        del self._keys[length:], self._values[length:]

    def observe(self, features: Float32, tokens: Sequence[int]) -> None:
        """Features [n, layers, hidden] of n consecutive tokens, and the token that follows each."""
        for feature, token in zip(features, tokens, strict=True):
            even = feature / np.sqrt(np.square(feature).mean(-1, keepdims=True) + self.config.norm_eps)
            self._last = self._pass(self._matrices["fuse"] @ even.reshape(-1), token)

    def draft(self, count: int, choose_row: Choose) -> list[int]:
        """Draft the tokens after the last observed one. The memory is unchanged afterwards."""
        length, result = self.length, self._last
        drafted: list[int] = []
        for place in range(count):
            if place:
                result = self._pass(result, drafted[-1])
            drafted.append(int(self.vocabulary[choose_row(self.logits(result), place)]))
        self.forget(length)
        return drafted

    def logits(self, result: Float32) -> Float32:
        scores: Float32 = self._matrices["out"] @ self._normed(result, "norm")
        return scores

    def _pass(self, stream: Float32, token: int) -> Float32:
        """The layer's result for a token and the stream before it; stores its key and value."""
        c, m = self.config, self._matrices
        x = np.concatenate(
            (self._normed(self._embedding[token], "token_norm"), self._normed(stream, "hidden_norm"))
        )
        at = self.length
        q = self._rotated((m["q_proj"] @ x).reshape(c.heads, c.head_dim), at)
        self._keys.append(self._rotated((m["k_proj"] @ x).reshape(c.kv_heads, c.head_dim), at))
        self._values.append((m["v_proj"] @ x).reshape(c.kv_heads, c.head_dim))
        keys, values = np.stack(self._keys), np.stack(self._values)
        group = c.heads // c.kv_heads
        mixed = []
        for head in range(c.heads):
            scores = keys[:, head // group] @ q[head] * c.head_dim**-0.5
            weights = np.exp(scores - scores.max())
            mixed.append(weights @ values[:, head // group] / weights.sum())
        stream = stream + m["o_proj"] @ np.concatenate(mixed)
        y = self._normed(stream, "mlp_norm")
        gate = m["gate_proj"] @ y
        result: Float32 = stream + m["down_proj"] @ (gate / (1 + np.exp(-gate)) * (m["up_proj"] @ y))
        return result

    def _normed(self, x: Float32, name: str) -> Float32:
        scale = np.sqrt(np.square(x).mean() + np.float32(self.config.norm_eps))
        normed: Float32 = (x / scale * self._norms[name]).astype(np.float32)
        return normed

    def _rotated(self, x: Float32, position: int) -> Float32:
        first, second = np.split(x, 2, -1)
        cos, sin = self._cosines[position], self._sines[position]
        return np.concatenate((first * cos - second * sin, second * cos + first * sin), -1)

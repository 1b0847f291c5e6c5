"""A trained head drafts for its own target: the plain arithmetic, and the drafter over it.

Numpy in float32, one token at a time, no tricks: what a kernel's drafting is held against. The target's
features come from whoever runs the target (`FeatureSource`); the head keeps keys and values of its own, one
pair a token. It chooses with the sampling of the sequence, at the positions its guesses would have, so drafts
and choices share their noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from keystroke.engine.base import GREEDY, Sampling
from keystroke.engine.checkpoint.rope import rope_tables
from keystroke.engine.checkpoint.spec import ModelSpec
from keystroke.engine.sampler import choose
from keystroke.engine.speculative.base import Drafter
from keystroke.engine.speculative.head_file import HeadWeights

Float32 = npt.NDArray[np.float32]
Choose = Callable[[Float32, int], int]  # logits over the head's vocabulary, place in the draft -> row


class FeatureSource(Protocol):
    """What an engine must tell for a head to draft: the least addition to its contract."""

    def features(self, start: int, stop: int) -> Float32:
        """The residual stream behind each of the head's layers for the tokens [start, stop) of the sequence,
        all of which the target has computed: [stop - start, layers, hidden]."""


class ReferenceHead:
    """Entry i of its memory stands for the feature of token i together with token i + 1."""

    def __init__(self, weights: HeadWeights, spec: ModelSpec, embedding: Float32) -> None:
        """`embedding` is the target's, [vocabulary, hidden]. Raises UsageError for another target's head."""
        weights.config.fits(spec)
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
        """Keep the first `length` entries. What the newest gave is gone: observe before drafting again."""
        del self._keys[length:], self._values[length:]

    def observe(self, features: Float32, tokens: Sequence[int]) -> None:
        """Features [n, layers, hidden] of n consecutive tokens, and the token that follows each."""
        for feature, token in zip(features, tokens, strict=True):
            even = feature / np.sqrt(np.square(feature).mean(-1, keepdims=True) + self.config.norm_eps)
            self._last = self._pass(self._matrices["fuse"] @ even.reshape(-1), token)

    def draft(self, count: int, choose_row: Choose) -> list[int]:
        """Guesses at the tokens behind the last that was observed. Leaves the memory as it was."""
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
        """The layer's result for a token and the stream before it; its key and value are remembered."""
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


class HeadDrafter(Drafter):
    """Drafts with a head for one sequence of its target."""

    def __init__(self, head: ReferenceHead, source: FeatureSource) -> None:
        self._head, self._source = head, source
        self._seen: list[int] = []
        self._sampling = GREEDY

    def choose_by(self, sampling: Sampling) -> None:
        self._sampling = sampling

    def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        """The last of `tokens` may still be pending: its feature is not asked for."""
        count = len(tokens)
        if limit < 1 or count < 2:
            return ()
        same = next(
            (i for i, pair in enumerate(zip(self._seen, tokens, strict=False)) if pair[0] != pair[1]),
            min(len(self._seen), count),
        )
        # The newest entry is read again where nothing is new: it is what drafting goes on from.
        kept = max(0, min(same - 1, count - 2))
        self._head.forget(kept)
        self._head.observe(self._source.features(kept, count - 1), tokens[kept + 1 :])
        self._seen = list(tokens)
        full = np.full(self._head.config.target_vocabulary, -np.inf, np.float32)

        def choose_row(logits: Float32, place: int) -> int:
            full[self._head.vocabulary] = logits
            token = choose(full, self._sampling, count + place)
            return int(np.searchsorted(self._head.vocabulary, token))

        return self._head.draft(limit, choose_row)

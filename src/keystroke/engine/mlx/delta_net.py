"""Gated delta net in MLX: a short convolution over queries, keys and values, then a state for every value
head that decays and is corrected by each row.

States are immutable arrays, so that a snapshot is a reference. Steps go row by row, in the order of the
recurrence; prompts are read in chunks of rows that are solved together, which rounds differently.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from keystroke.engine.checkpoint import ModelSpec
from keystroke.engine.checkpoint.spec import DeltaSpec
from keystroke.engine.mlx.weights import MlxWeights, split_products, take_stacked

# The last inputs of the convolution, [kernel - 1, channels], and the state, [value heads, key, value].
DeltaState = tuple[mx.array, mx.array]
CHUNK = 32  # rows that are solved together


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """What a layer's recurrence reads of each row: [rows, channels] and twice [rows, value heads]."""

    mixed: mx.array
    beta: mx.array
    decay: mx.array  # logarithm of what the state keeps

    def part(self, start: int, end: int) -> DeltaInputs:
        return DeltaInputs(self.mixed[start:end], self.beta[start:end], self.decay[start:end])


@dataclass(frozen=True, slots=True)
class DeltaRun:
    """The results of a layer: its state after the run, after the rows that were sure, and the inputs of the
    rows after those."""

    state: DeltaState
    sure: DeltaState
    drafted: DeltaInputs


def empty_state(delta: DeltaSpec) -> DeltaState:
    inputs = mx.zeros((delta.kernel - 1, delta.channels), mx.float32)
    return inputs, mx.zeros((delta.value_heads, delta.key_size, delta.value_size), mx.float32)


def state_bytes(delta: DeltaSpec) -> int:
    inputs = (delta.kernel - 1) * delta.channels
    return 4 * len(delta.layers) * (inputs + delta.value_heads * delta.key_size * delta.value_size)


class DeltaLayer:
    def __init__(self, spec: ModelSpec, weights: MlxWeights, at: str) -> None:
        assert spec.delta is not None
        self._delta, self._epsilon = spec.delta, spec.norm_eps
        names = [f"{at}.in_proj_{part}" for part in ("qkv", "z", "b", "a")]
        self._in = take_stacked(names, weights.matrices)
        self._out = weights.matrices[f"{at}.out_proj"]
        # Rows of taps, so that a convolution is a sum of products with the inputs of each moment.
        self._taps = weights.vectors[f"{at}.conv1d"].T
        mx.eval(self._taps)
        self._decay, self._bias = weights.vectors[f"{at}.decay"], weights.vectors[f"{at}.dt_bias"]
        self._norm = weights.vectors[f"{at}.norm"]

    def __call__(self, x: mx.array, state: DeltaState, drafted: int) -> tuple[mx.array, DeltaRun]:
        """x [1, rows, hidden]; the last `drafted` rows may be taken back."""
        delta, rows = self._delta, x.shape[1]
        values = delta.channels + delta.values
        edges = [delta.channels, values, values + delta.value_heads]
        mixed, z, b, a = split_products(self._in, x[0], edges)
        inputs = DeltaInputs(
            mixed.astype(mx.float32),
            mx.sigmoid(b.astype(mx.float32)),
            self._decay * _softplus(a.astype(mx.float32) + self._bias),
        )
        sure = rows - drafted
        outs = []
        after = state
        for start, end in ((0, sure), (sure, rows)):
            if start == end:
                marked = after
                continue
            out, after = self._advance(after, inputs.part(start, end))
            outs.append(out)
            if end == sure:
                marked = after
        out = mx.concatenate(outs) if len(outs) > 1 else outs[0]
        gate = z.astype(mx.float32).reshape(rows, delta.value_heads, delta.value_size)
        normed = mx.fast.rms_norm(out, self._norm, self._epsilon)
        gated = (normed * (gate * mx.sigmoid(gate))).reshape(1, rows, -1).astype(x.dtype)
        return self._out(gated), DeltaRun(after, marked, inputs.part(sure, rows))

    def repeat(self, state: DeltaState, inputs: DeltaInputs, rows: int) -> DeltaState:
        """The state after the first `rows` of `inputs`."""
        return self._advance(state, inputs.part(0, rows))[1]

    def _advance(self, state: DeltaState, inputs: DeltaInputs) -> tuple[mx.array, DeltaState]:
        """The results of all rows, [rows, value heads, value], and the state after them."""
        delta, rows = self._delta, inputs.mixed.shape[0]
        seen = mx.concatenate([state[0], inputs.mixed])
        mixed = seen[:rows] * self._taps[0]
        for tap in range(1, delta.kernel):
            mixed = mixed + seen[tap : tap + rows] * self._taps[tap]
        mixed = mixed * mx.sigmoid(mixed)
        q, k, v = mx.split(mixed, [delta.keys, 2 * delta.keys], axis=-1)
        q, k = (_unit(part.reshape(rows, delta.key_heads, delta.key_size)) for part in (q, k))
        q = q * delta.key_size**-0.5
        shared = delta.value_heads // delta.key_heads
        if shared > 1:
            q, k = (
                mx.tile(part, (1, shared, 1)) if delta.tiled else mx.repeat(part, shared, axis=1)
                for part in (q, k)
            )
        v = v.reshape(rows, delta.value_heads, delta.value_size)
        recurrence = _read if rows >= CHUNK else _step
        out, after = recurrence(state[1], (q, k, v), inputs)
        return out, (seen[-(delta.kernel - 1) :], after)


def _step(
    state: mx.array, qkv: tuple[mx.array, mx.array, mx.array], inputs: DeltaInputs
) -> tuple[mx.array, mx.array]:
    """Row by row."""
    q, k, v = qkv
    keep = mx.exp(inputs.decay)
    outs = []
    for row in range(q.shape[0]):
        state = state * keep[row, :, None, None]
        key = k[row, :, :, None]
        wrong = v[row] - (state * key).sum(axis=1)
        state = state + key * (wrong * inputs.beta[row, :, None])[:, None]
        outs.append((state * q[row, :, :, None]).sum(axis=1))
    return mx.stack(outs), state


def _read(
    state: mx.array, qkv: tuple[mx.array, mx.array, mx.array], inputs: DeltaInputs
) -> tuple[mx.array, mx.array]:
    """In chunks. Within one, the correction of row i is u_i = beta_i (v_i - d_i k_i S - sum_j<i d_i/d_j (k_i
    k_j) u_j), where S is the state before the chunk and d_i the product of what is kept up to row i: a
    triangular system, which is solved row by row for all chunks at once."""
    rows = qkv[0].shape[0]
    missing = -rows % CHUNK

    def split_chunks(part: mx.array) -> mx.array:
        """[rows, heads, ...] -> [chunks, heads, CHUNK, ...]; missing rows are zero and change nothing."""
        if missing:
            part = mx.concatenate([part, mx.zeros((missing, *part.shape[1:]), part.dtype)])
        return part.reshape(-1, CHUNK, *part.shape[1:]).swapaxes(1, 2)

    q, k, v = map(split_chunks, qkv)
    beta, decay = split_chunks(inputs.beta)[..., None], mx.cumsum(split_chunks(inputs.decay), axis=-1)
    between = mx.tril(mx.exp(mx.minimum(decay[..., :, None] - decay[..., None, :], 0.0)))
    kept = mx.exp(decay)[..., None]
    coupled = mx.tril(beta * (k @ k.swapaxes(-1, -2)) * between, k=-1)
    # The inverse of 1 + coupled, row by row.
    solved = [mx.zeros((*coupled.shape[:2], 1, CHUNK)) + mx.eye(CHUNK)[:1]]
    for row in range(1, CHUNK):
        above = mx.concatenate(solved, axis=2)
        solved.append(mx.eye(CHUNK)[row : row + 1] - coupled[:, :, row : row + 1, :row] @ above)
    inverse = mx.concatenate(solved, axis=2)
    values, keys = inverse @ (beta * v), inverse @ (beta * k * kept)
    scores = mx.tril((q @ k.swapaxes(-1, -2)) * between)
    last = decay[..., -1:]
    outs = []
    for n in range(q.shape[0]):
        corrections = values[n] - keys[n] @ state
        outs.append((q[n] * kept[n]) @ state + scores[n] @ corrections)
        later = mx.exp(last[n] - decay[n])[..., None]
        state = state * mx.exp(last[n])[..., None] + (k[n] * later).swapaxes(-1, -2) @ corrections
    out = mx.stack(outs).swapaxes(1, 2)  # [chunks, CHUNK, heads, value]
    return out.reshape(-1, *out.shape[2:])[:rows], state


def _softplus(x: mx.array) -> mx.array:
    return mx.logaddexp(x, mx.array(0.0))


def _unit(x: mx.array) -> mx.array:
    return x * mx.rsqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)

"""The reference for quantised models: the same weights as 32-bit floats, in one forward pass.

Plain arithmetic, layer after layer, with the floats of one layer in memory at a time; independent of
engines. Models of the plain Llama shape only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from keystroke.engine.checkpoint import EMBEDDING, Checkpoint, rope_tables

Floats = npt.NDArray[np.float32]


def widened_logprobs(checkpoint: Checkpoint, tokens: Sequence[int]) -> npt.NDArray[np.float64]:
    """Log probabilities of what follows each of `tokens`. Raises ValueError for other architectures."""
    spec, count = checkpoint.spec, len(tokens)
    if (beyond := spec.unsupported_feature()) or spec.qk_norm:
        raise ValueError(
            f"{spec.name} has {beyond or 'normalised heads'}; the reference knows plain Llamas only"
        )
    cos, sin = (np.asarray(table[:count], np.float32)[:, None] for table in rope_tables(spec, count))
    unseen = np.triu(np.full((count, count), -np.inf, np.float32), 1)

    def normed(x: Floats, name: str) -> Floats:
        scaled: Floats = x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(spec.norm_eps))
        return scaled * checkpoint.tensor(name)

    def linear(x: Floats, name: str, *, bias: bool) -> Floats:
        out: Floats = x @ checkpoint.tensor(f"{name}.weight").T
        return out + checkpoint.tensor(f"{name}.bias") if bias else out

    def turned(heads: Floats) -> Floats:
        a, b = np.split(heads, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    x = checkpoint.tensor(EMBEDDING)[list(tokens)]
    for layer in range(spec.layers):
        at = f"model.layers.{layer}"
        h = normed(x, f"{at}.input_layernorm.weight")
        q, k, v = (
            linear(h, f"{at}.self_attn.{part}_proj", bias=spec.qkv_bias).reshape(count, -1, spec.head_dim)
            for part in "qkv"
        )
        group = spec.heads // spec.kv_heads
        k, v = np.repeat(turned(k), group, axis=1), np.repeat(v, group, axis=1)
        scores = (
            np.einsum("qhd,khd->hqk", turned(q), k, optimize=True) * np.float32(spec.query_scale) + unseen
        )
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weights, v, optimize=True).reshape(count, -1)
        x = x + linear(mixed, f"{at}.self_attn.o_proj", bias=spec.o_bias)
        h = normed(x, f"{at}.post_attention_layernorm.weight")
        gate = linear(h, f"{at}.mlp.gate_proj", bias=spec.mlp_bias)
        hidden = gate / (1 + np.exp(-gate)) * linear(h, f"{at}.mlp.up_proj", bias=spec.mlp_bias)
        x = x + linear(hidden, f"{at}.mlp.down_proj", bias=spec.mlp_bias)
    head = EMBEDDING if spec.tied else "lm_head.weight"
    return log_softmax(normed(x, "model.norm.weight") @ checkpoint.tensor(head).T)


def log_softmax(logits: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    found: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return found


def divergence(reference: npt.NDArray[np.float64], found: npt.NDArray[np.float64]) -> float:
    """Mean KL divergence of `found` from `reference`, in nats a token."""
    return float((np.exp(reference) * (reference - found)).sum(axis=-1).mean())

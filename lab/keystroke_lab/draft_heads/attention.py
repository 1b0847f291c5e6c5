"""Attention of a drafted token: over the tokens of the text, and over the drafts that led to it.

Drafting starts at every position i of a text. In pass s, the query of position i attends to the keys of the
first pass up to i, and to the keys of position i alone in the later passes up to s. `plain` is the reference;
`merged` computes the same, forwards and backwards, from a library's causal attention and its log-sum-exp,
without storing the scores. Tensors are [rows, heads, length, head_dim], all with the same number of heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_ops = torch.ops.aten


def plain(q: Tensor, k: Tensor, v: Tensor, own: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The reference. `own` are keys and values of the passes after the first."""
    scale = q.size(-1) ** -0.5
    scores = (q @ k.mT) * scale
    hidden = torch.ones(q.size(2), k.size(2), dtype=torch.bool, device=q.device).triu(1)
    parts = [scores.masked_fill(hidden, float("-inf"))]
    parts += [(q * key).sum(-1, keepdim=True) * scale for key, _ in own]
    weights = torch.cat(parts, -1).softmax(-1)
    mixed = weights[..., : k.size(2)] @ v
    for n, (_, value) in enumerate(own):
        mixed = mixed + weights[..., k.size(2) + n, None] * value
    return mixed


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *own: Tensor) -> Tensor:
        scale = q.size(-1) ** -0.5
        past, log_sum, rest = _forward(q, k, v)
        if own:
            scores = [(q * key).sum(-1, dtype=torch.float32) * scale for key in own[::2]]
            total = torch.logsumexp(torch.stack((log_sum, *scores)), 0)
            mixed = past.float() * (log_sum - total).exp()[..., None]
            for score, value in zip(scores, own[1::2], strict=True):
                mixed += (score - total).exp()[..., None] * value
            past, log_sum = mixed.to(q.dtype), total
        ctx.save_for_backward(q, k, v, past, log_sum, *own)
        ctx.rest = rest
        return past

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        q, k, v, mixed, log_sum, *own = ctx.saved_tensors
        grad = grads[0].contiguous()
        scale = q.size(-1) ** -0.5
        # Given the merged result and log-sum-exp, the library's backward computes the gradients of its part.
        dq, dk, dv = _backward(grad, q, k, v, mixed, log_sum, ctx.rest)
        if not own:
            return dq, dk, dv
        common = (grad.float() * mixed).sum(-1)
        dq = dq.float()
        mine: list[Tensor] = []
        for key, value in zip(own[::2], own[1::2], strict=True):
            weight = ((q * key).sum(-1, dtype=torch.float32) * scale - log_sum).exp()
            push = (weight * ((grad * value).sum(-1, dtype=torch.float32) - common) * scale)[..., None]
            dq += push * key
            mine += [(push * q).to(key.dtype), (weight[..., None] * grad).to(value.dtype)]
        return dq.to(q.dtype), dk, dv, *mine


def merged(q: Tensor, k: Tensor, v: Tensor, own: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    flat = [tensor for pair in own for tensor in pair]
    out: Tensor = _Merged.apply(q, k, v, *flat)  # type: ignore[no-untyped-call]
    return out


def _forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Causal attention, the logarithm of each row's sum of weights, and what the way back needs."""
    if q.is_cuda:
        out, log_sum, *rest = _ops._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False)
        return out, log_sum, tuple(rest)
    out, log_sum = _ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    return out, log_sum, ()


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, rest: tuple[Any, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor]
    if q.is_cuda:
        starts_q, starts_k, most_q, most_k, seed, offset, _ = rest
        found = _ops._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, log_sum, starts_q, starts_k, most_q, most_k, 0.0, True, seed, offset
        )
    else:
        found = _ops._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, log_sum, 0.0, True
        )
    return found

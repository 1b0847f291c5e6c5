"""Step sizes of 8-bit keys and values, one for each dimension of each head.

They follow from the weights alone, so a token's stored KV does not depend on other tokens. Biases make some
key dimensions a hundred times larger than others: one common step or an 8-bit float would lose too much.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keystroke.engine.cuda.plan import PAGE
from keystroke.engine.cuda.prefill import Prefill
from keystroke.engine.cuda.weights import KvSteps, Weights

_MOST = 127
_TOKENS = 2048  # random, always the same
# Headroom above the largest number seen; more makes steps coarser. 1.25 to 1.5 came closest to 16 bits.
_ROOM = 1.5
_FINEST = 1 / 64  # of a head's largest step, for dimensions that the random tokens hardly use


def measure_steps(weights: Weights) -> KvSteps:
    """Step sizes from the 16-bit keys and values of a fixed random text."""
    spec, device = weights.plan.spec, weights.embedding.device
    count = min(_TOKENS, spec.context_length)
    pages = -(-count // PAGE)
    shape = (weights.plan.attention_layers, pages, spec.kv_heads, PAGE, spec.head_dim)
    keys = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    values = torch.zeros_like(keys).transpose(-1, -2).contiguous()
    drawn = torch.randint(0, spec.vocab_size, (count,), generator=torch.Generator().manual_seed(0))
    Prefill(weights, keys, values).run(drawn.tolist(), 0, range(pages))
    # Rotation keeps the length of each pair, so positions do not matter.
    length = torch.hypot(*keys.float().chunk(2, -1)).amax((1, 3))
    if spec.qk_norm:
        length = length.amax(1, keepdim=True).expand_as(length)  # norm weights are shared by all heads
    return KvSteps(_steps(torch.cat((length, length), -1)), _steps(values.float().abs().amax((1, 4))))


def _steps(largest: Tensor) -> Tensor:
    least = largest.amax(-1, keepdim=True).clamp(min=1e-6) * _FINEST
    return (torch.maximum(largest, least) * (_ROOM / _MOST)).contiguous()

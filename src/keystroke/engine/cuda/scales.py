"""How large a step of an 8-bit key or value is: one size for each dimension of each head.

Sizes follow from the weights alone, so what is stored for a token never depends on the text around it
or on its company. Biases make some dimensions of a key a hundred times larger than others: one size for all
would wipe out the rest, and a float of eight bits, whose steps grow with the number, spoils just those.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keystroke.engine.cuda.plan import PAGE
from keystroke.engine.cuda.prefill import Prefill
from keystroke.engine.cuda.weights import KvSteps, Weights

_MOST = 127
_TOKENS = 2048  # that are read to see how large numbers get: drawn from the vocabulary, always the same
# Room above the largest number seen. Beyond it numbers saturate, and more room makes coarser steps; on our
# own model real text comes nearest to 16 bits with 1.25 to 1.5.
_ROOM = 1.5
_FINEST = 1 / 64  # of a head's largest step: what the tokens above hardly used may matter elsewhere


def measure_steps(weights: Weights) -> KvSteps:
    """Reads a fixed text of random tokens with 16-bit keys and values, and looks how large they get."""
    spec, device = weights.plan.spec, weights.embedding.device
    count = min(_TOKENS, spec.context_length)
    pages = -(-count // PAGE)
    keys = torch.zeros(
        spec.layers, pages, spec.kv_heads, PAGE, spec.head_dim, dtype=torch.bfloat16, device=device
    )
    values = torch.zeros_like(keys).transpose(-1, -2).contiguous()
    drawn = torch.randint(0, spec.vocab_size, (count,), generator=torch.Generator().manual_seed(0))
    Prefill(weights, keys, values).run(drawn.tolist(), 0, range(pages))
    # Rotation moves numbers between two partners and leaves their common length: position does not matter.
    length = torch.hypot(*keys.float().chunk(2, -1)).amax((1, 3))
    if spec.qk_norm:
        length = length.amax(1, keepdim=True).expand_as(length)  # as the norm's weights: one for all heads
    return KvSteps(_steps(torch.cat((length, length), -1)), _steps(values.float().abs().amax((1, 4))))


def _steps(largest: Tensor) -> Tensor:
    least = largest.amax(-1, keepdim=True).clamp(min=1e-6) * _FINEST
    return (torch.maximum(largest, least) * (_ROOM / _MOST)).contiguous()

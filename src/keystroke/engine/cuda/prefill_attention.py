"""Attention of a prefill portion over the whole context, with the kernels of torch.

The context is split into pieces; each gives weighted values and their log-sum-exp, by which they are combined
exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

# On Hopper cuDNN's attention is twice as fast as flash attention, but aligns its causal mask with the first
# key, and a new shape costs 50 ms. So it computes the past, which every row sees, in pieces of one length for
# portions of a multiple of 1,024 rows. Flash attention does the rest, and everything on other GPUs.
PIECE = 16_384
_ROWS = 1024

KeysValues = tuple[Tensor, Tensor]  # [kv_heads, ..., head_dim] each
Part = tuple[Tensor, Tensor]  # [heads, rows, head_dim] and, float32, [heads, rows]


def piece_starts(start: int, rows: int) -> list[int]:
    """Where the pieces before a portion of `rows` rows at `start` begin."""
    return list(range(0, start - PIECE + 1, PIECE)) if rows % _ROWS == 0 else []


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: Iterable[KeysValues] = (),
    *,
    sinks: Tensor | None = None,
    window: int = 0,
) -> Tensor:
    """Attention [rows, heads * head_dim] of queries [heads, rows, head_dim]: causal over `k` and `v`, aligned
    at their end, and full over the pieces of `past`. `sinks` [heads] are log2 of the weight that each head
    gives to no key; with a `window` a row sees so many keys."""
    out, total = _part(q, k, v, causal=True, window=window)
    for piece in past:
        more, weight = _part(q, *piece, causal=False)
        out = torch.lerp(out.float(), more.float(), torch.sigmoid(weight - total)[..., None])
        total = torch.logaddexp(total, weight)
    if sinks is not None:
        out = out.float() * torch.sigmoid(total - (sinks * math.log(2))[:, None])[..., None]
    return out.transpose(0, 1).reshape(q.shape[1], -1).to(torch.bfloat16)


def _part(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int = 0) -> Part:
    rows, scale = q.shape[1], q.shape[-1] ** -0.5
    if not q.is_cuda:
        return _reference(q.float(), k.float(), v.float(), scale, causal=causal, window=window)
    if window:
        found = torch.ops.aten._flash_attention_forward(
            *(each.transpose(0, 1)[None] for each in (q, k, v)),
            *(None, None, rows, k.shape[1], 0.0, True, False),
            scale=scale,
            window_size_left=window - 1,
            window_size_right=0,
        )
        return found[0][0].transpose(0, 1), found[1][0].view(-1, rows)
    hopper = torch.cuda.get_device_capability(q.device)[0] == 9
    q, k, v = q[None], k[None], v[None]
    # Flash attention aligns its causal mask with the last key, as needed here.
    if causal or not hopper or q.shape[-1] > 128:
        found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    else:
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, False, False, scale=scale
        )
    return found[0][0], found[1][0].view(-1, rows)


def _reference(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool, window: int) -> Part:
    k, v = (t.repeat_interleave(len(q) // len(t), 0) for t in (k, v))
    scores = q @ k.transpose(1, 2) * scale
    if causal:
        visible = torch.ones(scores.shape[1:], dtype=torch.bool)
        hidden = visible.triu(scores.shape[2] - scores.shape[1] + 1)
        if window:
            hidden |= visible.tril(scores.shape[2] - scores.shape[1] - window)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)

"""Cross entropy of the head's guesses against the target's own distribution.

The target's distribution is given as its likeliest tokens inside the head's vocabulary and their
probabilities over the whole vocabulary. Logits are never stored: a part of the rows is computed forwards and
backwards at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

_PART = 8192  # rows at a time


class _Distilled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, out: Tensor, places: Tensor, chances: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(x.device.type, enabled=False):  # it would widen what is largest
            dx, dout, loss, right = _both_ways(x, out, places, chances, weights)
        ctx.save_for_backward(dx, dout)
        ctx.mark_non_differentiable(right)
        return loss, right

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx, dout = ctx.saved_tensors
        return dx * grads[0].to(dx.dtype), dout * grads[0], None, None, None


def _both_ways(
    x: Tensor, out: Tensor, places: Tensor, chances: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x and of the matrix, the loss, and which rows are right."""
    matrix = out.to(x.dtype)
    dx, dout = torch.empty_like(x), torch.zeros_like(out, dtype=torch.float32)
    loss = torch.zeros((), device=x.device)
    right = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    for first in range(0, len(x), _PART):
        part = slice(first, first + _PART)
        scores = F.linear(x[part], matrix)
        right[part] = scores.argmax(-1) == places[part, 0]
        chance = scores.softmax(-1, dtype=torch.float32)  # near 1, 16 bits cannot tell how near
        wanted = chances[part] * weights[part, None]
        loss -= (wanted * chance.gather(1, places[part]).clamp_min(1e-9).log()).sum()
        chance *= wanted.sum(-1, keepdim=True)
        push = chance.scatter_add_(1, places[part], -wanted).to(x.dtype)
        dx[part] = push @ matrix
        dout += push.mT @ x[part]
    return dx, dout, loss, right


def distillation_loss(
    x: Tensor, out: Tensor, places: Tensor, chances: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """The weighted sum over rows of -sum(p log q), and whether each row's likeliest guess is the target's.

    `x` [rows, hidden] meets the matrix `out`; `places` [rows, k] are the target's likeliest tokens as rows of
    `out`, best first, and `chances` their probabilities."""
    loss, right = _Distilled.apply(x, out, places, chances, weights)  # type: ignore[no-untyped-call]
    return loss, right

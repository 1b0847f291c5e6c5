"""Quantisation: weights to int8 by row or int4 by group of 64, keys and values to bytes.

For int4 each group uses the clipping with the smallest squared error.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 64
_SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8)
_ZERO = 128  # the byte of 0


def rowwise_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Integers in -127 ... 127 and one scale for each row (the last dimension is the row)."""
    wide = rows.float()
    scale = wide.abs().amax(-1).clamp(min=1e-30) / 127
    return (wide / scale[..., None]).round().clamp_(-127, 127).to(torch.int16), scale


def grouped_int4(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Integers in 0 ... 15, the zero point and the scale of each group of 64 columns."""
    wide = rows.float().reshape(*rows.shape[:-1], -1, GROUP)
    low, high = wide.amin(-1).clamp(max=0.0), wide.amax(-1).clamp(min=0.0)
    best = torch.full_like(low, float("inf"))
    scale, zero = torch.ones_like(low), torch.zeros_like(low)
    for shrink in _SHRINK:
        step = ((high - low) * (shrink / 15)).clamp(min=1e-30)
        origin = (-low * shrink / step).round().clamp_(0, 15)
        error = (
            (_quantise(wide, step, origin).sub_(origin[..., None]) * step[..., None] - wide).square_().sum(-1)
        )
        better = error < best
        best = torch.where(better, error, best)
        scale, zero = torch.where(better, step, scale), torch.where(better, origin, zero)
    values = _quantise(wide, scale, zero)
    return values.to(torch.int16).reshape(rows.shape), zero, scale


def to_bytes(numbers: Tensor, steps: Tensor) -> Tensor:
    """Keys or values in steps of this size, zero at 128, saturating as in the kernel."""
    return (numbers / steps + _ZERO).round().clamp(0, 255).to(torch.uint8)


def from_bytes(stored: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Bytes as multiples of the step size, exact in 16 bits; other dtypes unchanged."""
    return stored.to(dtype) - _ZERO if stored.dtype == torch.uint8 else stored


def _quantise(wide: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return (wide / scale[..., None]).round_().add_(zero[..., None]).clamp_(0, 15)

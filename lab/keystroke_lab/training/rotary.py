"""Rotary position embedding, shared by every model of the lab."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_halves(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary embedding of x [..., head_dim], halves paired as Hugging Face pairs them."""
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1).to(x.dtype)

"""The noise of `engine/noise.py` for many rows at once, on any device.

The integers are the same bit for bit. The noise becomes float32 only at the end, where the engines use
float64, so choices can differ where two tokens agree to seven digits.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


def coupled_bits(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """32 random bits as int64 [rows, tokens] for each row's seed and position and each of `tokens`."""
    a = (tokens >> 2)[None, :].expand(len(seeds), -1)
    b = (positions & _MASK)[:, None].expand_as(a)
    c, d = torch.zeros_like(a), torch.zeros_like(a)
    low, high = (seeds & _MASK)[:, None], ((seeds >> 32) & _MASK)[:, None]
    for _ in range(_ROUNDS):
        high_a, low_a = _product(a, _MULTIPLIERS[0])
        high_c, low_c = _product(c, _MULTIPLIERS[1])
        a, b, c, d = high_c ^ b ^ low, low_c, high_a ^ d ^ high, low_a
        low, high = (low + _WEYL[0]) & _MASK, (high + _WEYL[1]) & _MASK
    words = torch.stack((a, b, c, d), 0)
    lane = (tokens & 3)[None, None, :].expand(1, len(seeds), -1)
    return words.gather(0, lane)[0]


def coupled_gumbel(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Gumbel noise, float32 [rows, tokens]."""
    uniform = (coupled_bits(seeds, positions, tokens).double() + 0.5) * 2.0**-32
    return -(-torch.log1p(-uniform)).log().float()


def _product(x: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of x * multiplier, both below 2**32: int64 has no room for the whole."""
    low_part, high_part = x & 0xFFFF, x >> 16
    low = low_part * multiplier
    high = high_part * multiplier + (low >> 16)
    return high >> 16, ((high << 16) | (low & 0xFFFF)) & _MASK

"""The randomness of sampling: Gumbel noise as a pure function of (seed, position, token).

A counter-based generator without state. Its integers are exact on every platform, so that all backends can
compute the same noise.

    words   = Philox4x32-10(counter = (token // 4, position, 0, 0), key = (seed low, seed high))
    bits    = words[token % 4]
    v       = (bits + 1/2) / 2**32           uniform, strictly inside (0, 1)
    rate    = -log1p(-v)                     exponential; precise where it is small, that is for winners
    gumbel  = -log(rate)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint32]

_MASK32 = 0xFFFFFFFF
_MULTIPLIER_A = np.uint64(0xD2511F53)
_MULTIPLIER_B = np.uint64(0xCD9E8D57)
_WEYL_A = 0x9E3779B9
_WEYL_B = 0xBB67AE85
_LOW = np.uint64(_MASK32)
_HIGH_SHIFT = np.uint64(32)
_ROUNDS = 10

LARGEST_GUMBEL = 33 * float(np.log(2.0))  # at bits == 0: no token further than this behind can win


def philox(counters: npt.NDArray[Any], position: int, seed: int) -> tuple[Bits, Bits, Bits, Bits]:
    """The four output words of Philox4x32-10 for each counter (first word), all at one position and seed."""
    c0 = counters.astype(np.uint64)
    c1 = np.full_like(c0, position & _MASK32)
    c2 = np.zeros_like(c0)
    c3 = np.zeros_like(c0)
    key_a, key_b = seed & _MASK32, (seed >> 32) & _MASK32
    a, b = np.empty_like(c0), np.empty_like(c0)
    for _ in range(_ROUNDS):  # in place: this is the whole cost of sampling from a large vocabulary
        np.multiply(c0, _MULTIPLIER_A, out=a)
        np.multiply(c2, _MULTIPLIER_B, out=b)
        np.right_shift(b, _HIGH_SHIFT, out=c0)
        c0 ^= c1
        c0 ^= np.uint64(key_a)
        np.right_shift(a, _HIGH_SHIFT, out=c2)
        c2 ^= c3
        c2 ^= np.uint64(key_b)
        np.bitwise_and(b, _LOW, out=c1)
        np.bitwise_and(a, _LOW, out=c3)
        key_a = (key_a + _WEYL_A) & _MASK32
        key_b = (key_b + _WEYL_B) & _MASK32
    return c0.astype(np.uint32), c1.astype(np.uint32), c2.astype(np.uint32), c3.astype(np.uint32)


def noise_bits(seed: int, position: int, tokens: npt.NDArray[np.integer[Any]]) -> Bits:
    """The 32 random bits of each of `tokens`."""
    words = philox(tokens >> 2, position, seed)
    return np.choose(tokens & 3, words).astype(np.uint32, copy=False)


def all_noise_bits(seed: int, position: int, vocab: int) -> Bits:
    """The bits of every token below `vocab`: a quarter of the work of asking for them one by one."""
    words = philox(np.arange((vocab + 3) // 4), position, seed)
    return np.stack(words, axis=1).reshape(-1)[:vocab]


def uniform(bits: Bits) -> npt.NDArray[np.float64]:
    return (bits.astype(np.float64) + 0.5) * 2.0**-32

"""Weights in few bits, laid out as ONNX Runtime's MatMulNBits reads them.

Law: numpy arrays in, numpy arrays out; knows no model, graph or file. Each row is cut into blocks of
consecutive columns; a block shares one scale (and, asymmetric, one zero point):
value = scale * (code - zero point). Without zero points the operator takes 2 ** (bits - 1).
Work goes in slices of rows, so memory stays bounded whatever the matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
UInt8 = npt.NDArray[np.uint8]

_SLICE = 1 << 18  # values worked on at once: temporaries of a megabyte each stay in the cache
# Shrinking the range a little costs the extremes and gains all others; how much pays differs per block.
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)


@dataclass(frozen=True, slots=True)
class Quantised:
    """`packed` [rows, blocks, block * bits / 8]; `scales` [rows * blocks]; `zero_points`, if any, packed like
    the codes along each row's blocks, [rows * ceil(blocks * bits / 8)]."""

    bits: int
    block: int
    shape: tuple[int, int]
    packed: UInt8
    scales: Float32
    zero_points: UInt8 | None

    @property
    def nbytes(self) -> int:
        return (
            self.packed.nbytes
            + self.scales.nbytes
            + (self.zero_points.nbytes if self.zero_points is not None else 0)
        )


def quantise(weight: npt.NDArray[np.floating], *, bits: int, block: int, symmetric: bool) -> Quantised:
    """The nearest codes for `weight` [rows, columns], in the least-squares sense, block by block."""
    if bits not in (4, 8) or block not in (16, 32, 64, 128, 256) or weight.ndim != 2:
        raise ValueError(
            f"cannot quantise a {weight.ndim}-dimensional array to {bits} bits in blocks of {block}"
        )
    rows, columns = weight.shape
    blocks = -(-columns // block)
    packed = np.empty((rows, blocks, block * bits // 8), np.uint8)
    scales = np.empty((rows, blocks), np.float32)
    zeros = None if symmetric else np.empty((rows, blocks), np.uint8)
    step = max(1, _SLICE // (blocks * block))
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        values = _blocked(weight[part], blocks, block)
        if zeros is None:
            codes, scales[part] = _symmetric(values, bits)
        else:
            codes, scales[part], zeros[part] = _asymmetric(values, bits)
        packed[part] = codes if bits == 8 else _pairs(codes)
    return Quantised(bits, block, (rows, columns), packed, scales.ravel(), _packed_zeros(zeros, bits))


def dequantise(quantised: Quantised) -> Float32:
    """The matrix the codes stand for."""
    rows, columns = quantised.shape
    bits, blocks = quantised.bits, quantised.packed.shape[1]
    codes = _unpacked(quantised.packed, bits).astype(np.float32)
    if quantised.zero_points is None:
        codes -= 1 << (bits - 1)
    else:
        zeros = _unpacked(quantised.zero_points.reshape(rows, -1), bits)[:, :blocks]
        codes -= zeros[..., None].astype(np.float32)
    codes *= quantised.scales.reshape(rows, blocks, 1)
    return codes.reshape(rows, -1)[:, :columns]


def _blocked(weight: npt.NDArray[np.floating], blocks: int, block: int) -> Float32:
    """[rows, blocks, block]; a last block that is not full is padded with zeros."""
    rows, columns = weight.shape
    if columns == blocks * block:
        return np.ascontiguousarray(weight, dtype=np.float32).reshape(rows, blocks, block)
    padded = np.zeros((rows, blocks * block), np.float32)
    padded[:, :columns] = weight
    return padded.reshape(rows, blocks, block)


def _symmetric(values: Float32, bits: int) -> tuple[UInt8, Float32]:
    """Codes around the fixed zero point 2 ** (bits - 1). The range is one code longer below than above, so
    the extreme value, whatever its sign, is given the longer side."""
    half = 1 << (bits - 1)
    largest = np.take_along_axis(values, np.abs(values).argmax(-1)[..., None], -1)
    best = -largest / np.float32(half)
    if bits == 4:
        best = _best(values, [best * np.float32(shrink) for shrink in _SHRINKS], -half, half - 1)
    codes = _rounded(values, best, -half, half - 1)
    codes += half
    return codes.astype(np.uint8), best[..., 0]


def _asymmetric(values: Float32, bits: int) -> tuple[UInt8, Float32, UInt8]:
    """Codes over the block's own range; zero stays exactly representable."""
    top = (1 << bits) - 1
    low = np.minimum(values.min(-1, keepdims=True), 0)
    high = np.maximum(values.max(-1, keepdims=True), 0)
    best_error: Float32 | None = None
    best_codes = best_scale = best_zero = low
    for shrink in _SHRINKS if bits == 4 else (1.0,):
        scale = (high - low) * np.float32(shrink / top)
        inverse = _inverse(scale)
        zero = np.clip(np.rint(-low * np.float32(shrink) * inverse), 0, top)
        codes = values * inverse
        codes += zero
        np.rint(codes, out=codes)
        np.clip(codes, 0, top, out=codes)
        error = codes - zero
        error *= scale
        error -= values
        total = np.einsum("...i,...i->...", error, error)[..., None]
        if best_error is None:
            best_error, best_codes, best_scale, best_zero = total, codes, scale, zero
            continue
        better = total < best_error
        best_codes = np.where(better, codes, best_codes)
        best_scale = np.where(better, scale, best_scale)
        best_zero = np.where(better, zero, best_zero)
        best_error = np.minimum(total, best_error)
    return best_codes.astype(np.uint8), best_scale[..., 0], best_zero[..., 0].astype(np.uint8)


def _best(values: Float32, scales: list[Float32], low: int, high: int) -> Float32:
    """Of several scales per block, the one with the smallest squared error."""
    best = scales[0]
    least: Float32 | None = None
    for scale in scales:
        error = _rounded(values, scale, low, high)
        error *= scale
        error -= values
        total = np.einsum("...i,...i->...", error, error)[..., None]
        best = scale if least is None else np.where(total < least, scale, best)
        least = total if least is None else np.minimum(total, least)
    return best


def _rounded(values: Float32, scale: Float32, low: int, high: int) -> Float32:
    codes = values * _inverse(scale)
    np.rint(codes, out=codes)
    np.clip(codes, low, high, out=codes)
    return codes


def _inverse(scale: Float32) -> Float32:
    """1 / scale; 0 for a block of zeros, or of values too small to have a normal scale."""
    tiny = np.abs(scale) < np.finfo(np.float32).tiny
    return np.where(tiny, np.float32(0), 1 / np.where(tiny, np.float32(1), scale)).astype(np.float32)


def _packed_zeros(zeros: UInt8 | None, bits: int) -> UInt8 | None:
    if zeros is None or bits == 8:
        return None if zeros is None else zeros.ravel()
    if zeros.shape[1] % 2:
        zeros = np.pad(zeros, ((0, 0), (0, 1)))
    return _pairs(zeros).ravel()


def _pairs(codes: UInt8) -> UInt8:
    """Two 4-bit codes to a byte, the first in the low half."""
    high: UInt8 = np.left_shift(codes[..., 1::2], 4, dtype=np.uint8)
    high |= codes[..., 0::2]
    return high


def _unpacked(packed: UInt8, bits: int) -> UInt8:
    if bits == 8:
        return packed
    pairs = np.stack([packed & 15, packed >> 4], axis=-1)
    return pairs.reshape(*packed.shape[:-1], -1)

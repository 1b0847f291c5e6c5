"""Quantises weights into the layout of ONNX Runtime's MatMulNBits.

Each row is divided into blocks of consecutive columns with one scale and, if asymmetric, one zero point:
value = scale * (code - zero point). Without zero points the operator uses 2 ** (bits - 1). Matrices are
processed in slices of rows to bound memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from keystroke.errors import ModelDamaged

Float32 = npt.NDArray[np.float32]
UInt8 = npt.NDArray[np.uint8]

_SLICE = 1 << 18  # values worked on at once: temporaries of a megabyte each stay in the cache
# A smaller range clips the extremes and improves all other values; the best factor differs per block.
_SHRINKS = (1.0, 0.93, 0.87, 0.8)


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

    def work(part: slice) -> None:
        values = _split_into_blocks(weight[part], blocks, block)
        candidates = _symmetric_ranges(values, bits) if symmetric else _asymmetric_ranges(values, bits)
        codes, scales[part], zero = _fit_blocks(values, candidates, (1 << bits) - 1)
        packed[part] = codes if bits == 8 else _pack_pairs(codes)
        if zeros is not None:
            zeros[part] = zero

    step = max(1, _SLICE // (blocks * block))
    parts = [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # numpy releases the GIL
        list(pool.map(work, parts))
    if not np.isfinite(scales).all():
        raise ModelDamaged("the model has weights that are not finite numbers; download it again")
    return Quantised(bits, block, (rows, columns), packed, scales.ravel(), _pack_zeros(zeros, bits))


def _split_into_blocks(weight: npt.NDArray[np.floating], blocks: int, block: int) -> Float32:
    """[rows, blocks, block]; a last block that is not full is padded with zeros."""
    rows, columns = weight.shape
    if columns == blocks * block:
        return np.ascontiguousarray(weight, dtype=np.float32).reshape(rows, blocks, block)
    padded = np.zeros((rows, blocks * block), np.float32)
    padded[:, :columns] = weight
    return padded.reshape(rows, blocks, block)


Candidates = Iterator[tuple[Float32, Float32]]  # scale and zero point, [rows, blocks, 1] each


def _symmetric_ranges(values: Float32, bits: int) -> Candidates:
    """Ranges around the fixed zero point. There is one code more below than above it, so the extreme value,
    whatever its sign, gets the longer side; at 8 bits the shorter side is also tried."""
    half = 1 << (bits - 1)
    largest = np.take_along_axis(values, np.abs(values).argmax(-1)[..., None], -1)
    zero = np.full_like(largest, half)
    if bits == 8:
        yield largest / np.float32(half - 1), zero
    for shrink in _SHRINKS if bits == 4 else _SHRINKS[:1]:
        yield largest * np.float32(-shrink / half), zero


def _asymmetric_ranges(values: Float32, bits: int) -> Candidates:
    """Ranges from the block's least to its greatest value; zero stays exactly representable."""
    top = (1 << bits) - 1
    low = np.minimum(values.min(-1, keepdims=True), 0)
    span = np.maximum(values.max(-1, keepdims=True), 0) - low
    for shrink in _SHRINKS if bits == 4 else _SHRINKS[:1]:
        scale = span * np.float32(shrink / top)
        yield scale, np.clip(np.rint(low * np.float32(-shrink) * _inverse(scale)), 0, top)


def _fit_blocks(values: Float32, candidates: Candidates, top: int) -> tuple[UInt8, Float32, UInt8]:
    """Codes, scales and zero points: of the candidates the one with the least squared error in each block,
    its scale then set to the best one for those very codes."""
    scale, zero = next(candidates)
    least: Float32 | None = None
    for other, other_zero in candidates:
        if least is None:
            least = _error(values, scale, zero, top)
        error = _error(values, other, other_zero, top)
        better = error < least
        scale, zero, least = (
            np.where(better, other, scale),
            np.where(better, other_zero, zero),
            np.minimum(error, least),
        )
    steps = _steps(values, scale, zero, top)
    weight = np.einsum("...i,...i->...", steps, steps)[..., None]
    product = np.einsum("...i,...i->...", steps, values)[..., None]
    scale = np.where(weight > 0, product / np.maximum(weight, 1), scale)
    steps += zero
    return steps.astype(np.uint8), scale[..., 0], zero[..., 0].astype(np.uint8)


def _error(values: Float32, scale: Float32, zero: Float32, top: int) -> Float32:
    steps = _steps(values, scale, zero, top)
    steps *= scale
    steps -= values
    error: Float32 = np.einsum("...i,...i->...", steps, steps)[..., None]
    return error


def _steps(values: Float32, scale: Float32, zero: Float32, top: int) -> Float32:
    """The code of each value minus the zero point."""
    steps = values * _inverse(scale)
    np.rint(steps, out=steps)
    return np.clip(steps, -zero, top - zero, out=steps)


def _inverse(scale: Float32) -> Float32:
    """1 / scale; 0 for a block of zeros, or of values too small to have a normal scale."""
    tiny = np.abs(scale) < np.finfo(np.float32).tiny
    return np.where(tiny, np.float32(0), 1 / np.where(tiny, np.float32(1), scale)).astype(np.float32)


def _pack_zeros(zeros: UInt8 | None, bits: int) -> UInt8 | None:
    if zeros is None or bits == 8:
        return None if zeros is None else zeros.ravel()
    if zeros.shape[1] % 2:
        zeros = np.pad(zeros, ((0, 0), (0, 1)))
    return _pack_pairs(zeros).ravel()


def _pack_pairs(codes: UInt8) -> UInt8:
    """Two 4-bit codes to a byte, the first in the low half."""
    high: UInt8 = np.left_shift(codes[..., 1::2], 4, dtype=np.uint8)
    high |= codes[..., 0::2]
    return high

"""Rearranges the quantised blocks of a GGUF file for ONNX Runtime's operators, without changing any weight.

A weight of a block is
    scale * (code - half) + offset
with codes of 4 or 8 bits, `half` the middle of their range, and an offset if the format has a minimum. Only
the float32 sum that makes an offset is rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from keystroke.errors import UnsupportedModel

UInt8 = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Blocks:
    """`packed` [rows, blocks, block * bits / 8] and `scales` [rows * blocks], as MatMulNBits reads them;
    `offsets`, if any, [rows, columns / 32]."""

    bits: int
    block: int
    packed: UInt8
    scales: Float32
    offsets: Float32 | None


def read_blocks(stored: UInt8, kind: str) -> Blocks:
    """The blocks of one matrix `stored` [rows, bytes] of the GGUF type `kind`."""
    if kind not in _READERS:
        raise UnsupportedModel(
            f"matrices stored as {kind} only run with the compiled operators; install a C compiler (cc, gcc "
            "or clang), or set model.precision to int8 or int4, which converts them"
        )
    return _READERS[kind](stored)


def _q4_0(stored: UInt8) -> Blocks:
    block = _split_blocks(stored, 18)
    return _make_blocks(4, _lower_then_upper(block[..., 2:]), _read_half(block, 0))


def _q4_1(stored: UInt8) -> Blocks:
    block = _split_blocks(stored, 20)
    scale = _read_half(block, 0)
    return _make_blocks(4, _lower_then_upper(block[..., 4:]), scale, _read_half(block, 2) + 8 * scale)


def _q5_0(stored: UInt8) -> Blocks:
    block = _split_blocks(stored, 22)
    return _make_blocks(8, _with_fifth_bits(block[..., 6:], block[..., 2:6]) + 112, _read_half(block, 0))


def _q5_1(stored: UInt8) -> Blocks:
    block = _split_blocks(stored, 24)
    scale = _read_half(block, 0)
    codes = _with_fifth_bits(block[..., 8:], block[..., 4:8]) + 112
    return _make_blocks(8, codes, scale, _read_half(block, 2) + 16 * scale)


def _q8_0(stored: UInt8) -> Blocks:
    block = _split_blocks(stored, 34)
    return _make_blocks(8, block[..., 2:] ^ np.uint8(0x80), _read_half(block, 0))


def _q4_k(stored: UInt8) -> Blocks:
    unit = _split_blocks(stored, 144)
    scale, minimum = _six_bit_scales(unit)
    return _make_blocks(4, _pairs_of_blocks(unit[..., 16:]), scale, 8 * scale - minimum)


def _q5_k(stored: UInt8) -> Blocks:
    unit = _split_blocks(stored, 176)
    scale, minimum = _six_bit_scales(unit)
    fifth = (unit[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    codes = _pairs_of_blocks(unit[..., 48:]) + (fifth << 4) + 112
    return _make_blocks(8, codes, scale, 16 * scale - minimum)


def _q6_k(stored: UInt8) -> Blocks:
    unit = _split_blocks(stored, 210)
    low = unit[..., :128].reshape(*unit.shape[:-1], 2, 2, 32)  # half, piece, weight
    high = unit[..., None, 128:192].reshape(*unit.shape[:-1], 2, 1, 32)
    four = np.concatenate([low & 15, low >> 4], axis=-2)
    two = (high >> np.array([[0], [2], [4], [6]], np.uint8)) & 3
    codes = (four | two << 4).reshape(*unit.shape[:-1], 16, 16) + 96
    scale = _read_half(unit, 208) * unit[..., 192:208].view(np.int8).astype(np.float32)
    return _make_blocks(8, codes, scale)


def _q3_k(stored: UInt8) -> Blocks:
    unit = _split_blocks(stored, 110)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    two = (unit[..., 32:96].reshape(*unit.shape[:-1], 2, 1, 32) >> shifts) & 3
    third = (unit[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    codes = np.asarray(two.reshape(*unit.shape[:-1], 8, 32) | third << 2, np.uint8)
    a, b, c = unit[..., 96:100], unit[..., 100:104], unit[..., 104:108]
    parts = [
        a & 15 | (c & 3) << 4,
        b & 15 | (c >> 2 & 3) << 4,
        a >> 4 | (c >> 4 & 3) << 4,
        b >> 4 | c >> 6 << 4,
    ]
    multiples = np.concatenate(parts, axis=-1).astype(np.float32) - 32
    return _make_blocks(8, codes.reshape(*unit.shape[:-1], 16, 16) + 124, _read_half(unit, 108) * multiples)


def _mxfp4(stored: UInt8) -> Blocks:
    block = _split_blocks(stored, 17)
    scale = np.ldexp(np.float32(1), block[..., :1].astype(np.int32) - 128).astype(np.float32)
    return _make_blocks(8, _MXFP4_CODES[_lower_then_upper(block[..., 1:])], scale)


def _iq4_nl(stored: UInt8) -> Blocks:
    block = _split_blocks(stored, 18)
    return _make_blocks(8, _IQ4_CODES[_lower_then_upper(block[..., 2:])], _read_half(block, 0))


def _iq4_xs(stored: UInt8) -> Blocks:
    unit = _split_blocks(stored, 136)
    upper = np.ascontiguousarray(unit[..., 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    lower = np.stack([unit[..., 4:8] & 15, unit[..., 4:8] >> 4], axis=-1).reshape(*unit.shape[:-1], 8)
    multiples = (lower | upper.astype(np.uint8) << 4).astype(np.float32) - 32
    nibbles = _lower_then_upper(unit[..., 8:].reshape(*unit.shape[:-1], 8, 16))
    return _make_blocks(8, _IQ4_CODES[nibbles], _read_half(unit, 0) * multiples)


# The values of 4-bit codes, plus 128.
_MXFP4_CODES = np.array(
    [128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116], np.uint8
)
_IQ4_CODES = np.array([1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241], np.uint8)
_READERS: dict[str, Callable[[UInt8], Blocks]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}


def _make_blocks(bits: int, codes: UInt8, scale: Float32, offset: Float32 | None = None) -> Blocks:
    """`codes` [rows, ..., block]; `scale` and `offset` one a block."""
    rows, block = codes.shape[0], codes.shape[-1]
    codes = codes.reshape(rows, -1, block)
    if bits == 4:
        codes = codes[..., 0::2] | codes[..., 1::2] << np.uint8(4)
    return Blocks(
        bits,
        block,
        np.ascontiguousarray(codes),
        np.ascontiguousarray(scale, np.float32).ravel(),
        offset.reshape(rows, -1) if offset is not None else None,
    )


def _split_blocks(stored: UInt8, size: int) -> UInt8:
    return stored.reshape(stored.shape[0], -1, size)


def _read_half(block: UInt8, at: int) -> Float32:
    """The half-precision number at byte `at` of every block, [rows, blocks, 1]."""
    return np.ascontiguousarray(block[..., at : at + 2]).view("<f2").astype(np.float32)


def _lower_then_upper(codes: UInt8) -> UInt8:
    return np.concatenate([codes & 15, codes >> 4], axis=-1)


def _with_fifth_bits(codes: UInt8, fifth: UInt8) -> UInt8:
    bits = np.unpackbits(fifth, axis=-1, bitorder="little")
    return _lower_then_upper(codes) | bits << np.uint8(4)


def _pairs_of_blocks(codes: UInt8) -> UInt8:
    """Eight blocks of 32 from 128 bytes: each 32 hold one in their lower and one in their upper halves."""
    pairs = codes.reshape(*codes.shape[:-1], 4, 1, 32)
    return np.concatenate([pairs & 15, pairs >> 4], axis=-2).reshape(*codes.shape[:-1], 8, 32)


def _six_bit_scales(unit: UInt8) -> tuple[Float32, Float32]:
    """Scale and minimum of each of a unit's eight blocks: 6-bit multiples of two half-precision numbers."""
    a, b, c = unit[..., 4:8], unit[..., 8:12], unit[..., 12:16]
    scales = np.concatenate([a & 63, (c & 15) | (a >> 6) << 4], axis=-1)
    minima = np.concatenate([b & 63, (c >> 4) | (b >> 6) << 4], axis=-1)
    return _read_half(unit, 0) * scales.astype(np.float32), _read_half(unit, 2) * minima.astype(np.float32)

"""Weights that folders store quantised: FP8 with a scale per block, MXFP4, and MLX's groups.

FP8 and MLX's groups become float32. MXFP4 is rearranged into the blocks of GGUF files without changing any
weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from keystroke.engine.checkpoint.fields import Fields
from keystroke.errors import ModelDamaged, UnsupportedModel

Float32 = npt.NDArray[np.float32]
UInt8 = npt.NDArray[np.uint8]
UInt32 = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class BlockScales:
    """A block of `rows` x `columns` weights shares a scale; 0 means all of them."""

    rows: int
    columns: int

    @classmethod
    def of(cls, config: Fields) -> BlockScales:
        sizes = config.table("quantization_config").get("weight_block_size")
        if sizes is None:
            return cls(0, 0)
        if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(s) is int and s > 0 for s in sizes):
            raise UnsupportedModel(
                f"{config.origin} has FP8 weights in blocks that are not read; use a GGUF file of the model"
            )
        return cls(*sizes)

    def name(self, tensor: str) -> str:
        """The tensor with the scales."""
        return f"{tensor}_scale_inv"


@dataclass(frozen=True, slots=True)
class AffineGroups:
    """How MLX's folders store a matrix: codes of `bits` bits, one after the other, and for each `group` of
    them a scale and an offset (`.scales`, `.biases`); or MXFP4, with scales only. Single tensors may differ
    from the rest."""

    bits: int
    group: int
    others: Fields | None = None
    mode: str = "affine"

    @classmethod
    def of(cls, config: Fields) -> AffineGroups | None:
        if config.get("quantization") is None:
            return None
        table = config.table("quantization")
        mode = _known_mode(table.text("mode", "affine"))
        return cls(table.integer("bits", 8), table.integer("group_size", 128, default=64), table, mode)

    def of_tensor(self, tensor: str) -> AffineGroups:
        """The groups of one tensor."""
        other = None if self.others is None else self.others.get(tensor.removesuffix(".weight"))
        if not isinstance(other, Mapping):
            return self
        bits, group = other.get("bits", self.bits), other.get("group_size", self.group)
        if not isinstance(bits, int) or not isinstance(group, int) or not 0 < bits <= 8 or group <= 0:
            raise ModelDamaged(f"the quantisation of {tensor} is not described in config.json")
        return AffineGroups(bits, group, mode=_known_mode(other.get("mode", "affine")))

    def columns(self, words: int) -> int:
        """The number of weights in a row of `words` 32-bit words."""
        return words * 32 // self.bits

    def read(self, words: UInt32, scales: Float32, offsets: Float32) -> Float32:
        rows, bits = len(words), self.bits
        columns = self.columns(words.shape[-1])
        if scales.shape != (rows, columns // self.group) or offsets.shape != scales.shape:
            raise ModelDamaged("the scales of a quantised matrix do not fit it; download the model again")
        wide = np.empty((rows, columns), dtype=np.float32)
        step = max((1 << 22) // columns, 1)  # bounded: one byte for each bit of a part of the rows
        weights = (1 << np.arange(bits)).astype(np.uint16)
        for at in range(0, rows, step):
            part = np.unpackbits(words[at : at + step].view(np.uint8), axis=-1, bitorder="little")
            codes = part.reshape(len(part), columns // self.group, self.group, bits) @ weights
            each = scales[at : at + step, :, None] * codes + offsets[at : at + step, :, None]
            wide[at : at + step] = each.reshape(len(part), columns)
        return wide


def _known_mode(mode: object) -> str:
    if mode not in ("affine", "mxfp4"):
        raise UnsupportedModel(
            f"weights in MLX's format {mode!s:.20} are not read; use a folder with affine groups or MXFP4"
        )
    return str(mode)


def read_fp8(codes: UInt8, scales: Float32, blocks: BlockScales) -> Float32:
    """E4M3 numbers times the scales of their blocks. A last block may be smaller."""
    rows, columns = codes.shape[-2:]
    wide = _E4M3[codes]
    if scales.size == 1:
        return wide * scales.reshape(())
    tall, broad = blocks.rows or rows, blocks.columns or columns
    if scales.shape[-2:] != (-(-rows // tall), -(-columns // broad)):
        raise ModelDamaged("the scales of an FP8 matrix do not fit its shape; download the model again")
    spread = np.repeat(np.repeat(scales, tall, axis=-2), broad, axis=-1)
    wide *= spread[..., :rows, :columns]
    return wide


def read_mxfp4(blocks: UInt8, scales: UInt8) -> UInt8:
    """Rows of GGUF blocks (an exponent, then 16 bytes: weights 0 to 15 in the low halves, 16 to 31 in the
    high ones) from `blocks` [..., blocks, 16] with neighbours in a byte, and `scales` [..., blocks]."""
    if blocks.shape[:-1] != scales.shape or blocks.shape[-1] != 16:
        raise ModelDamaged("the scales of an MXFP4 matrix do not fit its blocks; download the model again")
    out = np.empty((*blocks.shape[:-1], 17), np.uint8)
    out[..., 0] = scales
    first, second = blocks[..., :8], blocks[..., 8:]
    out[..., 1::2] = (first & 15) | (second & 15) << 4
    out[..., 2::2] = first >> 4 | second & 0xF0
    rows = int(np.prod(blocks.shape[:-2]))
    return out.reshape(rows, -1)


def _e4m3_values() -> Float32:
    """The value of every byte: sign, four bits of exponent (bias 7), three of fraction; 0x7F is no number."""
    byte = np.arange(256)
    exponent, fraction = byte >> 3 & 15, byte & 7
    normal = (1 + fraction / 8) * 2.0 ** (exponent - 7)
    values = np.where(exponent == 0, fraction / 8 * 2.0**-6, normal)
    values[(byte & 0x7F) == 0x7F] = np.nan
    return np.where(byte < 128, values, -values).astype(np.float32)


_E4M3 = _e4m3_values()

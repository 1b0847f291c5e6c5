"""MlxWeights as MLX arrays: floats, or affine codes in groups of 32 as a GGUF file stores them.

Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K and Q5_K are groups of 32 codes with a scale and an offset already; only
their scales are rounded to the compute type. MXFP4 is a type of MLX too. Types with other groups (Q6_K, Q3_K,
Q2_K, IQ4) are quantised again, in 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from keystroke.engine.adapter import AdapterFile, pair_of_weight
from keystroke.engine.checkpoint import Checkpoint, tensor_shapes
from keystroke.engine.checkpoint.huggingface import HuggingFaceCheckpoint

GROUP = 32
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Affine:
    """Codes of `bits` bits, [rows, columns]; a weight is scale * code + offset of its group."""

    codes: Bytes
    scales: Floats
    offsets: Floats
    bits: int


class _Matrices:
    """As floats (no scales), as affine codes, or as MXFP4 (no offsets)."""

    def __init__(
        self,
        weight: mx.array,
        scales: mx.array | None = None,
        offsets: mx.array | None = None,
        bits: int = 0,
        group: int = GROUP,
    ) -> None:
        self._weight, self._scales, self._offsets = weight, scales, offsets
        self._bits, self._group = bits, group
        self._codes: dict[str, Any] = {
            "group_size": group,
            "bits": bits,
            "mode": "mxfp4" if offsets is None else "affine",
        }
        self.bias: mx.array | None = None

    def product(self, x: mx.array) -> mx.array:
        """x @ W.T; of several matrices, each with its own rows of x [count, rows, width]."""
        if self._scales is None:
            return x @ self._weight.swapaxes(-1, -2)
        return mx.quantized_matmul(
            x, self._weight, self._scales, self._offsets, transpose=True, **self._codes
        )


class WeightMatrix(_Matrices):
    """A matrix of the model. `matrix(x)` is x @ W.T (+ bias, + an adapter's x @ down @ up); `rows(ids)` are
    rows of W."""

    adapter: tuple[mx.array, mx.array] | None = None

    @property
    def columns(self) -> int:
        width = self._weight.shape[-1]
        return width if self._scales is None else width * 32 // self._bits

    @property
    def arrays(self) -> list[mx.array]:
        every = (self._weight, self._scales, self._offsets, self.bias, *(self.adapter or ()))
        return [array for array in every if array is not None]

    def __call__(self, x: mx.array) -> mx.array:
        y = self.product(x)
        if self.adapter is not None:
            y = y + x @ self.adapter[0] @ self.adapter[1]
        return y if self.bias is None else y + self.bias

    def rows(self, ids: mx.array) -> mx.array:
        if self._scales is None:
            return self._weight[ids]
        offsets = None if self._offsets is None else self._offsets[ids]
        return mx.dequantize(self._weight[ids], self._scales[ids], offsets, **self._codes)

    def experts(self, count: int) -> ExpertMatrices:
        """The same, of `count` experts one below the other."""

        def split(array: mx.array | None) -> mx.array | None:
            return None if array is None else array.reshape(count, -1, array.shape[-1])

        weight, scales, offsets = split(self._weight), split(self._scales), split(self._offsets)
        assert weight is not None
        whole = ExpertMatrices(weight, scales, offsets, self._bits, self._group)
        whole.bias = None if self.bias is None else self.bias.reshape(count, -1)
        mx.eval([array for array in (weight, scales, offsets, whole.bias) if array is not None])
        return whole


class ExpertMatrices(_Matrices):
    """Matrices of which each row of activations uses some."""

    def __call__(self, x: mx.array, chosen: mx.array) -> mx.array:
        """x [rows, 1 or chosen, 1, width], chosen [rows, top] -> [rows, top, 1, height]."""
        if self._scales is None:
            y = mx.gather_mm(x, self._weight.swapaxes(-1, -2), rhs_indices=chosen)
        else:
            y = mx.gather_qmm(
                x,
                self._weight,
                self._scales,
                self._offsets,
                rhs_indices=chosen,
                transpose=True,
                **self._codes,
            )
        return y if self.bias is None else y + self.bias[chosen][:, :, None, :]


@dataclass(frozen=True, slots=True)
class MlxWeights:
    """Matrices and vectors by their Hugging Face names, without `.weight`."""

    matrices: dict[str, WeightMatrix]
    vectors: dict[str, mx.array]
    dtype: mx.Dtype

    @property
    def nbytes(self) -> int:
        every = [a for matrix in self.matrices.values() for a in matrix.arrays]
        return sum(array.nbytes for array in (*every, *self.vectors.values()))


def runs_on_gpu() -> bool:
    return mx.default_device() == mx.Device(mx.gpu)


def compute_type() -> mx.Dtype:
    """Half precision on a GPU; single on a CPU, where half is slower."""
    return mx.float16 if runs_on_gpu() else mx.float32


def weight_bytes(checkpoint: Checkpoint) -> int:
    """About how much memory the weights take."""
    total = 0
    for name, shape in tensor_shapes(checkpoint.spec).items():
        size = int(np.prod(shape))
        bits = _BITS.get(checkpoint.storage(name), 8 if _is_block(checkpoint.storage(name)) else 0)
        scales = 1 if checkpoint.storage(name) == "MXFP4" else 4
        total += size * bits // 8 + size // GROUP * scales if bits else 2 * size
    return total


def read_weights(
    checkpoint: Checkpoint, progress: Progress, adapter: AdapterFile | None = None
) -> MlxWeights:
    dtype = compute_type()
    matrices: dict[str, WeightMatrix] = {}
    vectors: dict[str, mx.array] = {}
    shapes = tensor_shapes(checkpoint.spec)
    total, done = checkpoint.spec.parameters, 0
    for name, shape in shapes.items():
        stem = name.removesuffix(".weight")
        if ".linear_attn." in name and (len(shape) == 1 or name.endswith(".conv1d.weight")):
            vectors[stem] = mx.array(checkpoint.tensor(name))  # exact: a recurrence adds up errors
        elif len(shape) == 2:
            matrices[stem] = _matrix(checkpoint, name, dtype)
            pair = None if adapter is None else pair_of_weight(adapter, checkpoint.spec, name)
            if pair is not None:
                down, up = (mx.array(np.ascontiguousarray(each.T)).astype(dtype) for each in pair)
                matrices[stem].adapter = down, up
            mx.eval(matrices[stem].arrays)  # one after the other, so that there are never two copies
        else:
            vectors[stem] = mx.array(checkpoint.tensor(name)).astype(dtype)
        done += int(np.prod(shape))
        progress(min(done, total), total)
    for stem, matrix in matrices.items():
        if f"{stem}.bias" in vectors:
            matrix.bias = vectors.pop(f"{stem}.bias")
    mx.eval([*vectors.values()])
    return MlxWeights(matrices, vectors, dtype)


def take_stacked(names: Sequence[str], matrices: dict[str, WeightMatrix]) -> list[WeightMatrix]:
    """Matrices with the same input, as one where their codes are alike. They are removed from `matrices`, so
    that there are never two copies of all."""
    parts = [matrices.pop(name) for name in names]
    first = parts[0]
    alike = {(part._bits, part._group, part._offsets is None, part.bias is None) for part in parts}
    if len(alike) > 1:
        return parts

    def join(arrays: Sequence[mx.array | None]) -> mx.array | None:
        found = [array for array in arrays if array is not None]
        return mx.concatenate(found) if found else None

    weight = join([part._weight for part in parts])
    assert weight is not None
    scales, offsets = (join([part._scales for part in parts]), join([part._offsets for part in parts]))
    whole = WeightMatrix(weight, scales, offsets, first._bits, first._group)
    whole.bias = join([part.bias for part in parts])
    if first.adapter is not None:  # matrices with the same input have the same `down`
        ups = [part.adapter[1] for part in parts if part.adapter is not None]
        whole.adapter = first.adapter[0], mx.concatenate(ups, axis=1)
    mx.eval(whole.arrays)
    return [whole]


def split_products(matrices: Sequence[WeightMatrix], x: mx.array, edges: list[int]) -> list[mx.array]:
    """The products of x with what `take_stacked` returned; `edges`: where each but the first begins."""
    if len(matrices) > 1:
        return [matrix(x) for matrix in matrices]
    return list(mx.split(matrices[0](x), edges, axis=-1))


def _matrix(checkpoint: Checkpoint, name: str, dtype: mx.Dtype) -> WeightMatrix:
    if isinstance(checkpoint, HuggingFaceCheckpoint) and (found := checkpoint.affine_groups(name)):
        words, group_scales, group_offsets, groups = found
        tables = [mx.array(each).astype(dtype) for each in (group_scales, group_offsets)]
        return WeightMatrix(mx.array(words), tables[0], tables[1], groups.bits, groups.group)
    stored, kind = checkpoint.raw(name)
    columns = tensor_shapes(checkpoint.spec)[name][1]
    if columns % GROUP or not _is_block(kind):
        return WeightMatrix(mx.array(checkpoint.tensor(name)).astype(dtype))
    if kind == "MXFP4":
        return mxfp4(np.asarray(stored, dtype=np.uint8))
    affine = _AFFINE[kind](np.asarray(stored, dtype=np.uint8)) if kind in _AFFINE else None
    if affine is None:
        affine = quantise(checkpoint.tensor(name))
    packed = mx.array(pack(affine.codes, affine.bits))
    scales, offsets = (mx.array(each).astype(dtype) for each in (affine.scales, affine.offsets))
    return WeightMatrix(packed, scales, offsets, affine.bits)


def scaled_rows(values: npt.NDArray[np.int8], scales: Floats, dtype: mx.Dtype) -> WeightMatrix:
    """Eight-bit integers with a scale for each row, without a change."""
    if values.shape[1] % GROUP:
        return WeightMatrix(mx.array(values * scales[:, None]).astype(dtype))
    each = np.repeat(scales[:, None], values.shape[1] // GROUP, axis=1)
    codes = mx.array(pack(values.view(np.uint8) ^ np.uint8(128), 8))
    return WeightMatrix(codes, mx.array(each).astype(dtype), mx.array(-128 * each).astype(dtype), 8)


def mxfp4(blocks: Bytes) -> WeightMatrix:
    """GGUF's blocks of a power of two and 32 codes, whose values are those of MLX."""
    rows = len(blocks)
    blocks = blocks.reshape(rows, -1, 17)
    codes = _nibbles(blocks[..., 1:]).reshape(rows, -1)
    scales = mx.array(np.ascontiguousarray(blocks[..., 0]))
    return WeightMatrix(mx.array(pack(codes, 4)), scales, None, 4)


def pack(codes: Bytes, bits: int) -> npt.NDArray[np.uint32]:
    """Codes in MLX's order: one after the other in a little-endian stream of bits, row by row."""
    if bits == 8:
        return np.ascontiguousarray(codes).view("<u4")
    if bits == 4:
        return np.ascontiguousarray(codes[:, 0::2] | (codes[:, 1::2] << 4)).view("<u4")
    rows, columns = codes.shape
    out = np.empty((rows, columns * bits // 8), dtype=np.uint8)
    step = max((1 << 22) // columns, 1)  # bounded: one byte per bit for a part of the rows
    for at in range(0, rows, step):
        part = np.unpackbits(codes[at : at + step, :, None], axis=-1, count=bits, bitorder="little")
        out[at : at + step] = np.packbits(part.reshape(len(part), -1), axis=-1, bitorder="little")
    return out.view("<u4")


def quantise(weight: Floats) -> Affine:
    """Eight bits in groups of 32, from the least to the largest weight of a group."""
    rows, columns = weight.shape
    groups = weight.reshape(rows, columns // GROUP, GROUP)
    least = groups.min(axis=-1)
    scales = (groups.max(axis=-1) - least) / 255
    inverse = np.divide(1.0, scales, out=np.zeros_like(scales), where=scales > 0)
    codes = np.rint((groups - least[..., None]) * inverse[..., None])
    return Affine(np.clip(codes, 0, 255).astype(np.uint8).reshape(rows, columns), scales, least, 8)


def _is_block(kind: str) -> bool:
    return kind not in ("F32", "F16", "BF16")


def _read_half(blocks: Bytes, at: int) -> Floats:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")[..., 0].astype(np.float32)


def _nibbles(data: Bytes) -> Bytes:
    """The 16 low nibbles, then the 16 high ones."""
    return np.concatenate([data & 15, data >> 4], axis=-1)


def _unpack_legacy(blocks: Bytes, size: int, *, minimum: bool, fifth: bool) -> Affine:
    rows = len(blocks)
    blocks = blocks.reshape(rows, -1, size)
    scales, at = _read_half(blocks, 0), 4 if minimum else 2
    codes = _nibbles(blocks[..., -16:])
    if fifth:
        codes |= np.unpackbits(blocks[..., at : at + 4], axis=-1, bitorder="little") << np.uint8(4)
    middle = 16 if fifth else 8
    offsets = _read_half(blocks, 2) if minimum else -middle * scales
    return Affine(codes.reshape(rows, -1), scales, offsets, 5 if fifth else 4)


def _q8_0(blocks: Bytes) -> Affine:
    rows = len(blocks)
    blocks = blocks.reshape(rows, -1, 34)
    scales = _read_half(blocks, 0)
    return Affine((blocks[..., 2:] ^ np.uint8(128)).reshape(rows, -1), scales, -128 * scales, 8)


def _unpack_k(blocks: Bytes, size: int, *, fifth: bool) -> Affine:
    """Q4_K and Q5_K: 256 weights with six-bit multiples of a scale and a minimum, for each 32."""
    rows = len(blocks)
    blocks = blocks.reshape(rows, -1, size)
    d, least = _read_half(blocks, 0), _read_half(blocks, 2)
    a, b, c = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    multiples = np.concatenate([a & 63, (c & 15) | ((a >> 6) << 4)], axis=-1)
    minima = np.concatenate([b & 63, (c >> 4) | ((b >> 6) << 4)], axis=-1)
    data = blocks[..., -128:].reshape(rows, -1, 4, 32)
    codes: Bytes = np.stack([data & 15, data >> 4], axis=-2)  # [rows, units, 4, 2, 32]
    if fifth:
        bits = np.unpackbits(blocks[..., 16:48, None], axis=-1, bitorder="little")  # [rows, units, 32, 8]
        codes |= bits.swapaxes(-1, -2).reshape(codes.shape) << np.uint8(4)
    scales = (d[..., None] * multiples).reshape(rows, -1)
    offsets = (-least[..., None] * minima).reshape(rows, -1)
    return Affine(codes.reshape(rows, -1), scales, offsets, 5 if fifth else 4)


_AFFINE: dict[str, Callable[[Bytes], Affine]] = {
    "Q4_0": lambda blocks: _unpack_legacy(blocks, 18, minimum=False, fifth=False),
    "Q4_1": lambda blocks: _unpack_legacy(blocks, 20, minimum=True, fifth=False),
    "Q5_0": lambda blocks: _unpack_legacy(blocks, 22, minimum=False, fifth=True),
    "Q5_1": lambda blocks: _unpack_legacy(blocks, 24, minimum=True, fifth=True),
    "Q8_0": _q8_0,
    "Q4_K": lambda blocks: _unpack_k(blocks, 144, fifth=False),
    "Q5_K": lambda blocks: _unpack_k(blocks, 176, fifth=True),
}
_BITS = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8, "Q4_K": 4, "Q5_K": 5, "MXFP4": 4}

"""Packs codes, scales and offsets in the stored formats of kernels/layout.cuh and multiply.cuh, and back.

A block has 16 rows and 64 columns: codes lane by lane, then scales and offsets as 16-bit floats. Codes are
exact; scales keep 11 of up to 17 bits, an eighth of the loss of bf16 weights.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from keystroke.engine.cuda.plan import (
    BLOCK_BYTES,
    CODE_BITS,
    EIGHT,
    FLOAT_FOUR,
    FOUR_K,
    GROUP_K,
    SIX,
    STEP_K,
    WITH_OFFSETS,
    Matrix,
)
from keystroke.engine.cuda.stored import GROUP, Codes, float4_values

# A code in the low bits of a 16-bit float is a multiple of 2**-24, so scales are larger by 2**24; the largest
# of a row becomes 2**15, and the rest is the row's factor.
_CODE = 2.0**24
_LARGEST_SCALE = 2.0**15
_LARGEST_OFFSET = 2.0**14
_UPPER_ROWS = 16  # codes of rows g + 8 are four bits higher
ZEROS = {SIX: 32, EIGHT: 128}  # the code of 0 in formats without offsets


def shift_zero(rows: Codes, kind: int) -> Codes:
    """The same weights with the code of 0 that a format without offsets needs."""
    zero = ZEROS.get(kind)
    if zero is None or rows.zero == zero:
        return rows
    assert rows.zero is not None, "offsets of their own do not fit this format"
    return replace(rows, codes=rows.codes + (zero - rows.zero), zero=zero)


def concatenate(parts: list[Codes]) -> Codes:
    """The rows of several matrices."""
    zeros = {part.zero for part in parts}
    codes, scales, offsets = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("codes", "scales", "offsets")
    )
    steps = [part.steps for part in parts if part.steps is not None]
    return Codes(
        codes,
        scales,
        offsets,
        zeros.pop() if len(zeros) == 1 else None,
        parts[0].floats,
        torch.cat(steps) if len(steps) == len(parts) else None,
    )


def pack_codes(units: Codes, matrix: Matrix) -> tuple[Tensor, Tensor]:
    """Bodies uint8 [units, bytes] and row factors [units, 16] of rows [units, 16, inner]."""
    count, _, inner = units.codes.shape
    kind, blocks = matrix.format, inner // 64
    if kind == FLOAT_FOUR:
        return _pack_floats(units)
    largest = units.scales.abs().amax(2, keepdim=True)
    factor = _next_power_of_two(largest) * (_CODE / _LARGEST_SCALE)
    if kind in WITH_OFFSETS:
        factor = torch.maximum(
            factor, _next_power_of_two(units.offsets.abs().amax(2, keepdim=True)) / _LARGEST_OFFSET
        )
    if kind == FOUR_K:
        steps, multiples = _steps_and_multiples(units)
        largest = steps[:, :, :, 1].amax(2, keepdim=True)
        factor = torch.maximum(factor, _next_power_of_two(largest) * (_OFFSET_STEP / _LARGEST_SCALE))
        grid = _grid_of_bytes(steps, multiples, factor)
        return _with_grid(_code_bytes(units.codes, kind), grid, count, blocks), factor[..., 0]
    scales, offsets = units.scales * (_CODE / factor), units.offsets / factor
    if CODE_BITS[kind] < 8:
        scales = torch.cat((scales[:, :8], scales[:, 8:] / _UPPER_ROWS), 1)
    grid = _grid(scales, offsets, kind)
    return _with_grid(_code_bytes(units.codes, kind), grid, count, blocks), factor[..., 0]


def _with_grid(codes: list[Tensor], grid: Tensor, count: int, blocks: int) -> Tensor:
    return torch.cat([part.reshape(count, blocks, -1) for part in (*codes, grid)], 2).reshape(count, -1)


def unpack_codes(body: Tensor, matrix: Matrix) -> Tensor:
    """float32 [units, 16, inner]: the kernel's weights without the row factors."""
    count, blocks, kind = matrix.units, matrix.blocks, matrix.format
    if kind == FLOAT_FOUR:
        return _unpack_floats(body, matrix)
    data = body.reshape(count, blocks, BLOCK_BYTES[kind])
    bits = CODE_BITS[kind]
    codes = _codes(data[..., : 128 * bits].contiguous(), count, blocks, bits)  # unit, h, g, block, half, 32
    after = data[..., 128 * bits :].contiguous()
    halves = _open_bytes(after) if kind == FOUR_K else after.view(torch.float16).float()
    groups = 64 // GROUP_K[kind]
    grid = halves.view(count, blocks, 8, groups // 2, 2, 2, -1).permute(0, 5, 2, 1, 4, 3, 6)
    scales = grid[..., 0]  # unit, h, g, block, half, part
    if bits < 8:
        scales = scales * torch.tensor([1.0, _UPPER_ROWS], device=body.device).view(1, 2, 1, 1, 1, 1)
    offsets = grid[..., 1] if kind in WITH_OFFSETS else (scales * (-ZEROS[kind] / _CODE)).half().float()
    values = codes.view(*codes.shape[:5], groups // 2, -1) * (scales / _CODE)[..., None] + offsets[..., None]
    return values.half().float().reshape(count, 16, matrix.inner)


_OFFSET_STEP = 2.0**12  # bytes of offsets stand for multiples of its inverse


def _steps_and_multiples(units: Codes) -> tuple[Tensor, Tensor]:
    """The two numbers of every 256 columns, [units, 16, inner / 256, 2], and what scales and offsets are
    multiples of them, [units, 16, inner / 256, 8, 2]."""
    assert units.steps is not None, "this format holds Q4_K only"
    count, _, inner = units.codes.shape
    steps = units.steps.view(count, 16, inner // STEP_K, 2)
    products = torch.stack((units.scales[:, :, ::2], -units.offsets[:, :, ::2]), 3).view(
        count, 16, inner // STEP_K, 8, 2
    )
    divisors = torch.where(steps == 0, 1.0, steps)
    multiples = (products / divisors[:, :, :, None]).round()
    return torch.where(multiples.amax(3) > 0, steps, 0.0), multiples.to(torch.uint8)


def _grid_of_bytes(steps: Tensor, multiples: Tensor, factor: Tensor) -> Tensor:
    """The bytes of each block, then a quarter of the numbers of 256 columns, as `scales_of_bytes`
    (multiply.cuh) reads them."""
    count, _, groups, _ = steps.shape
    of_scales, of_offsets = steps[..., 0] * (_CODE / factor), steps[..., 1] * (-_OFFSET_STEP / factor)
    of_scales = torch.cat((of_scales[:, :8], of_scales[:, 8:] / _UPPER_ROWS), 1)
    numbers = torch.stack((of_scales, of_offsets), 3).view(count, 2, 8, groups, 2).permute(0, 3, 2, 1, 4)
    quarters = numbers.half().contiguous().view(torch.uint8).view(count, groups * 4, 16)  # unit, block
    bytes_ = multiples.view(count, 2, 8, groups * 4, 2, 2).permute(0, 3, 2, 4, 1, 5)  # ..., g, half, h, 2
    return torch.cat((bytes_.reshape(count, groups * 4, 64), quarters), 2)


def _open_bytes(grid: Tensor) -> Tensor:
    """The scales and offsets that `scales_of_bytes` makes, [unit, block, numbers] as FOUR has them."""
    count, blocks = grid.shape[:2]
    numbers = grid[..., 64:].contiguous().view(torch.float16).float().view(count, blocks // 4, 1, 8, 1, 2, 2)
    multiples = grid[..., :64].view(count, blocks // 4, 4, 8, 2, 2, 2).float()
    multiples = multiples / torch.tensor([1.0, _OFFSET_STEP], device=grid.device)
    return (multiples * numbers).half().float().view(count, blocks, -1)


# The largest power of two of a row is stored as a float16's largest; the kernel's weights are then twice the
# 4-bit float.
_LARGEST_POWER = 30


def _pack_floats(units: Codes) -> tuple[Tensor, Tensor]:
    """MXFP4: four codes in 16 bits as float4_codes (multiply.cuh) reads them, and for each 32 columns the
    upper byte of the power of two. Exact but for groups 2**24 times smaller than the row's largest."""
    count, _, inner = units.codes.shape
    parts = _fragments(units.codes)  # unit, block, half, g, j, step, r, h, e
    a, b, c, d = parts.flatten(6, 7).unbind(6)
    signs = (a & 8) << 4 | (c & 8) << 3 | (d & 8) << 2 | (b & 8) << 1
    low, high = (b & 3) << 6 | (c & 7) << 3 | d & 7, signs | (a & 7) << 1 | (b & 7) >> 2
    codes = torch.stack((low, high), 7)  # unit, block, half, g, j, step, e, byte
    codes = codes.permute(0, 1, 3, 4, 2, 5, 6, 7).reshape(count, inner // 64, -1)
    powers = torch.frexp(units.scales[:, :, ::2]).exponent - 1
    top = powers.amax(2, keepdim=True)
    stored = (powers - top + _LARGEST_POWER).clamp(min=0).to(torch.uint8) << 2
    grid = stored.view(count, 2, 8, inner // 64, 2).permute(0, 3, 2, 4, 1).reshape(count, inner // 64, -1)
    body = torch.cat((codes, grid), 2).reshape(count, -1)
    return body, torch.ldexp(torch.ones_like(units.scales[..., 0]), top[..., 0] - 1)


def _unpack_floats(body: Tensor, matrix: Matrix) -> Tensor:
    count, blocks = matrix.units, matrix.blocks
    data = body.reshape(count, blocks, BLOCK_BYTES[FLOAT_FOUR])
    codes = data[..., :512].view(count, blocks, 8, 4, 2, 2, 2, 2)  # unit, block, g, j, half, step, e, byte
    low, high = codes.unbind(7)
    a, b = high >> 4 & 8 | high >> 1 & 7, high >> 1 & 8 | (high & 1) << 2 | low >> 6
    c, d = high >> 3 & 8 | low >> 3 & 7, high >> 2 & 8 | low & 7
    four = torch.stack((a, b, c, d), 6).view(count, blocks, 8, 4, 2, 2, 2, 2, 2)  # ..., step, r, h, e
    rows = four.permute(0, 7, 2, 1, 4, 3, 5, 6, 8).reshape(count, 16, blocks * 2, 32)
    powers = data[..., 512:].view(count, blocks, 8, 2, 2).permute(0, 4, 2, 1, 3)  # unit, h, g, block, half
    powers = (powers.reshape(count, 16, blocks * 2, 1) >> 2).int()
    scales = torch.where(powers > 0, torch.ldexp(torch.ones_like(powers).float(), powers - 29), 0.0)
    return (float4_values(rows) * scales).reshape(count, 16, matrix.inner)


def _next_power_of_two(largest: Tensor) -> Tensor:
    """The next larger power of two."""
    return torch.ldexp(torch.ones_like(largest), torch.frexp(largest.clamp(min=1e-30)).exponent)


def _fragments(codes: Tensor) -> Tensor:
    """[unit, block, half, g, j, step, r, h, e]: of 32 columns, lane (g, j) has 8 j ... 8 j + 7."""
    count, _, inner = codes.shape
    view = codes.reshape(count, 2, 8, inner // 64, 2, 4, 2, 2, 2)  # unit, h, g, block, half, j, step, r, e
    return view.permute(0, 3, 4, 2, 5, 6, 7, 1, 8)


# Where `narrow_codes` (multiply.cuh) finds the codes of its eight registers: for each register the pieces
# (first bit of the code, bits, word, place in each half of the word).
_PIECES = {
    4: tuple(((0, 4, at // 4, at % 4 * 4),) for at in range(8)),
    6: (
        ((0, 6, 0, 0),),
        ((0, 6, 0, 10),),
        ((0, 6, 1, 0),),
        ((0, 6, 1, 10),),
        ((0, 6, 2, 10),),
        ((0, 6, 2, 4),),
        ((0, 4, 0, 6), (4, 2, 2, 2)),
        ((0, 2, 2, 0), (2, 4, 1, 6)),
    ),
}


def _code_bytes(codes: Tensor, kind: int) -> list[Tensor]:
    """The codes of each block, [unit, block, bytes], in one piece or two."""
    count, _, inner = codes.shape
    parts, bits = _fragments(codes), CODE_BITS[kind]
    if bits == 8:
        return [parts.reshape(count, inner // 64, -1)]
    registers = parts.flatten(5, 7)  # unit, block, half, g, j, register, e
    words = torch.zeros(
        count, inner // 64, 8, 4, 2, bits // 2, 2, dtype=torch.int32, device=codes.device
    )  # unit, block, g, j, half, word, e
    for register, pieces in enumerate(_PIECES[bits]):
        of = registers[:, :, :, :, :, register].permute(0, 1, 3, 4, 2, 5).to(torch.int32)
        for first, width, word, place in pieces:
            words[..., word, :] |= (of >> first & (1 << width) - 1) << place
    found = (words[..., :2, :], words[..., 2:, :])
    halves = [part.to(torch.int16).reshape(count, inner // 64, -1) for part in found if part.numel()]
    return [part.view(torch.uint8) for part in halves]


def _codes(data: Tensor, count: int, blocks: int, bits: int) -> Tensor:
    """The inverse of `_code_bytes`, float32 [unit, h, g, block, half, 32]."""
    if bits == 8:
        parts = data.view(count, blocks, 2, 8, 4, 2, 2, 2, 2)  # unit, block, half, g, j, step, r, h, e
        return parts.permute(0, 7, 3, 1, 2, 4, 5, 6, 8).reshape(count, 2, 8, blocks, 2, 32).float()
    words = torch.cat(
        [
            part.contiguous().view(torch.int16).view(count, blocks, 8, 4, 2, -1, 2)
            for part in (data[..., :512], data[..., 512:])
            if part.numel()
        ],
        5,
    )  # unit, block, g, j, half, word, e
    registers = torch.zeros(count, blocks, 8, 4, 2, 8, 2, dtype=torch.int16, device=data.device)
    for register, pieces in enumerate(_PIECES[bits]):
        for first, width, word, place in pieces:
            registers[..., register, :] |= (words[..., word, :] >> place & (1 << width) - 1) << first
    codes = registers.view(count, blocks, 8, 4, 2, 2, 2, 2, 2)  # ..., step, r, h, e
    return codes.permute(0, 7, 2, 1, 4, 3, 5, 6, 8).reshape(count, 2, 8, blocks, 2, 32).float()


def _grid(scales: Tensor, offsets: Tensor, kind: int) -> Tensor:
    """Scale, or scale and offset, of rows g and g + 8 in the first 32 columns, then in the others, as a lane
    reads them."""
    count = scales.shape[0]
    each = GROUP_K[kind] // GROUP
    pairs = torch.stack((scales, offsets), 3) if kind in WITH_OFFSETS else scales[..., None]
    pairs = pairs[:, :, ::each]  # unit, row, group, 1 or 2
    view = pairs.reshape(count, 2, 8, -1, 2, 2 // each, pairs.shape[-1])  # unit, h, g, block, half, part
    view = view.permute(0, 3, 2, 5, 4, 1, 6)  # unit, block, g, part, half, h
    return view.reshape(count, view.shape[1], -1).half().contiguous().view(torch.uint8)

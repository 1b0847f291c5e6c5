"""Packs weights in the byte layout of kernels/layout.cuh, and unpacks them.

`unpack` gives exactly the values that the kernel multiplies with, so prefill and decode use the same numbers.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from keystroke.engine.cuda.code_packing import pack_codes, unpack_codes
from keystroke.engine.cuda.plan import BLOCK_BYTES, FOUR, FOUR_K, TAIL_BYTES, Matrix
from keystroke.engine.cuda.quantisation import grouped_int4, rowwise_int8
from keystroke.engine.cuda.stored import Codes

_UNSCALED = 64.0  # the kernel divides activations by this before products with quantised weights


def pack(weight: Tensor | Codes, bias: Tensor | None, order: Tensor, matrix: Matrix) -> Tensor:
    """`weight` [rows, columns] as uint8 bytes. `order` [tiles * 16] gives the row at each position of each
    tile; -1 is a row of zeros."""
    if isinstance(weight, Codes):
        if matrix.format != FOUR_K:
            weight = replace(weight, steps=None)  # parts of other formats may end within 256 columns
        body, scale = pack_codes(weight.map_rows(lambda part: _units(part, order, matrix)), matrix)
        return _with_tails(body, scale * _UNSCALED, bias, order, matrix)
    units = _units(weight, order, matrix)
    scale = torch.ones(matrix.units, 16, device=weight.device)
    match matrix.format:
        case 0:
            body = _fragments(units.to(torch.bfloat16)).view(torch.uint8)
        case 1:
            values, scale = rowwise_int8(units)
            body = _fragments(values + 128, together=True).to(torch.uint8)
            scale = scale * _UNSCALED
        case _:
            values, zeros, scales = grouped_int4(units)
            body, scale = _nibbles(values, zeros, scales)
            scale = scale * _UNSCALED
    return _with_tails(body, scale, bias, order, matrix)


def _units(rows: Tensor, order: Tensor, matrix: Matrix) -> Tensor:
    """Rows as units [units, 16, inner]."""
    rows = _gather(rows, order)
    units = rows.view(matrix.tiles, 16, matrix.split, -1).permute(2, 0, 1, 3)
    return units.reshape(matrix.units, 16, -1)


def _with_tails(body: Tensor, scale: Tensor, bias: Tensor | None, order: Tensor, matrix: Matrix) -> Tensor:
    biases = torch.zeros_like(scale)
    if bias is not None:
        biases[: matrix.tiles] = _gather(bias[:, None], order).view(matrix.tiles, 16).float()
    tail = torch.cat((scale, biases), 1).contiguous().view(torch.uint8)
    return torch.cat((body.reshape(matrix.units, -1), tail.reshape(matrix.units, TAIL_BYTES)), 1).reshape(-1)


def unpack(
    packed: Tensor,
    places: Tensor | None,
    matrix: Matrix,
    rows: int,
    folded: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The weight [rows, columns] of `packed`; `places` are the `row_positions` of its order. `folded`
    [tiles, 16] are factors of its rows to divide out. What is stored in 16 bits stays in bf16."""
    data = packed.view(matrix.split, matrix.tiles, matrix.unit_bytes)
    body = data[..., : matrix.blocks * BLOCK_BYTES[matrix.format]]
    if matrix.format == 0:
        table = _rows(body.view(torch.int32), matrix).view(torch.bfloat16)
    else:
        tail = data[..., -TAIL_BYTES:].contiguous().view(torch.float32)
        scale = tail[..., :16] / (_UNSCALED if folded is None else _UNSCALED * folded)
        scale = scale.permute(1, 2, 0)[..., None]
        if matrix.format == 1:
            whole = _rows(body.view(torch.int16), matrix, together=True).view(torch.uint8)
            values = torch.add(whole, -128.0, out=torch.empty_like(whole, dtype=torch.bfloat16))  # exact
        else:
            opened = unpack_codes if matrix.format >= FOUR else _from_nibbles
            values = opened(body.reshape(matrix.units, -1), matrix)
            values = values.view(matrix.split, matrix.tiles, 16, -1).permute(1, 2, 0, 3)
        values = values.view(matrix.tiles, 16, matrix.split, matrix.inner)
        table = torch.mul(values, scale, out=torch.empty(values.shape, dtype=dtype, device=packed.device))
    table = table.view(matrix.tiles * 16, matrix.split * matrix.inner)
    return table[:rows] if places is None else table[places]


def row_positions(order: Tensor, rows: int) -> Tensor | None:
    """The position of each row in `order`; None if the order is the identity."""
    live = order >= 0
    places = torch.empty(rows, dtype=torch.int64, device=order.device)
    places[order[live]] = torch.arange(len(order), device=order.device)[live]
    return None if torch.equal(places, torch.arange(rows, device=order.device)) else places


def plain_order(rows: int) -> Tensor:
    """Rows in their order, padded to whole tiles."""
    order = torch.arange(-(-rows // 16) * 16)
    order[rows:] = -1
    return order


def rotary_first(head_dim: int, rotated: int) -> Tensor:
    """The dimensions of a head whose first `rotated` are rotated, so that partners are half a head apart;
    those that are not rotated are paired with each other."""
    turned, others = torch.arange(rotated).view(2, -1), torch.arange(rotated, head_dim).view(2, -1)
    return torch.cat((turned, others), 1).reshape(-1)


def qkv_order(heads: int, kv_heads: int, head_dim: int) -> Tensor:
    """Query and key heads in groups of eight dimensions and their rotary partners; value heads in order."""
    rotary = torch.arange(head_dim).view(2, head_dim // 16, 8).permute(1, 0, 2).reshape(-1)
    count = heads + kv_heads
    rotated = (torch.arange(count)[:, None] * head_dim + rotary[None]).reshape(-1)
    return torch.cat((rotated, torch.arange(count * head_dim, (count + kv_heads) * head_dim)))


def gate_up_order(intermediate: int) -> Tensor:
    """Eight rows of gate alternating with the same eight of up, for the stacked matrix."""
    gate = torch.arange(intermediate).view(intermediate // 8, 1, 8)
    return torch.cat((gate, gate + intermediate), 1).reshape(-1)


def _gather(weight: Tensor, order: Tensor) -> Tensor:
    order = order.to(weight.device)
    rows = weight[order.clamp(min=0)]
    if bool((order < 0).any()):
        rows[order < 0] = 0
    return rows


def _fragments(units: Tensor, *, together: bool = False) -> Tensor:
    """Rows [units, 16, inner] in register order. In a block of 32 columns, lane (g, j) multiplies columns
    8 j ... 8 j + 7 of rows g and g + 8, in two steps of the tensor cores. With `together` a lane's two
    steps are adjacent, otherwise the lanes of a step."""
    count, _, inner = units.shape
    view = units.reshape(count, 2, 8, inner // 32, 4, 2, 2, 2)  # unit, h, g, block, j, step, r, e
    order = (0, 3, 2, 4, 5, 6, 1, 7) if together else (0, 3, 5, 2, 4, 6, 1, 7)
    return view.permute(order).contiguous()


def _rows(body: Tensor, matrix: Matrix, *, together: bool = False) -> Tensor:
    """The inverse of `_fragments` on pairs (its last dimension e): [tiles, 16, split, inner / 2]."""
    if together:  # split, tile, block, g, j, step, r, h
        sizes, order = (8, 4, 2, 2, 2), (1, 7, 3, 0, 2, 4, 5, 6)
    else:  # split, tile, block, step, g, j, r, h
        sizes, order = (2, 8, 4, 2, 2), (1, 7, 4, 0, 2, 5, 3, 6)
    view = body.view(matrix.split, matrix.tiles, matrix.inner // 32, *sizes).permute(order)
    return view.reshape(matrix.tiles, 16, matrix.split, matrix.inner // 2)


def _nibbles(values: Tensor, zeros: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of 64 columns: 32 lanes of 32 nibbles, then (scale, 1024 + zero) of rows g and g + 8."""
    count, _, inner = values.shape
    row_scale = scales.amax(2, keepdim=True).clamp(min=1e-30)
    words = _fragments(values, together=True).reshape(count, inner // 64, 2, 8, 4, 2, 4, 2)
    # unit, block, half, g, j, step, i = 2 r + h, e -> nibble i + 4 e of the word (half, step) of lane (g, j)
    shifts = (torch.arange(4)[:, None] + 4 * torch.arange(2)[None, :]).to(values.device) * 4
    packed = (words.to(torch.int64) << shifts).sum((6, 7)).permute(0, 1, 3, 4, 2, 5)
    packed = (packed - ((packed >> 31) << 32)).to(torch.int32)
    body = packed.reshape(count, inner // 64, 128).contiguous().view(torch.uint8)
    grid = torch.stack(((scales / row_scale).half(), (zeros + 1024).half()), 3)  # unit, row, block, 2
    grid = grid.view(count, 2, 8, inner // 64, 2).permute(0, 3, 2, 1, 4).reshape(count, inner // 64, 32)
    whole = torch.cat((body, grid.contiguous().view(torch.uint8)), 2)
    return whole, row_scale[:, :, 0]


def _from_nibbles(body: Tensor, matrix: Matrix) -> Tensor:
    count, blocks = matrix.units, matrix.blocks
    data = body.reshape(count, blocks, 576)
    words = data[..., :512].contiguous().view(torch.int32).view(count, blocks, 8, 4, 2, 2, 1, 1)
    shifts = (torch.arange(4)[:, None] + 4 * torch.arange(2)[None, :]).to(body.device) * 4
    lanes = (words >> shifts) & 15  # unit, block, g, j, half, step, i, e
    lanes = lanes.view(count, blocks, 8, 4, 2, 2, 2, 2, 2)  # ..., r, h, e
    values = lanes.permute(0, 7, 2, 1, 4, 3, 5, 6, 8).reshape(count, 16, blocks, 64).float()
    grid = data[..., 512:].contiguous().view(torch.float16).view(count, blocks, 8, 2, 2)
    grid = grid.permute(0, 3, 2, 1, 4).reshape(count, 16, blocks, 2).float()
    values = (values - (grid[..., 1:] - 1024)) * grid[..., :1]
    return values.reshape(count, 16, matrix.inner)

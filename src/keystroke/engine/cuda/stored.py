"""Reads GGUF's block types as codes, scales and offsets on the device, without rounding.

A weight is `scale * code + offset`; for types without minima the offset is `-zero * scale`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from keystroke.engine.checkpoint.ggml_types import STORAGE_TYPES
from keystroke.engine.checkpoint.spec import EMBEDDING, HEAD, Checkpoint, ModelSpec
from keystroke.engine.cuda.plan import (
    BLOCK_BYTES,
    EIGHT,
    EIGHT_OFFSET,
    FLOAT_FOUR,
    FOUR,
    SIX,
    SIX_OFFSET,
    STEP_K,
    Formats,
    Precision,
)
from keystroke.errors import UnsupportedModel

RequestedPrecision = Precision | Literal["auto"]
GROUP = 16  # columns per scale, for every type


@dataclass(frozen=True)
class Codes:
    """Rows of one matrix: uint8 `codes` [rows, columns], float32 `scales` and `offsets` [rows, columns / 16];
    `zero` is the code of 0 for types without offsets. With `floats`, codes are 4-bit floats. `steps` are the
    two numbers that Q4_K has for 256 columns, [rows, columns / 128]: scales are multiples of the first by at
    most 63, offsets of the negative second."""

    codes: Tensor
    scales: Tensor
    offsets: Tensor
    zero: int | None
    floats: bool = False
    steps: Tensor | None = None

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> Codes:
        """The same with other rows: `change` is applied to every tensor."""
        codes, scales, offsets = (change(each) for each in (self.codes, self.scales, self.offsets))
        steps = None if self.steps is None else change(self.steps)
        return replace(self, codes=codes, scales=scales, offsets=offsets, steps=steps)

    def weights(self) -> Tensor:
        """The weights, float32 [rows, columns]."""
        grouped = self.codes.view(*self.scales.shape, GROUP)
        grouped = float4_values(grouped) if self.floats else grouped.float()
        return (grouped * self.scales[..., None] + self.offsets[..., None]).view(self.codes.shape)


# The types that each format holds. SIX and EIGHT have no offsets, so they need types with a code of 0.
_FITS: dict[int, frozenset[str]] = {
    FOUR: frozenset({"Q4_0", "Q4_1", "Q4_K"}),
    SIX: frozenset({"Q4_0", "Q5_0", "Q6_K"}),
    SIX_OFFSET: frozenset({"Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K"}),
    EIGHT: frozenset({"Q4_0", "Q5_0", "Q6_K", "Q8_0"}),
    EIGHT_OFFSET: frozenset({"Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0"}),
    FLOAT_FOUR: frozenset({"MXFP4"}),
}
STORED_TYPES = _FITS[EIGHT_OFFSET] | _FITS[FLOAT_FOUR]


def format_for(types: Collection[str]) -> int | None:
    """The smallest packed format that holds all these types; None if there is none."""
    fitting = [each for each, held in _FITS.items() if held >= set(types)]
    return min(fitting, key=lambda each: BLOCK_BYTES[each], default=None)


def stored_formats(checkpoint: Checkpoint) -> Formats | None:
    """The formats that keep a model's matrices as stored; None if some matrix has another type."""
    spec = checkpoint.spec

    def types(*names: str, layers: Iterable[int] = range(spec.layers)) -> list[str]:
        return [checkpoint.storage(f"model.layers.{n}.{name}.weight") for n in layers for name in names]

    def feed_forward(*parts: str) -> tuple[list[str], list[list[str]]]:
        """The types of gate and up of these parts, and those of their down projections by layer."""
        gate_up = types(*(f"mlp{part}.{each}_proj" for part in parts for each in ("gate", "up")))
        names = [f"mlp{part}.down_proj" for part in parts]
        return gate_up, [types(*names, layers=[layer]) for layer in range(spec.layers)]

    attending = spec.attention_layers
    query_key = format_for(types("self_attn.q_proj", "self_attn.k_proj", layers=attending))
    value = format_for(types("self_attn.v_proj", layers=attending))
    output = format_for(types("self_attn.o_proj", layers=attending))
    gate_up_types, down_types = feed_forward(".experts" if spec.experts else "")
    gate_up, down = format_for(gate_up_types), _formats_by_layer(down_types)
    head = format_for([checkpoint.storage(EMBEDDING if spec.tied else HEAD)])
    if query_key is None or value is None or output is None or gate_up is None or head is None:
        return None
    if down is None or format_for([checkpoint.storage(EMBEDDING)]) is None:
        return None
    delta_in = delta_out = shared_gate_up = shared_down = None
    if spec.delta is not None:
        layers = spec.delta.layers
        delta_in = format_for(types("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", layers=layers))
        delta_out = format_for(types("linear_attn.out_proj", layers=layers))
        if delta_in is None or delta_out is None:
            return None
    if spec.experts is not None and spec.experts.shared:
        # Formats of its own, unless those of the other experts hold it: files may keep it in more bits.
        joint_gate_up, joint_down = feed_forward(".experts", ".shared_expert")
        if (format_for(joint_gate_up), _formats_by_layer(joint_down)) == (gate_up, down):
            gate_up_types, down_types = joint_gate_up, joint_down
        else:
            shared_gate_up_types, shared_types = feed_forward(".shared_expert")
            shared_gate_up = format_for(shared_gate_up_types)
            shared_down = format_for(list(chain(*shared_types)))
            if shared_gate_up is None or shared_down is None:
                return None
    narrow, wide, wide_layers = down
    of_narrow = [kinds for layer, kinds in enumerate(down_types) if layer not in wide_layers]
    only = {"gate_up": set(gate_up_types), "down": set(chain(*of_narrow))}
    return Formats(
        query_key,
        value,
        output,
        gate_up,
        narrow,
        head,
        wide,
        wide_layers,
        delta_in,
        delta_out,
        shared_gate_up,
        shared_down,
        frozenset(name for name, kinds in only.items() if kinds == {"Q4_K"}),
    )


def _formats_by_layer(layers: list[list[str]]) -> tuple[int, int, frozenset[int]] | None:
    """The narrowest format of any layer's types, one that holds all other layers, and which layers those
    are. None if no format holds some of the types."""
    if format_for(list(chain(*layers))) is None:
        return None
    narrow = min((format_for(types) or EIGHT_OFFSET for types in layers), key=lambda each: BLOCK_BYTES[each])
    wide_layers = frozenset(layer for layer, types in enumerate(layers) if not _FITS[narrow] >= set(types))
    wide = format_for([kind for layer in wide_layers for kind in layers[layer]]) if wide_layers else None
    return narrow, wide or narrow, wide_layers


def choose_precision(checkpoint: Checkpoint, wanted: RequestedPrecision) -> tuple[Precision, Formats | None]:
    """The precision for `wanted`, and the formats of stored matrices. "auto" keeps 4-bit files and mixtures
    as stored, and runs others in 16 bits. Raises UnsupportedModel if "stored" is not possible."""
    if wanted != "auto" and wanted != "stored":
        return wanted, None
    formats = stored_formats(checkpoint)
    mixture = checkpoint.spec.experts is not None  # in 16 bits it would need several times the memory
    if formats is not None and (wanted == "stored" or mixture or formats.gate_up in (FOUR, FLOAT_FOUR)):
        return "stored", formats
    if wanted == "stored":
        raise UnsupportedModel(
            f"{checkpoint.spec.name} has matrices that are not of a stored type "
            f"({', '.join(sorted(STORED_TYPES))}); set model.precision to int8, or to auto for 16 bits"
        )
    return "bf16", None


def typical_formats(spec: ModelSpec) -> Formats:
    """The formats of a typical 4-bit file (Q4_K_M): six bits for the head and, in half of the layers, for
    values and the down projection, which has five and eight bits (Q5_0, Q8_0) where its rows are no multiple
    of 256 columns. gpt-oss: MXFP4 experts, the rest Q8_0."""
    if spec.architecture == "gpt_oss":
        return Formats(EIGHT, EIGHT, EIGHT, FLOAT_FOUR, FLOAT_FOUR, EIGHT, wide=FLOAT_FOUR)
    layers = frozenset(range(0, spec.layers, 2))
    formats = Formats(FOUR, SIX_OFFSET, FOUR, FOUR, FOUR, SIX, wide=SIX, wide_layers=layers)
    width = spec.experts.width if spec.experts else spec.intermediate
    if width % STEP_K:
        formats = replace(formats, down=SIX, wide=EIGHT)
    compact = [name for name, inner in (("gate_up", spec.hidden), ("down", width)) if inner % STEP_K == 0]
    formats = replace(formats, all_q4_k=frozenset(compact))
    return formats if spec.delta is None else replace(formats, delta_in=FOUR, delta_out=FOUR)


def read_codes(stored: Tensor, kind: str) -> Codes:
    """Reads `stored` [rows, bytes] of GGUF's type `kind`."""
    codes, scales, offsets, zero = _READERS[kind](stored.view(stored.shape[0], -1, _SIZES[kind]))
    rows, columns = stored.shape[0], codes[0].numel()

    def grouped(each: Tensor) -> Tensor:
        each = each.reshape(rows, -1)
        return each.repeat_interleave(columns // GROUP // each.shape[1], 1)

    scales = grouped(scales)
    offsets = -zero * scales if zero is not None else grouped(offsets)
    steps = None
    if kind == "Q4_K":
        blocks = stored.view(rows, -1, _SIZES[kind])
        steps = torch.cat((_half(blocks, 0), _half(blocks, 2)), -1).reshape(rows, -1)
    return Codes(codes.reshape(rows, columns), scales, offsets, zero, kind == "MXFP4", steps)


_Read = tuple[Tensor, Tensor, Tensor, int | None]


def _q4_0(block: Tensor) -> _Read:
    scale = _half(block, 0)
    return _lower_then_upper(block[..., 2:]), scale, scale, 8


def _q4_1(block: Tensor) -> _Read:
    return _lower_then_upper(block[..., 4:]), _half(block, 0), _half(block, 2), None


def _q5_0(block: Tensor) -> _Read:
    scale = _half(block, 0)
    return _with_fifth_bits(block[..., 6:], block[..., 2:6]), scale, scale, 16


def _q5_1(block: Tensor) -> _Read:
    return _with_fifth_bits(block[..., 8:], block[..., 4:8]), _half(block, 0), _half(block, 2), None


def _q8_0(block: Tensor) -> _Read:
    scale = _half(block, 0)
    return block[..., 2:] ^ 0x80, scale, scale, 128


def _q4_k(unit: Tensor) -> _Read:
    scale, minimum = _six_bit_scales(unit)
    return _pairs_of_blocks(unit[..., 16:]), scale, -minimum, None


def _q5_k(unit: Tensor) -> _Read:
    scale, minimum = _six_bit_scales(unit)
    places = torch.arange(8, dtype=torch.uint8, device=unit.device)[:, None]
    fifth = (unit[..., None, 16:48] >> places) & 1
    return _pairs_of_blocks(unit[..., 48:]) | (fifth << 4), scale, -minimum, None


def _q6_k(unit: Tensor) -> _Read:
    low = unit[..., :128].reshape(*unit.shape[:-1], 2, 2, 32)  # half, piece, weight
    high = unit[..., 128:192].reshape(*unit.shape[:-1], 2, 1, 32)
    four = torch.cat((low & 15, low >> 4), -2)
    places = torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8, device=unit.device)
    two = (high >> places) & 3
    scale = _half(unit, 208) * unit[..., 192:208].contiguous().view(torch.int8).float()
    return four | (two << 4), scale, scale, 32


def _mxfp4(block: Tensor) -> _Read:
    scale = torch.ldexp(torch.ones_like(block[..., :1]).float(), block[..., :1].int() - 127)
    return _lower_then_upper(block[..., 1:]), scale, torch.zeros_like(scale), None


def float4_values(codes: Tensor) -> Tensor:
    """The numbers of 4-bit floats: a sign, two bits of exponent, one of fraction."""
    sizes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    return torch.tensor([*sizes, *(-size for size in sizes)], device=codes.device)[codes.int()]


_READERS: dict[str, Callable[[Tensor], _Read]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}
_SIZES = {known.name: known.block_bytes for known in STORAGE_TYPES.values()}


def _half(block: Tensor, at: int) -> Tensor:
    """The half-precision number at byte `at` of every block, [rows, blocks, 1]."""
    return block[..., at : at + 2].contiguous().view(torch.float16).float()


def _lower_then_upper(codes: Tensor) -> Tensor:
    return torch.cat((codes & 15, codes >> 4), -1)


def _with_fifth_bits(codes: Tensor, fifth: Tensor) -> Tensor:
    places = torch.arange(8, dtype=torch.uint8, device=codes.device)
    bits = ((fifth[..., None] >> places) & 1).flatten(-2)
    return _lower_then_upper(codes) | (bits << 4)


def _pairs_of_blocks(codes: Tensor) -> Tensor:
    """Eight blocks of 32 codes from 128 bytes; each 32 bytes hold one in the lower and one in the upper
    bits."""
    pairs = codes.reshape(*codes.shape[:-1], 4, 1, 32)
    return torch.cat((pairs & 15, pairs >> 4), -2).reshape(*codes.shape[:-1], 8, 32)


def _six_bit_scales(unit: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum of each of a unit's eight blocks: 6-bit multiples of two half-precision numbers."""
    a, b, c = unit[..., 4:8], unit[..., 8:12], unit[..., 12:16]
    scales = torch.cat((a & 63, (c & 15) | (a >> 6) << 4), -1)
    minima = torch.cat((b & 63, (c >> 4) | (b >> 6) << 4), -1)
    return _half(unit, 0) * scales.float(), _half(unit, 2) * minima.float()

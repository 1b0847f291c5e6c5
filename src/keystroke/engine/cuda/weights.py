"""A model's weights on the device, packed for the decode kernel.

Knows where tensors come from (a checkpoint, or chance for speed measurements) and the order in which
they lie. It computes nothing with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from keystroke.engine.base import ModelInfo
from keystroke.engine.checkpoint.rope import rope_tables
from keystroke.engine.checkpoint.spec import EMBEDDING, FINAL_NORM, HEAD, Checkpoint, ModelSpec
from keystroke.engine.cuda.code_packing import fitted, joined
from keystroke.engine.cuda.packing import gate_up_order, pack, places_of, plain_order, qkv_order, unpack
from keystroke.engine.cuda.plan import TAIL_BYTES, KvPrecision, Matrix, Plan, Precision
from keystroke.engine.cuda.stored import (
    GROUP,
    STORED_TYPES,
    Codes,
    Wanted,
    chosen,
    codes_of,
    usual_formats,
)
from keystroke.engine.cuda.target import HOPPER, Target
from keystroke.errors import NotEnoughMemory

_TILES_AT_ONCE = 4096  # that are packed together
_DENSE_SHARE = 16  # of the memory that is free: so much a second copy of the layers may take
Source = Callable[[str, tuple[int, ...]], Tensor | Codes]  # a tensor by its Hugging Face name, on the device


@dataclass(frozen=True)
class DenseLayer:
    """One layer as plain matrices, for prefill."""

    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor


class MatrixUnpacker(Protocol):
    def unpack(self, name: str, packed: Tensor, matrix: Matrix, rows: int, folded: Tensor | None) -> Tensor:
        """What `unpack` gives for the matrix `name` of a layer."""


@dataclass(frozen=True)
class KvSteps:
    """Keys and values in bytes: how much one step of each dimension is, float32 [layers, kv_heads, head_dim].
    Rotary partners have the same: a step then stays what it is through the rotation."""

    keys: Tensor
    values: Tensor


@dataclass
class Weights:
    plan: Plan
    layers: Tensor  # uint8, all layers' packed matrices
    head: Tensor
    embedding: Tensor  # bf16 [vocab, hidden]
    norms: Tensor  # float32 [2 layers + 1, hidden]
    qk_norms: Tensor  # float32 [layers, 2, head_dim]
    biases: list[
        dict[str, Tensor]
    ]  # float32, by matrix, for prefill; the kernel has its own beside the weights
    rope: Tensor  # float32 [context, head_dim / 2, 2]
    routers: Tensor  # float32 [layers, experts, hidden] of a mixture; otherwise empty

    def __post_init__(self) -> None:
        spec, device = self.plan.spec, self.layers.device
        self.kv_steps: KvSteps | None = None
        self.kernel_norms = self.qk_norms  # as the kernel multiplies with them
        self._folded: list[dict[str, Tensor]] = []  # what Q, K and V rows were multiplied by in the kernel
        self._orders = {name: order.to(device) for name, order in _orders(spec).items()}
        self._rows = {
            "query_key": (spec.heads + spec.kv_heads) * spec.head_dim,
            "value": spec.kv_heads * spec.head_dim,
            "output": spec.hidden,
            "gate_up": 2 * spec.intermediate,
            "down": spec.hidden,
        }
        if spec.experts is not None:
            self._rows["gate_up"] = 2 * spec.experts.count * spec.experts.width
            self._rows["down"] = spec.experts.count * spec.hidden
        self._places = {name: places_of(self._orders[name], rows) for name, rows in self._rows.items()}
        self._kept: list[DenseLayer] = []
        self.unpacker: MatrixUnpacker | None = None  # a faster way, where stored matrices lie on a GPU

    def keep_dense(self, room: int) -> None:
        """Keep all layers unpacked too, if that takes no more than `room` bytes: a short prompt's prefill
        would spend most of its time unpacking."""
        matrices = [(rows, getattr(self.plan, name)) for name, rows in self._rows.items()]
        each = sum(2 * rows * matrix.inner * matrix.split for rows, matrix in matrices)
        if self.plan.spec.layers * each <= room:
            self._kept = [self.dense(layer) for layer in range(self.plan.spec.layers)]

    def dense(self, layer: int) -> DenseLayer:
        """The matrices of one layer, unpacked. Costs one pass over its bytes, unless they are kept."""
        if self._kept:
            return self._kept[layer]
        at = self.plan.layer_offsets[layer]
        found = {}
        for name, matrix in self.plan.layer(layer).items():
            folded = self._folded[layer].get(name) if self._folded else None
            packed = self.layers[at : at + matrix.bytes]
            rows = self._rows[name]
            if self.unpacker is not None:
                found[name] = self.unpacker.unpack(name, packed, matrix, rows, folded)
            else:
                found[name] = unpack(packed, self._places[name], matrix, rows, folded)
            at += matrix.bytes
        qkv = torch.cat((found.pop("query_key"), found.pop("value")))
        return DenseLayer(qkv, **found)

    def fold(self, steps: KvSteps) -> None:
        """From now on the kernel's projection gives keys and values in these steps, and queries in their
        inverse, at no cost: every packed row has a factor of its own. `dense` stays as it is."""
        plan, spec = self.plan, self.plan.spec
        self.kv_steps = steps
        queries = steps.keys.repeat_interleave(spec.heads // spec.kv_heads, 1)
        rows = torch.cat((queries, 1 / steps.keys, 1 / steps.values), 1)
        if (
            spec.qk_norm
        ):  # a norm comes behind the projection: its weights carry the factors, one for all heads
            self.kernel_norms = self.qk_norms * torch.stack((steps.keys[:, 0], 1 / steps.keys[:, 0]), 1)
            rows[:, : spec.heads + spec.kv_heads] = 1
        for layer, row in enumerate(rows):
            queries_keys, values = row[: -spec.kv_heads].reshape(-1), row[-spec.kv_heads :].reshape(-1)
            folded = {"query_key": queries_keys, "value": values}
            self._folded.append({k: v[self._orders[k]].view(-1, 16) for k, v in folded.items()})
            at = plan.layer_offsets[layer]
            for name, factors in self._folded[-1].items():
                matrix = plan.layer(layer)[name]
                units = self.layers[at : at + matrix.bytes].view(matrix.units, matrix.unit_bytes)
                units[:, -TAIL_BYTES:].view(torch.float32).view(-1, 2, 16).mul_(factors[:, None])
                at += matrix.bytes

    @property
    def nbytes(self) -> int:
        tensors = (self.layers, self.head, self.embedding, self.norms, self.qk_norms, self.rope, self.routers)
        return sum(t.numel() * t.element_size() for t in tensors)

    def info(self) -> ModelInfo:
        spec = self.plan.spec
        return ModelInfo(
            name=spec.name,
            architecture=spec.architecture,
            context_length=spec.context_length,
            vocab_size=spec.vocab_size,
            layers=spec.layers,
            parameters=spec.parameters,
            weight_bytes=self.nbytes,
            kv_bytes_per_token=self.plan.kv_bytes_per_token,
            precision=self.plan.precision,
            bos=spec.bos,
            eos=spec.eos,
        )


def plan_of(
    checkpoint: Checkpoint,
    precision: Wanted,
    blocks: int,
    kv_precision: KvPrecision = "bf16",
    target: Target = HOPPER,
) -> Plan:
    """How this model runs on so many multiprocessors. Raises UnsupportedModel where the kernel cannot, or
    where weights are to be kept as stored and some are not of a type that can be."""
    meant, stored = chosen(checkpoint, precision)
    return Plan(checkpoint.spec, meant, blocks, kv_precision, stored, target)


def load_weights(checkpoint: Checkpoint, plan: Plan, device: torch.device) -> Weights:
    """Read, convert and pack every tensor of `checkpoint`, one at a time. Bytes go to the device as they are
    stored, and are widened there."""

    def source(name: str, shape: tuple[int, ...]) -> Tensor | Codes:
        array, kind = checkpoint.raw(name)
        if kind in STORED_TYPES:
            codes = codes_of(torch.from_numpy(np.array(array)).to(device), kind)
            return codes if plan.stored is not None else codes.weights()
        if kind == "BF16":
            return (
                torch.from_numpy(np.array(array).view(np.int16)).view(torch.bfloat16).to(device).view(shape)
            )
        wide = array if array.dtype == np.float32 else checkpoint.tensor(name)
        return torch.from_numpy(np.array(wide)).to(device).view(shape)

    return build_weights(plan, source, device)


def random_plan(
    spec: ModelSpec,
    precision: Precision,
    blocks: int,
    kv_precision: KvPrecision = "bf16",
    target: Target = HOPPER,
) -> Plan:
    """The plan of a model of this shape; stored weights are in the formats that such files usually have."""
    stored = usual_formats(spec) if precision == "stored" else None
    return Plan(spec, precision, blocks, kv_precision, stored, target)


def random_weights(
    spec: ModelSpec,
    precision: Precision,
    device: torch.device,
    blocks: int,
    seed: int = 0,
    kv_precision: KvPrecision = "bf16",
    target: Target = HOPPER,
) -> Weights:
    """A model of this shape whose weights mean nothing: speed does not depend on them."""
    generator = torch.Generator(device=device).manual_seed(seed)
    plan = random_plan(spec, precision, blocks, kv_precision, target)

    def source(name: str, shape: tuple[int, ...]) -> Tensor | Codes:
        if precision == "stored" and len(shape) == 2:
            return random_codes(shape, generator)
        return random_tensor(name, shape, generator)

    return build_weights(plan, source, device)


def random_codes(shape: tuple[int, int], generator: torch.Generator) -> Codes:
    """A matrix of codes of four bits that mean nothing, as large as trained weights are."""
    device = generator.device
    codes = torch.randint(0, 16, shape, generator=generator, device=device, dtype=torch.uint8)
    scales = torch.rand(shape[0], shape[1] // GROUP // 2, generator=generator, device=device)
    scales = ((scales + 0.5) * (shape[1] ** -0.5 / 4.6)).repeat_interleave(2, 1)
    return Codes(codes, scales, -8 * scales, 8)


def random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """The next tensor of a model whose weights mean nothing, as large as trained ones are."""
    noise = torch.randn(shape, generator=generator, device=generator.device)
    if name.endswith("norm.weight"):
        return noise * 0.1 + 1
    return (noise * (shape[-1] ** -0.5 if len(shape) == 2 else 0.1)).to(torch.bfloat16)


def build_weights(plan: Plan, source: Source, device: torch.device) -> Weights:
    try:
        weights = _build(plan, source, device)
        if device.type == "cuda":
            weights.keep_dense(torch.cuda.mem_get_info(device)[0] // _DENSE_SHARE)
        return weights
    except torch.cuda.OutOfMemoryError as error:
        raise NotEnoughMemory(
            f"{plan.spec.name} needs {plan.packed_bytes / 1e9:.1f} GB of GPU memory for its weights in "
            f"{plan.precision}; choose 8 or 4 bits, or a smaller model"
        ) from error


def _build(plan: Plan, source: Source, device: torch.device) -> Weights:
    spec = plan.spec
    table = source(EMBEDDING, (spec.vocab_size, spec.hidden))
    embedding = _plain(table).to(torch.bfloat16)
    layers = torch.empty(plan.layer_offsets[-1], dtype=torch.uint8, device=device)
    norms = torch.empty(2 * spec.layers + 1, spec.hidden, device=device)
    qk_norms = torch.ones(spec.layers, 2, spec.head_dim, device=device)
    orders = _orders(spec)
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    all_biases = []
    experts = spec.experts
    routers = torch.zeros(spec.layers, experts.count if experts else 0, spec.hidden, device=device)
    feed_forward = "mlp.experts" if experts else "mlp"
    width, down_rows = spec.intermediate, spec.hidden
    if experts is not None:
        width, down_rows = experts.count * experts.width, experts.count * spec.hidden
    for layer in range(spec.layers):
        at = f"model.layers.{layer}"
        parts: dict[str, tuple[tuple[str, int, int], ...]] = {
            "query_key": (
                (f"{at}.self_attn.q_proj", queries, spec.hidden),
                (f"{at}.self_attn.k_proj", keys, spec.hidden),
            ),
            "value": ((f"{at}.self_attn.v_proj", keys, spec.hidden),),
            "output": ((f"{at}.self_attn.o_proj", spec.hidden, queries),),
            "gate_up": (
                (f"{at}.{feed_forward}.gate_proj", width, spec.hidden),
                (f"{at}.{feed_forward}.up_proj", width, spec.hidden),
            ),
            "down": ((f"{at}.{feed_forward}.down_proj", down_rows, plan.down.inner * plan.down.split),),
        }
        biased = {
            "query_key": spec.qkv_bias,
            "value": spec.qkv_bias,
            "output": spec.o_bias,
            "gate_up": spec.mlp_bias,
            "down": spec.mlp_bias,
        }
        biases: dict[str, Tensor] = {}
        offset = plan.layer_offsets[layer]
        for name, matrix in plan.layer(layer).items():
            members = parts[name]
            weight = _stacked(
                [source(f"{m}.weight", (rows, columns)) for m, rows, columns in members], matrix
            )
            bias = None
            if biased[name]:
                bias = torch.cat([_plain(source(f"{m}.bias", (rows,))).float() for m, rows, _ in members])
                biases[name] = bias
            _pack_into(layers[offset : offset + matrix.bytes], weight, bias, orders[name], matrix)
            offset += matrix.bytes
        if experts is not None:
            routers[layer] = _plain(source(f"{at}.mlp.gate.weight", (experts.count, spec.hidden))).float()
        if spec.qkv_bias:
            biases["qkv"] = torch.cat((biases.pop("query_key"), biases.pop("value")))
        all_biases.append(biases)

        def vector(name: str, size: int) -> Tensor:
            return _plain(source(name, (size,))).float()

        norms[2 * layer] = vector(f"{at}.input_layernorm.weight", spec.hidden)
        norms[2 * layer + 1] = vector(f"{at}.post_attention_layernorm.weight", spec.hidden)
        if spec.qk_norm:
            qk_norms[layer, 0] = vector(f"{at}.self_attn.q_norm.weight", spec.head_dim)
            qk_norms[layer, 1] = vector(f"{at}.self_attn.k_norm.weight", spec.head_dim)
    norms[-1] = _plain(source(FINAL_NORM, (spec.hidden,))).float()
    tied = table if plan.stored is not None else embedding
    head = _stacked([tied if spec.tied else source(HEAD, (spec.vocab_size, spec.hidden))], plan.head)
    cosines, sines = rope_tables(spec, spec.context_length)
    rope = torch.from_numpy(np.stack((cosines, sines), 2)).contiguous().to(device)
    packed_head = pack(head, None, plain_order(spec.vocab_size), plan.head)
    return Weights(plan, layers, packed_head, embedding, norms, qk_norms, all_biases, rope, routers)


def _pack_into(
    to: Tensor, weight: Tensor | Codes, bias: Tensor | None, order: Tensor, matrix: Matrix
) -> None:
    """Pack a matrix, in portions where it is large: packing takes several times its memory."""
    if matrix.split > 1 or bias is not None or matrix.tiles <= _TILES_AT_ONCE:
        to[:] = pack(weight, bias, order, matrix)
        return
    for first in range(0, matrix.tiles, _TILES_AT_ONCE):
        part = replace(matrix, tiles=min(_TILES_AT_ONCE, matrix.tiles - first))
        begin = first * matrix.unit_bytes
        rows = order[first * 16 : (first + part.tiles) * 16]
        to[begin : begin + part.bytes] = pack(weight, None, rows, part)


def _orders(spec: ModelSpec) -> dict[str, Tensor]:
    """The row of the model's matrix at each place of the packed one."""
    rotated = (spec.heads + spec.kv_heads) * spec.head_dim
    return {
        "query_key": qkv_order(spec.heads, spec.kv_heads, spec.head_dim)[:rotated],
        "value": plain_order(spec.kv_heads * spec.head_dim),
        "output": plain_order(spec.hidden),
        "gate_up": gate_up_order(
            spec.experts.count * spec.experts.width if spec.experts else spec.intermediate
        ),
        "down": plain_order(spec.hidden * (spec.experts.count if spec.experts else 1)),
    }


def _stacked(parts: Sequence[Tensor | Codes], matrix: Matrix) -> Tensor | Codes:
    codes = [fitted(part, matrix.format) for part in parts if isinstance(part, Codes)]
    plain = [part for part in parts if not isinstance(part, Codes)]
    assert not (codes and plain), "a matrix is stored whole or not at all"
    return joined(codes) if codes else torch.cat(plain)


def _plain(tensor: Tensor | Codes) -> Tensor:
    return tensor.weights() if isinstance(tensor, Codes) else tensor

"""A model's weights on the device, packed for the decode kernel: from a checkpoint, or random for
benchmarks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from keystroke.engine.base import ModelInfo
from keystroke.engine.checkpoint.rope import rope_tables
from keystroke.engine.checkpoint.spec import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    Checkpoint,
    DeltaSpec,
    ExpertsSpec,
    ModelSpec,
)
from keystroke.engine.cuda.code_packing import concatenate, shift_zero
from keystroke.engine.cuda.early_router import EarlyRouter
from keystroke.engine.cuda.expert_upload import ExpertUploader
from keystroke.engine.cuda.expert_use import Uses, hottest, read_profile, write_profile
from keystroke.engine.cuda.packing import (
    gate_up_order,
    pack,
    plain_order,
    qkv_order,
    rotary_first,
    row_positions,
    unpack,
)
from keystroke.engine.cuda.plan import (
    STEP_K,
    TAIL_BYTES,
    Formats,
    KvPrecision,
    Matrix,
    Plan,
    Precision,
    all_experts,
)
from keystroke.engine.cuda.stored import (
    GROUP,
    STORED_TYPES,
    Codes,
    RequestedPrecision,
    choose_precision,
    read_codes,
    typical_formats,
)
from keystroke.engine.cuda.target import HOPPER, Target
from keystroke.engine.host_experts import ExpertStore, ExpertTable
from keystroke.errors import NotEnoughMemory

_TILES_AT_ONCE = 4096  # packed in one pass
_EXPERTS_AT_ONCE = 32  # widened in one pass
_DENSE_SHARE = 16  # an unpacked copy of the layers may use 1/16 of the free memory
Source = Callable[[str, tuple[int, ...]], Tensor | Codes]  # a tensor by its Hugging Face name, on the device


@dataclass(frozen=True)
class DenseMixer:
    """The matrices of attention or of a delta net, for prefill."""

    qkv: Tensor  # of a delta net: queries, keys and values before the convolution, then gates
    output: Tensor
    gate: Tensor | None  # of attention's output


@dataclass(frozen=True)
class DenseLayer(DenseMixer):
    """One layer as plain matrices."""

    gate_up: Tensor
    down: Tensor


class MatrixUnpacker(Protocol):
    def unpack(self, name: str, packed: Tensor, matrix: Matrix, rows: int, folded: Tensor | None) -> Tensor:
        """Same result as `packing.unpack` for the matrix `name` of a layer. Those of the feed-forward part
        share memory: the next one overwrites it."""


@dataclass(frozen=True)
class KvSteps:
    """Step sizes of 8-bit keys and values, float32 [layers, kv_heads, head_dim]. Rotary partners share one,
    so that rotation keeps it."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class DeltaWeights:
    """The small tensors of all gated delta nets, float32."""

    heads: Tensor  # [layers, 2 value_heads, hidden]: b, then a
    convolutions: Tensor  # [layers, channels, kernel]
    decays: Tensor  # [layers, value_heads]
    biases: Tensor  # the same
    norms: Tensor  # [layers, value_size]


@dataclass
class HostExperts:
    """Experts in host memory, and the one at each position in GPU memory, by layer; a shared expert is always
    on the GPU."""

    store: ExpertStore
    resident: list[list[int]]
    profile: Path | None = None  # where their use is kept
    before: Uses | None = None  # what it held

    def keep_profile(self, uses: Uses) -> None:
        """Add `uses` to the profile."""
        if self.profile is not None and uses.any():
            write_profile(self.profile, uses if self.before is None else uses + self.before)

    def table(self, experts: ExpertsSpec) -> npt.NDArray[np.int16]:
        """The position of every expert in GPU memory, -1 if there is none: [layers, experts]."""
        found = np.full((len(self.resident), all_experts(experts)), -1, np.int16)
        for layer, held in enumerate(self.resident):
            found[layer, held] = range(len(held))
            found[layer, experts.count :] = len(held)
        return found

    def absent(self, layer: int, experts: ExpertsSpec) -> list[int]:
        return sorted(set(range(experts.count)) - set(self.resident[layer]))


def place_experts(plan: Plan, store: ExpertStore, profile: Path | None = None) -> HostExperts:
    """As many experts of each layer on the GPU as the plan says: those that `profile` says are used most."""
    assert plan.resident is not None
    assert plan.spec.experts is not None
    layers, count = plan.spec.layers, plan.spec.experts.count
    before = None if profile is None else read_profile(profile, layers, count)
    return HostExperts(store, hottest(before, layers, plan.resident), profile, before)


@dataclass
class Weights:
    plan: Plan
    layers: Tensor  # uint8, all layers' packed matrices
    head: Tensor
    embedding: Tensor  # bf16 [vocab, hidden]
    norms: Tensor  # float32 [2 layers + 1, hidden]
    qk_norms: Tensor  # float32 [attention layers, 2, head_dim]
    biases: list[dict[str, Tensor]]  # float32, by matrix, for prefill; the kernel reads those in `layers`
    rope: Tensor  # float32 [context, head_dim / 2, 2]
    window_rope: Tensor  # the same for windowed layers
    routers: Tensor  # float32 [layers, experts, hidden] of a mixture; otherwise empty
    router_biases: Tensor  # float32 [layers, experts]
    sinks: Tensor  # float32 [layers, heads], times log2(e); empty if the model has none
    early: EarlyRouter
    delta: DeltaWeights | None = None
    host: HostExperts | None = None  # of a mixture of which the GPU holds a part

    def __post_init__(self) -> None:
        spec, device = self.plan.spec, self.layers.device
        self.kv_steps: KvSteps | None = None
        self.kernel_norms = self.qk_norms  # the kernel's: step sizes are folded in
        self._folded: list[dict[str, Tensor]] = []  # factors folded into Q, K and V rows
        self._orders = {name: order.to(device) for name, order in _orders(self.plan).items()}
        self._rows = {
            "query_key": (spec.heads + spec.kv_heads + self.plan.gate_heads) * spec.head_dim,
            "value": spec.kv_heads * spec.head_dim,
            "output": spec.hidden,
            "gate_up": 2 * spec.intermediate,
            "down": spec.hidden,
        }
        if spec.experts is not None:
            self._rows["gate_up"] = 2 * self.plan.expert_slots * spec.experts.width
            self._rows["down"] = self.plan.expert_slots * spec.hidden
            self._rows |= {"shared_gate_up": 2 * spec.experts.shared, "shared_down": spec.hidden}
        if spec.delta is not None:
            self._rows["delta_in"] = spec.delta.channels + spec.delta.values
            self._rows["delta_out"] = spec.hidden
        self._places = {name: row_positions(order, self._rows[name]) for name, order in self._orders.items()}
        self._dense_layers: list[DenseLayer] = []
        self.unpacker: MatrixUnpacker | None = None  # for stored matrices on a GPU
        self._uploader = ExpertUploader(device)

    def keep_dense(self, room: int) -> None:
        """Keep an unpacked copy of all layers if it needs at most `room` bytes: short prompts prefill
        faster."""
        layers = (self.plan.layer(layer).items() for layer in range(self.plan.spec.layers))
        need = sum(2 * self._rows[name] * m.inner * m.split for layer in layers for name, m in layer)
        if need <= room:
            self._dense_layers = [self.dense(layer) for layer in range(self.plan.spec.layers)]

    def dense(self, layer: int) -> DenseLayer:
        """The matrices of one layer, unpacked now or kept by `keep_dense`."""
        if self._dense_layers:
            return self._dense_layers[layer]
        mixer = self.mixer(layer)
        gate_up, down = (part(layer).clone() for part in (self.gate_up, self.down))
        return DenseLayer(mixer.qkv, mixer.output, mixer.gate, gate_up, down)

    def mixer(self, layer: int) -> DenseMixer:
        """What a layer begins with, as `dense` has it."""
        if self._dense_layers:
            return self._dense_layers[layer]
        if self.plan.is_delta(layer):
            return DenseMixer(self._unpacked(layer, "delta_in"), self._unpacked(layer, "delta_out"), None)
        query_key, value, output = (self._unpacked(layer, name) for name in ("query_key", "value", "output"))
        gates = self.plan.gate_heads * self.plan.spec.head_dim
        queries_keys, gate = torch.split(query_key, [len(query_key) - gates, gates])
        return DenseMixer(torch.cat((queries_keys, value)), output, gate if gates else None)

    def gate_up(self, layer: int) -> Tensor:
        """Gate and up of a layer, as `dense` has them. The next `gate_up` or `down` may overwrite it."""
        if self._dense_layers:
            return self._dense_layers[layer].gate_up
        found = self._unpacked(layer, "gate_up")
        if self.plan.shared_apart:
            routed, shared = found.tensor_split(2), self._unpacked(layer, "shared_gate_up").tensor_split(2)
            found = torch.cat((routed[0], shared[0], routed[1], shared[1]))
        if self.host is not None:
            stored = self.host.store.layers[layer]
            found = self._with_absent(layer, found, (stored.gate, stored.up))
        return found

    def down(self, layer: int) -> Tensor:
        """The down projection of a layer, likewise."""
        if self._dense_layers:
            return self._dense_layers[layer].down
        found = self._unpacked(layer, "down")
        if self.plan.shared_apart:
            found = torch.cat((found, self._unpacked(layer, "shared_down")))
        if self.host is not None:
            found = self._with_absent(layer, found, (self.host.store.layers[layer].down,))
        return found

    def _unpacked(self, layer: int, name: str) -> Tensor:
        matrices, at = self.plan.layer(layer), self.plan.layer_offsets[layer]
        for before in itertools.takewhile(lambda each: each != name, matrices):
            at += matrices[before].bytes
        matrix, rows = matrices[name], self._rows[name]
        if not rows:
            return torch.empty(0, matrix.inner, dtype=torch.bfloat16, device=self.layers.device)
        packed = self.layers[at : at + matrix.bytes]
        folded = self._folded[layer].get(name) if self._folded else None
        if self.unpacker is not None:
            return self.unpacker.unpack(name, packed, matrix, rows, folded)
        return unpack(packed, self._places[name], matrix, rows, folded)

    def _with_absent(self, layer: int, present: Tensor, tables: Sequence[ExpertTable]) -> Tensor:
        """A matrix of all experts of a layer, those in host memory copied to the device now."""
        experts, host = self.plan.spec.experts, self.host
        assert experts is not None
        assert host is not None
        device, parts, columns = present.device, len(tables), present.shape[1]
        shared = range(experts.count, all_experts(experts))
        held = torch.tensor([*host.resident[layer], *shared], dtype=torch.int64, device=device)
        absent = host.absent(layer, experts)
        places = torch.tensor(absent, device=device)
        present = present.view(parts, len(held), -1 if len(held) else 0, columns)
        height = tables[0].rows.shape[0] // experts.count
        full = torch.empty(parts, all_experts(experts), height, columns, dtype=torch.bfloat16, device=device)
        if len(held):
            full[:, held] = present
        for first in range(0, len(absent), _EXPERTS_AT_ONCE):
            some = absent[first : first + _EXPERTS_AT_ONCE]
            for part, table in enumerate(tables):
                found = from_bytes(self._uploader.rows(table, some, experts.count), table.kind)
                dense = _as_tensor(found).view(len(some), height, columns).to(torch.bfloat16)
                full[part].index_copy_(0, places[first : first + _EXPERTS_AT_ONCE], dense)
        return full.view(-1, columns)

    def place_expert(self, layer: int, slot: int, expert: int) -> None:
        """Put an expert at a position in GPU memory, in place of the one there. The kernel learns of it by
        `Stepper.set_placement`. No step may run."""
        plan, spec, host = self.plan, self.plan.spec, self.host
        assert host is not None
        assert spec.experts is not None
        stored = host.store.layers[layer]
        tables = {"gate_up": (stored.gate, stored.up), "down": (stored.down,)}
        orders = {"gate_up": gate_up_order(spec.experts.width), "down": plain_order(spec.hidden)}
        at = plan.layer_offsets[layer]
        for name, matrix in plan.layer(layer).items():
            if name in tables:
                one = replace(matrix, tiles=matrix.tiles // plan.expert_slots)
                parts: list[Tensor | Codes] = []
                for table in tables[name]:
                    rows = self._uploader.rows(table, [expert], spec.experts.count)
                    part = from_bytes(rows, table.kind)
                    parts.append(part if plan.stored is not None else _as_tensor(part).float())
                bias = self.biases[layer].get(name)
                if bias is not None:
                    bias = bias[_expert_rows(plan, name, [expert]).to(bias.device)]
                begin = at + slot * one.bytes
                self.layers[begin : begin + one.bytes] = pack(_stack(parts, one), bias, orders[name], one)
            at += matrix.bytes
        host.resident[layer][slot] = expert

    def fold_kv_steps(self, steps: KvSteps) -> None:
        """Scale packed rows so that the kernel's projection gives keys and values in steps, and queries in
        the inverse. `dense` is not affected."""
        plan, spec = self.plan, self.plan.spec
        self.kv_steps = steps
        queries = steps.keys.repeat_interleave(spec.heads // spec.kv_heads, 1)
        rows = torch.cat((queries, 1 / steps.keys, 1 / steps.values), 1)
        if spec.qk_norm:  # the norm follows the projection, so its weights get the factors
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

    def rotary_table(self, layer: int) -> Tensor:
        return self.window_rope if layer in self.plan.spec.windowed else self.rope

    @property
    def nbytes(self) -> int:
        tensors = [self.layers, self.head, self.embedding, self.norms, self.qk_norms, self.rope, self.routers]
        tensors += [self.early.before, self.early.behind]
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
            experts=spec.experts.count if spec.experts is not None else 0,
            active_experts=spec.experts.top if spec.experts is not None else 0,
        )


def plan_of(
    checkpoint: Checkpoint,
    precision: RequestedPrecision,
    blocks: int,
    kv_precision: KvPrecision = "bf16",
    target: Target = HOPPER,
) -> Plan:
    """The plan of a model on so many multiprocessors. Raises UnsupportedModel if the kernel cannot run it, or
    cannot keep its weights as stored."""
    meant, stored = choose_precision(checkpoint, precision)
    return Plan(checkpoint.spec, meant, blocks, kv_precision, stored, target)


def from_bytes(rows: Tensor, kind: str) -> Tensor | Codes:
    """What rows of bytes of this type mean: codes of block types, else numbers."""
    if kind in STORED_TYPES:
        return read_codes(rows, kind)
    return rows.view({"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[kind])


def load_weights(
    checkpoint: Checkpoint, plan: Plan, device: torch.device, host: HostExperts | None = None
) -> Weights:
    """Pack every tensor of `checkpoint`, one at a time, converting them on the device. With `host` the GPU
    gets the experts that it lists as resident."""

    def source(name: str, shape: tuple[int, ...]) -> Tensor | Codes:
        array, kind = checkpoint.raw(name)
        if kind in STORED_TYPES:
            codes = read_codes(torch.from_numpy(np.array(array)).to(device), kind)
            return codes if plan.stored is not None else codes.weights()
        if kind == "BF16":
            halves = torch.from_numpy(np.array(array).view(np.int16))
            return halves.view(torch.bfloat16).to(device).view(shape)
        wide = array if array.dtype == np.float32 else checkpoint.tensor(name)
        return torch.from_numpy(np.array(wide)).to(device).view(shape)

    return build_weights(plan, source, device, host)


def random_plan(
    spec: ModelSpec,
    precision: Precision,
    blocks: int,
    kv_precision: KvPrecision = "bf16",
    target: Target = HOPPER,
    stored: Formats | None = None,
) -> Plan:
    """The plan of a model of this shape; stored weights have the typical formats by default."""
    if precision == "stored":
        stored = stored or typical_formats(spec)
    return Plan(spec, precision, blocks, kv_precision, stored, target)


def random_weights(
    spec: ModelSpec,
    precision: Precision,
    device: torch.device,
    blocks: int,
    seed: int = 0,
    kv_precision: KvPrecision = "bf16",
    target: Target = HOPPER,
    stored: Formats | None = None,
) -> Weights:
    """A model of this shape with random weights, for benchmarks."""
    generator = torch.Generator(device=device).manual_seed(seed)
    floats = spec.architecture == "gpt_oss"
    plan = random_plan(spec, precision, blocks, kv_precision, target, stored)

    def source(name: str, shape: tuple[int, ...]) -> Tensor | Codes:
        if precision == "stored" and len(shape) == 2 and shape[1] % (2 * GROUP) == 0:
            return random_codes(shape, generator, floats=floats and ".experts." in name)
        return random_tensor(name, shape, generator)

    return build_weights(plan, source, device)


def random_codes(shape: tuple[int, int], generator: torch.Generator, *, floats: bool = False) -> Codes:
    """A random matrix of 4-bit codes (`floats`: of MXFP4; with rows of whole blocks as Q4_K has them), scaled
    like trained weights."""
    device = generator.device
    codes = torch.randint(0, 16, shape, generator=generator, device=device, dtype=torch.uint8)
    scales = torch.rand(shape[0], shape[1] // GROUP // 2, generator=generator, device=device)
    if floats:
        scales = torch.exp2((torch.log2(scales + 0.5) + math.log2(shape[1] ** -0.5 / 3)).round())
        scales = scales.repeat_interleave(2, 1)
        return Codes(codes, scales, torch.zeros_like(scales), None, floats=True)
    scales, steps, usual = scales + 0.5, None, shape[1] ** -0.5 / 4.6
    if shape[1] % STEP_K:
        scales = scales * usual
    else:  # 21 to 63 times one number
        step = torch.tensor(usual / 42, device=device).half().float()
        scales = (scales * 42).round() * step
        steps = torch.stack((step, 8 * step)).repeat(shape[0], shape[1] // STEP_K)
    scales = scales.repeat_interleave(2, 1)
    return Codes(codes, scales, -8 * scales, 8, steps=steps)


def random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A random tensor, scaled like trained weights."""
    noise = torch.randn(shape, generator=generator, device=generator.device)
    if name.endswith("norm.weight"):
        return noise * 0.1 + 1
    if name.endswith(".decay"):
        return -(noise * 0.5).exp()
    return (noise * (shape[-1] ** -0.5 if len(shape) == 2 else 0.1)).to(torch.bfloat16)


def build_weights(
    plan: Plan, source: Source, device: torch.device, host: HostExperts | None = None
) -> Weights:
    try:
        weights = _build(plan, source, device, host)
        if device.type == "cuda" and host is None:
            weights.keep_dense(torch.cuda.mem_get_info(device)[0] // _DENSE_SHARE)
        return weights
    except torch.cuda.OutOfMemoryError as error:
        raise NotEnoughMemory(
            f"{plan.spec.name} needs {plan.packed_bytes / 1e9:.1f} GB of GPU memory for its weights in "
            f"{plan.precision}; choose 8 or 4 bits, or a smaller model"
        ) from error


def _build(plan: Plan, source: Source, device: torch.device, host: HostExperts | None) -> Weights:
    spec = plan.spec
    table = source(EMBEDDING, (spec.vocab_size, spec.hidden))
    embedding = _as_tensor(table).to(torch.bfloat16)
    layers = torch.empty(plan.layer_offsets[-1], dtype=torch.uint8, device=device)
    norms = torch.empty(2 * spec.layers + 1, spec.hidden, device=device)
    qk_norms = torch.ones(plan.attention_layers, 2, spec.head_dim, device=device)
    orders, dimensions = _orders(plan), rotary_first(spec.head_dim, spec.rotated)
    rearranged = spec.gated_attention or spec.rotated != spec.head_dim
    delta = None if spec.delta is None else _delta_weights(spec, spec.delta, source)
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    all_biases = []
    experts = spec.experts
    routers = torch.zeros(spec.layers, all_experts(experts) if experts else 0, spec.hidden, device=device)
    feed_forward = "mlp.experts" if experts else "mlp"
    width, down_rows = spec.intermediate, spec.hidden
    if experts is not None:
        width, down_rows = experts.count * experts.width, experts.count * spec.hidden
    gates = 2 if spec.gated_attention else 1
    router_biases = torch.zeros(routers.shape[:2], device=device)
    sinks = torch.zeros(spec.layers, spec.heads if spec.sinks else 0, device=device)
    early = EarlyRouter.empty(plan, device)
    qkv, mlp = spec.qkv_bias, experts.bias if experts else spec.mlp_bias
    biased = {"query_key": qkv, "value": qkv, "output": spec.o_bias, "gate_up": mlp, "down": mlp}

    def vector(name: str, size: int) -> Tensor:
        return _as_tensor(source(name, (size,))).float()

    for layer in range(spec.layers):
        at = f"model.layers.{layer}"
        parts: dict[str, tuple[tuple[str, int, int], ...]] = {
            "query_key": (
                (f"{at}.self_attn.q_proj", gates * queries, spec.hidden),
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
        if spec.delta is not None:
            net = f"{at}.linear_attn"
            parts["delta_in"] = (
                (f"{net}.in_proj_qkv", spec.delta.channels, spec.hidden),
                (f"{net}.in_proj_z", spec.delta.values, spec.hidden),
            )
            parts["delta_out"] = ((f"{net}.out_proj", spec.hidden, spec.delta.values),)
        if experts is not None and experts.shared:
            alone = f"{at}.mlp.shared_expert"
            gate, up = ((f"{alone}.{each}_proj", experts.shared, spec.hidden) for each in ("gate", "up"))
            shared_down = (f"{alone}.down_proj", spec.hidden, experts.shared)
            if plan.shared_apart:
                parts |= {"shared_gate_up": (gate, up), "shared_down": (shared_down,)}
            else:
                parts["gate_up"] = (parts["gate_up"][0], gate, parts["gate_up"][1], up)
                parts["down"] += (shared_down,)
        biases: dict[str, Tensor] = {}
        offset = plan.layer_offsets[layer]
        for name, matrix in plan.layer(layer).items():
            members = parts[name]
            if not matrix.units:  # the host has all experts
                if biased.get(name):
                    biases[name] = torch.cat([vector(f"{m}.bias", rows) for m, rows, _ in members])
                continue
            weight = _stack([source(f"{m}.weight", (rows, columns)) for m, rows, columns in members], matrix)
            if name == "query_key" and rearranged:
                weight = _take_rows(weight, attention_rows(spec))
            bias = None
            if biased.get(name):
                bias = biases[name] = torch.cat([vector(f"{m}.bias", rows) for m, rows, _ in members])
            if host is not None and name in ("gate_up", "down"):
                taken = _expert_rows(plan, name, host.resident[layer]).to(device)
                weight, bias = _take_rows(weight, taken), None if bias is None else bias[taken]
            packed = layers[offset : offset + matrix.bytes]
            _pack_into(packed, weight, bias, orders[name], matrix)
            if name in ("output", "delta_out") and plan.early_scores is not None:
                # As the kernel multiplies with it.
                output = unpack(packed, None, matrix, spec.hidden, dtype=torch.float32)
            offset += matrix.bytes
        if experts is not None:
            router = source(f"{at}.mlp.gate.weight", (experts.count, spec.hidden))
            routers[layer, : experts.count] = _as_tensor(router).float()
            if experts.shared:
                gate_row = source(f"{at}.mlp.shared_expert_gate.weight", (1, spec.hidden))
                routers[layer, -1] = _as_tensor(gate_row).float()
            if experts.router_bias:
                router_biases[layer, : experts.count] = vector(f"{at}.mlp.gate.bias", experts.count)
        if spec.sinks:
            sinks[layer] = vector(f"{at}.self_attn.sinks", spec.heads) * math.log2(math.e)
        if spec.qkv_bias and not plan.is_delta(layer):
            biases["qkv"] = torch.cat((biases.pop("query_key"), biases.pop("value")))
        all_biases.append(biases)
        norms[2 * layer] = vector(f"{at}.input_layernorm.weight", spec.hidden)
        norms[2 * layer + 1] = vector(f"{at}.post_attention_layernorm.weight", spec.hidden)
        if plan.early_scores is not None:
            early.put(layer, routers[layer], norms[2 * layer + 1], output)
        if spec.qk_norm and not plan.is_delta(layer):
            for i, each in enumerate("qk"):
                norm = vector(f"{at}.self_attn.{each}_norm.weight", spec.head_dim)
                qk_norms[spec.attention_layers.index(layer), i] = norm[dimensions.to(device)]
    norms[-1] = vector(FINAL_NORM, spec.hidden)
    tied = table if plan.stored is not None else embedding
    head = _stack([tied if spec.tied else source(HEAD, (spec.vocab_size, spec.hidden))], plan.head)
    rope = window_rope = _rotary_table(spec, device)
    if spec.window_rope is not None:
        window_rope = _rotary_table(replace(spec, rope=spec.window_rope), device)
    return Weights(
        plan,
        layers,
        pack(head, None, plain_order(spec.vocab_size), plan.head),
        embedding,
        norms,
        qk_norms,
        all_biases,
        rope,
        window_rope,
        routers,
        router_biases,
        sinks,
        early,
        delta,
        host,
    )


def _expert_rows(plan: Plan, name: str, resident: Sequence[int]) -> Tensor:
    """The rows of these experts, and of a shared one among them, in the matrices of all."""
    spec = plan.spec
    assert spec.experts is not None
    count = spec.experts.count if plan.shared_apart else all_experts(spec.experts)
    held = torch.tensor([*resident, *range(spec.experts.count, count)], dtype=torch.int64)[:, None]
    height = spec.hidden if name == "down" else spec.experts.width
    rows = (held * height + torch.arange(height)).reshape(-1)
    return rows if name == "down" else torch.cat((rows, rows + count * height))


def _rotary_table(spec: ModelSpec, device: torch.device) -> Tensor:
    still = ((0, 0), (0, (spec.head_dim - spec.rotated) // 2))  # dimensions that are not rotated
    cosines, sines = rope_tables(spec, spec.context_length)
    cosines, sines = np.pad(cosines, still, constant_values=1.0), np.pad(sines, still)
    return torch.from_numpy(np.stack((cosines, sines), 2)).contiguous().to(device)


def _pack_into(
    to: Tensor, weight: Tensor | Codes, bias: Tensor | None, order: Tensor, matrix: Matrix
) -> None:
    """Pack a matrix, in portions if it is large: packing needs several times its memory."""
    if matrix.split > 1 or matrix.tiles <= _TILES_AT_ONCE:
        to[:] = pack(weight, bias, order, matrix)
        return
    for first in range(0, matrix.tiles, _TILES_AT_ONCE):
        part = replace(matrix, tiles=min(_TILES_AT_ONCE, matrix.tiles - first))
        begin = first * matrix.unit_bytes
        rows = order[first * 16 : (first + part.tiles) * 16]
        to[begin : begin + part.bytes] = pack(weight, bias, rows, part)


def _orders(plan: Plan) -> dict[str, Tensor]:
    """The model's row at each position of a packed matrix."""
    spec = plan.spec
    rotated = (spec.heads + spec.kv_heads) * spec.head_dim
    gates = spec.heads * spec.head_dim if spec.gated_attention else 0
    experts = spec.experts
    inner = plan.expert_slots * experts.width if experts else spec.intermediate
    orders = {
        "query_key": torch.cat(
            (
                qkv_order(spec.heads, spec.kv_heads, spec.head_dim)[:rotated],
                torch.arange(rotated, rotated + gates),
            )
        ),
        "value": plain_order(spec.kv_heads * spec.head_dim),
        "output": plain_order(spec.hidden),
        "gate_up": gate_up_order(inner),
        "down": plain_order(spec.hidden * (plan.expert_slots if experts else 1)),
    }
    if experts is not None and plan.shared_apart:
        orders |= {"shared_gate_up": gate_up_order(experts.shared), "shared_down": orders["output"]}
    if spec.delta is not None:
        orders["delta_in"] = plain_order(spec.delta.channels + spec.delta.values)
        orders["delta_out"] = orders["output"]
    return orders


def attention_rows(spec: ModelSpec) -> Tensor:
    """Where the rows of queries, keys and gates, as the kernel has them, lie in q_proj above k_proj. A head
    of a gated q_proj holds its query, then its gate; `rotary_first` says in which order dimensions are."""
    size, dimensions = spec.head_dim, rotary_first(spec.head_dim, spec.rotated)
    each = (2 if spec.gated_attention else 1) * size
    queries = torch.arange(spec.heads)[:, None] * each
    keys = spec.heads * each + torch.arange(spec.kv_heads)[:, None] * size
    gates = queries + size + torch.arange(size) if spec.gated_attention else torch.empty(0, dtype=torch.int64)
    return torch.cat([rows.reshape(-1) for rows in (queries + dimensions, keys + dimensions, gates)])


def _delta_weights(spec: ModelSpec, delta: DeltaSpec, source: Source) -> DeltaWeights:
    at = [f"model.layers.{layer}.linear_attn" for layer in sorted(delta.layers)]
    heads = delta.value_heads

    def stacked(name: str, *shape: int) -> Tensor:
        return torch.stack([_as_tensor(source(f"{each}.{name}", shape)).float() for each in at])

    return DeltaWeights(
        torch.cat([stacked(f"in_proj_{each}.weight", heads, spec.hidden) for each in "ba"], 1),
        stacked("conv1d.weight", delta.channels, delta.kernel).contiguous(),
        stacked("decay", heads),
        stacked("dt_bias", heads),
        stacked("norm.weight", delta.value_size),
    )


def _take_rows(weight: Tensor | Codes, rows: Tensor) -> Tensor | Codes:
    if isinstance(weight, Codes):
        at = rows.to(weight.codes.device)
        return weight.map_rows(lambda part: part[at])
    return weight[rows.to(weight.device)]


def _stack(parts: Sequence[Tensor | Codes], matrix: Matrix) -> Tensor | Codes:
    codes = [shift_zero(part, matrix.format) for part in parts if isinstance(part, Codes)]
    plain = [part for part in parts if not isinstance(part, Codes)]
    assert not (codes and plain), "a matrix is stored whole or not at all"
    return concatenate(codes) if codes else torch.cat(plain)


def _as_tensor(tensor: Tensor | Codes) -> Tensor:
    return tensor.weights() if isinstance(tensor, Codes) else tensor

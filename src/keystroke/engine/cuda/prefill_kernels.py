"""Prefill between matrix products: norms, rotary embedding, activations, writing and gathering KV.

`TorchOps` is the reference in plain torch and runs anywhere; `KernelOps` gives the same numbers with one
launch per operation.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from keystroke.engine.cuda.driver import UNPACK_PARTS, KernelModule
from keystroke.engine.cuda.plan import PAGE, Matrix, Plan
from keystroke.engine.cuda.quantisation import from_bytes, to_bytes
from keystroke.engine.cuda.reference import rotate
from keystroke.engine.cuda.weights import Weights

_THREADS = 256


@dataclass(frozen=True)
class Portion:
    """Consecutive tokens of one sequence, and its page table."""

    start: int
    count: int
    table: Tensor  # int64

    @property
    def end(self) -> int:
        return self.start + self.count


class PrefillOps(Protocol):
    def begin(self, portion: Portion) -> None: ...

    def normalise(self, x: Tensor, product: Tensor | None, bias: Tensor | None, weight: Tensor) -> Tensor:
        """Add the last product to `x` in place, then return its bf16 norm for the next product."""

    def heads(self, qkv: Tensor, bias: Tensor | None, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [heads, rows, head_dim] for attention; also writes keys and values to
        their pages."""

    def context(self, layer: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values [kv_heads, end - first, head_dim] gathered from pages; `first` begins a page."""

    def activate(self, product: Tensor, bias: Tensor | None) -> Tensor:
        """bf16 silu(gate) * up of rows that hold the gates, then the ups."""


class TorchOps:
    def __init__(self, weights: Weights, keys: Tensor, values: Tensor) -> None:
        self._weights = weights
        self._keys = keys  # [layers, pages, kv_heads, PAGE, head_dim], bf16 or bytes (scales.py)
        self._values = values  # [layers, pages, kv_heads, head_dim, PAGE]
        self._steps = weights.kv_steps if keys.dtype == torch.uint8 else None

    def begin(self, portion: Portion) -> None:
        positions = torch.arange(portion.start, portion.end, device=portion.table.device)
        self._portion = portion
        self._page, self._slot = portion.table[positions // PAGE], positions % PAGE

    def normalise(self, x: Tensor, product: Tensor | None, bias: Tensor | None, weight: Tensor) -> Tensor:
        if product is not None:
            x += _add_bias(product, bias)
        return F.rms_norm(x, x.shape[-1:], weight, self._weights.plan.spec.norm_eps).to(torch.bfloat16)

    def heads(self, qkv: Tensor, bias: Tensor | None, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        spec = self._weights.plan.spec
        qkv = _add_bias(qkv, bias).view(len(qkv), -1, spec.head_dim)
        both, v = torch.split(qkv, [spec.heads + spec.kv_heads, spec.kv_heads], 1)
        if spec.qk_norm:
            of_queries, of_keys = self._weights.qk_norms[layer]
            each = torch.cat((of_queries.expand(spec.heads, -1), of_keys.expand(spec.kv_heads, -1)))
            both = F.rms_norm(both, both.shape[-1:], None, spec.norm_eps) * each
        angles = self._weights.rotary_table(layer)[self._portion.start : self._portion.end]
        q, k = torch.split(rotate(both, angles[..., 0], angles[..., 1]), [spec.heads, spec.kv_heads], 1)
        if self._steps is None:
            k, v = k.to(torch.bfloat16), v.to(torch.bfloat16)
        else:
            keys, values = self._steps.keys[layer], self._steps.values[layer]
            q = q * keys.repeat_interleave(spec.heads // spec.kv_heads, 0)
            k, v = to_bytes(k, keys), to_bytes(v, values)
        self._keys[layer, self._page, :, self._slot] = k
        self._values[layer, self._page, :, :, self._slot] = v
        q, k, v = (t.transpose(0, 1) for t in (q.to(torch.bfloat16), from_bytes(k), from_bytes(v)))
        return q, k, v

    def context(self, layer: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        table = self._portion.table[first // PAGE : -(-end // PAGE)]
        keys, values = self._keys[layer], self._values[layer].transpose(-1, -2)
        return self._flat(keys[table], end - first), self._flat(values[table], end - first)

    @staticmethod
    def _flat(pages: Tensor, count: int) -> Tensor:
        """[heads, count, head_dim], contiguous in each key."""
        gathered = from_bytes(pages).transpose(0, 1).contiguous()
        return gathered.reshape(gathered.shape[0], -1, gathered.shape[-1])[:, :count]

    def activate(self, product: Tensor, bias: Tensor | None) -> Tensor:
        gate, up = _add_bias(product, bias).chunk(2, -1)
        return (F.silu(gate) * up).to(torch.bfloat16)


class _PrefillParameters(ctypes.Structure):
    """As in kernels/prefill.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "product", "bias", "weight", "out")),
        *(
            (name, ctypes.c_void_p)
            for name in ("flat_keys", "flat_values", "keys", "values", "rope", "table")
        ),
        *((name, ctypes.c_void_p) for name in ("key_steps", "value_steps")),
        ("start", ctypes.c_int64),
    ]


class KernelOps:
    def __init__(self, weights: Weights, keys: Tensor, values: Tensor) -> None:
        self._weights = weights
        self._keys = keys
        self._values = values
        self._steps = weights.kv_steps if keys.dtype == torch.uint8 else None
        macros = weights.plan.prefill_macros(keys.element_size())
        self._kernels = KernelModule(keys.device, macros, weights.plan.target)
        self._parameters = _PrefillParameters()
        if weights.plan.stored is not None:
            weights.unpacker = Unpacker(weights.plan, keys.device)

    def begin(self, portion: Portion) -> None:
        self._kernels.begin()
        self._portion = portion
        self._parameters.table, self._parameters.start = portion.table.data_ptr(), portion.start

    def normalise(self, x: Tensor, product: Tensor | None, bias: Tensor | None, weight: Tensor) -> Tensor:
        s, out = self._parameters, torch.empty_like(x, dtype=torch.bfloat16)
        s.x, s.weight, s.out = x.data_ptr(), weight.data_ptr(), out.data_ptr()
        s.product, s.bias = _pointer(product), _pointer(bias)
        self._launch("add_and_normalise", len(x))
        return out

    def heads(self, qkv: Tensor, bias: Tensor | None, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        spec, s, rows = self._weights.plan.spec, self._parameters, len(qkv)
        q, k, v = (
            torch.empty(rows, n, spec.head_dim, dtype=torch.bfloat16, device=qkv.device)
            for n in (spec.heads, spec.kv_heads, spec.kv_heads)
        )
        s.product, s.bias, s.out = qkv.data_ptr(), _pointer(bias), q.data_ptr()
        s.weight = self._weights.qk_norms[layer].data_ptr()
        s.rope = self._weights.rotary_table(layer).data_ptr()
        s.flat_keys, s.flat_values = k.data_ptr(), v.data_ptr()
        self._point_at(layer)
        self._launch("place_heads", rows)
        return q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)

    def context(self, layer: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        spec, s, pages = self._weights.plan.spec, self._parameters, -(-end // PAGE) - first // PAGE
        shape = (spec.kv_heads, pages * PAGE, spec.head_dim)
        k, v = (torch.empty(shape, dtype=torch.bfloat16, device=self._keys.device) for _ in range(2))
        s.flat_keys, s.flat_values = k.data_ptr(), v.data_ptr()
        s.table = self._portion.table[first // PAGE :].data_ptr()
        self._point_at(layer)
        self._launch("collect_pages", pages, spec.kv_heads)
        s.table = self._portion.table.data_ptr()
        return k[:, : end - first], v[:, : end - first]

    def activate(self, product: Tensor, bias: Tensor | None) -> Tensor:
        s, width = self._parameters, product.shape[-1] // 2
        out = torch.empty(len(product), width, dtype=torch.bfloat16, device=product.device)
        s.product, s.bias, s.out = product.data_ptr(), _pointer(bias), out.data_ptr()
        self._launch("activate", len(product), -(-width // (2 * _THREADS)))
        return out

    def _point_at(self, layer: int) -> None:
        s = self._parameters
        s.keys, s.values = self._keys[layer].data_ptr(), self._values[layer].data_ptr()
        if self._steps is not None:
            s.key_steps = self._steps.keys[layer].data_ptr()
            s.value_steps = self._steps.values[layer].data_ptr()

    def _launch(self, name: str, rows: int, columns: int = 1) -> None:
        self._kernels.launch(name, (rows, columns), _THREADS, self._parameters)


class _UnpackParameters(ctypes.Structure):
    """As in kernels/unpack.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("packed", "folded", "out")),
        *((name, ctypes.c_int) for name in ("tiles", "splits", "columns", "order", "rows")),
    ]


class Unpacker:
    """Dequantises stored matrices in one pass over their bytes. Those of the feed-forward part, which are
    large, share memory that is kept: given back, it could be split and not be found again in one piece."""

    _ORDERS: ClassVar = {"gate_up": 1, "shared_gate_up": 1, "query_key": 2}
    _LARGE: ClassVar = {"gate_up", "down"}

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._kernels = KernelModule(device, plan.macros(1), plan.target, UNPACK_PARTS)
        self._blocks = 8 * plan.blocks
        self._space = torch.empty(0, dtype=torch.bfloat16, device=device)

    def unpack(self, name: str, packed: Tensor, matrix: Matrix, rows: int, folded: Tensor | None) -> Tensor:
        columns = matrix.split * matrix.inner
        if name in self._LARGE:
            if self._space.numel() < rows * columns:
                self._space = self._space.new_empty(rows * columns)
            out = self._space[: rows * columns].view(rows, columns)
        else:
            out = torch.empty(rows, columns, dtype=torch.bfloat16, device=packed.device)
        parameters = _UnpackParameters(
            packed=packed.data_ptr(),
            folded=_pointer(folded),
            out=out.data_ptr(),
            tiles=matrix.tiles,
            splits=matrix.split,
            columns=columns,
            order=self._ORDERS.get(name, 0),
            rows=rows,
        )
        self._kernels.begin()
        self._kernels.launch(f"unpack_{matrix.format}", (self._blocks, 1), _THREADS, parameters)
        return out


def _add_bias(product: Tensor, bias: Tensor | None) -> Tensor:
    return product.float() if bias is None else product.float() + bias


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()

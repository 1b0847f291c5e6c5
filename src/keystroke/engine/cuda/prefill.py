"""Prefill: KV for many tokens at once, with the libraries' own matrix products and flash attention.

Law: reads the packed weights through `Weights.dense`, so it computes with the decode kernel's very numbers,
and writes the same pages. One call is one chunk: the caller looks at its interrupt in between.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from keystroke.engine.cuda.model import Weights
from keystroke.engine.cuda.plan import PAGE
from keystroke.engine.cuda.quantisation import from_bytes, in_bytes
from keystroke.engine.cuda.reference import rotate


class Prefill:
    def __init__(self, weights: Weights, keys: Tensor, values: Tensor) -> None:
        self._weights = weights
        self._keys = keys  # [layers, pages, kv_heads, PAGE, head_dim], bf16 or bytes (scales.py)
        self._values = values  # [layers, pages, kv_heads, head_dim, PAGE]
        self._steps = weights.kv_steps if keys.dtype == torch.uint8 else None

    @torch.inference_mode()
    def run(self, tokens: Sequence[int], start: int, pages: Sequence[int]) -> None:
        """Compute KV of `tokens` at positions start, start + 1, ... over what `pages` hold before them."""
        weights, spec = self._weights, self._weights.plan.spec
        device = weights.embedding.device
        end = start + len(tokens)
        table = torch.tensor(pages[: -(-end // PAGE)], device=device)
        positions = torch.arange(start, end, device=device)
        page, slot = table[positions // PAGE], positions % PAGE
        angles = weights.rope[start:end]
        x = weights.embedding[torch.tensor(tokens, device=device)].float()
        for layer in range(spec.layers):
            dense, biases = weights.dense(layer), weights.biases[layer]
            h = self._norm(x, weights.norms[2 * layer])
            q, k, v = self._heads(_linear(h, dense.qkv), biases.get("qkv"), layer, angles)
            self._keys[layer, page, :, slot] = k
            self._values[layer, page, :, :, slot] = v
            if layer == spec.layers - 1:
                break  # nothing reads the last layer's output: only its KV is wanted
            if start == 0 and self._steps is None:  # there is nothing before, and nothing was rounded
                k, v = k.transpose(0, 1), v.transpose(0, 1)
            else:
                k = self._context(self._keys[layer], table, end)
                v = self._context(self._values[layer].transpose(-1, -2), table, end)
            mixed = self._attend(q, k, v)
            if self._steps is not None:
                mixed = (mixed * self._for_queries(self._steps.values[layer]).reshape(-1)).to(torch.bfloat16)
            x = x + self._add(_linear(mixed, dense.output), biases.get("output"))
            h = self._norm(x, weights.norms[2 * layer + 1])
            both = self._add(_product(h, dense.gate_up), biases.get("gate_up"))
            x = x + self._add(_linear(_activated(*both.chunk(2, -1)), dense.down), biases.get("down"))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, self._weights.plan.spec.norm_eps).to(torch.bfloat16)

    @staticmethod
    def _add(x: Tensor, bias: Tensor | None) -> Tensor:
        return x if bias is None else x + bias

    def _heads(
        self, qkv: Tensor, bias: Tensor | None, layer: int, angles: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        spec = self._weights.plan.spec
        qkv = (qkv if bias is None else qkv + bias).view(len(qkv), -1, spec.head_dim)
        both, v = torch.split(qkv, [spec.heads + spec.kv_heads, spec.kv_heads], 1)
        if spec.qk_norm:
            of_queries, of_keys = self._weights.qk_norms[layer]
            each = torch.cat((of_queries.expand(spec.heads, -1), of_keys.expand(spec.kv_heads, -1)))
            both = F.rms_norm(both, both.shape[-1:], None, spec.norm_eps) * each
        q, k = torch.split(rotate(both, angles[..., 0], angles[..., 1]), [spec.heads, spec.kv_heads], 1)
        if self._steps is None:
            return q.to(torch.bfloat16), k.to(torch.bfloat16), v.to(torch.bfloat16)
        keys, values = self._steps.keys[layer], self._steps.values[layer]
        return (q * self._for_queries(keys)).to(torch.bfloat16), in_bytes(k, keys), in_bytes(v, values)

    def _for_queries(self, steps: Tensor) -> Tensor:
        """[heads, head_dim] from [kv_heads, head_dim]: query heads share the steps of the keys they meet."""
        spec = self._weights.plan.spec
        return steps.repeat_interleave(spec.heads // spec.kv_heads, 0)

    @staticmethod
    def _context(keys: Tensor, table: Tensor, end: int) -> Tensor:
        """[kv_heads, end, head_dim], gathered from pages, each key's numbers side by side: flash attention
        asks for that, and a single page would otherwise come as a view of transposed values."""
        gathered = from_bytes(keys[table]).transpose(0, 1).contiguous()
        return gathered.reshape(gathered.shape[0], -1, gathered.shape[-1])[:, :end]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of the last rows of a context over all of it; row i of n misses the last n - 1 - i."""
        q = q.transpose(0, 1)[None]
        k, v = k[None], v[None]
        scale = q.shape[-1] ** -0.5
        if q.is_cuda:
            # The library's flash attention aligns the causal edge with the end of the keys, as needed here.
            out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
                q, k, v, 0.0, True, False, scale=scale
            )[0]
        else:
            rows, columns = q.shape[2], k.shape[2]
            seen = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
            out = F.scaled_dot_product_attention(
                q.float(), k.float(), v.float(), seen, scale=scale, enable_gqa=True
            )
        return out[0].transpose(0, 1).reshape(q.shape[2], -1).to(torch.bfloat16)


def _activated(gate: Tensor, up: Tensor) -> Tensor:
    """Rounded once, and no more of it in float32 than must be: these are the widest rows of a layer."""
    out = torch.empty(up.shape, dtype=torch.bfloat16, device=up.device)
    return torch.mul(F.silu(gate.float()), up, out=out)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return _product(x, weight).float()


def _product(x: Tensor, weight: Tensor) -> Tensor:
    if x.is_cuda:
        return F.linear(x, weight)
    return F.linear(x.float(), weight.float())  # CPUs without bf16 arithmetic: the same numbers, float32 sums

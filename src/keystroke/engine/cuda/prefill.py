"""Prefill: KV for many tokens at once, with the libraries' own matrix products and flash attention.

Law: reads the packed weights through `Weights.dense`, so it computes with the decode kernel's very numbers,
and writes the same pages. One call is one chunk: the caller looks at its interrupt in between.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from keystroke.engine.cuda.between import Between, Kernels, Library, Portion
from keystroke.engine.cuda.model import Weights
from keystroke.engine.cuda.plan import PAGE


class Prefill:
    def __init__(self, weights: Weights, keys: Tensor, values: Tensor) -> None:
        self._weights = weights
        self._steps = weights.kv_steps if keys.dtype == torch.uint8 else None
        self._between: Between = (Kernels if keys.is_cuda else Library)(weights, keys, values)

    @torch.inference_mode()
    def run(self, tokens: Sequence[int], start: int, pages: Sequence[int]) -> None:
        """Compute KV of `tokens` at positions start, start + 1, ... over what `pages` hold before them."""
        weights, spec, between = self._weights, self._weights.plan.spec, self._between
        device = weights.embedding.device
        table = torch.tensor(pages[: -(-(start + len(tokens)) // PAGE)], device=device)
        between.begin(Portion(start, len(tokens), table))
        x = weights.embedding[torch.tensor(tokens, device=device)].float()
        down, down_bias = None, None
        for layer in range(spec.layers):
            dense, biases = weights.dense(layer), weights.biases[layer]
            h = between.normalise(x, down, down_bias, weights.norms[2 * layer])
            q, k, v = between.heads(_product(h, dense.qkv), biases.get("qkv"), layer)
            if layer == spec.layers - 1:
                break  # nothing reads the last layer's output: only its KV is wanted
            if start:
                k, v = between.context(layer)
            mixed = self._attend(q, k, v)
            if self._steps is not None:  # values came in steps
                each = self._steps.values[layer].repeat_interleave(spec.heads // spec.kv_heads, 0)
                mixed = (mixed * each.reshape(-1)).to(torch.bfloat16)
            output = _product(mixed, dense.output)
            h = between.normalise(x, output, biases.get("output"), weights.norms[2 * layer + 1])
            wide = between.activate(_product(h, dense.gate_up), biases.get("gate_up"))
            down, down_bias = _product(wide, dense.down), biases.get("down")

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of the last rows of a context over all of it; row i of n misses the last n - 1 - i."""
        q, k, v = q[None], k[None], v[None]
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


def _product(x: Tensor, weight: Tensor) -> Tensor:
    if x.is_cuda:
        return F.linear(x, weight)
    return F.linear(x.float(), weight.float())  # CPUs without bf16 arithmetic: the same numbers, float32 sums

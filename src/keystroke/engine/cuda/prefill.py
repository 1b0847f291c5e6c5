"""Prefill: KV for many tokens at once, with the libraries' own matrix products and attention.

Reads the packed weights through `Weights.dense`, so it computes with the decode kernel's very numbers,
and writes the same pages. One call is one portion: the caller looks at its interrupt in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from keystroke.engine.checkpoint.spec import ModelSpec
from keystroke.engine.cuda.plan import PAGE, Plan
from keystroke.engine.cuda.prefill_attention import PIECE, attend, pieces
from keystroke.engine.cuda.prefill_experts import feed_forward
from keystroke.engine.cuda.prefill_kernels import Between, Kernels, Library, Portion
from keystroke.engine.cuda.weights import Weights

WORK = 110e12  # operations of one portion: 0.2 s on an H200, which is what an interrupt may have to wait
_FEWEST = 2048  # tokens that still keep such a GPU busy
_FEWEST_SMALL = 512  # and one of a quarter of its arithmetic
_H200 = 132  # multiprocessors


def work_of(plan: Plan) -> float:
    """Operations that a GPU of so many multiprocessors of this kind does in that time, or somewhat more."""
    rate = plan.target.matrix_rate
    return WORK if rate >= 1 else WORK * rate * plan.blocks / _H200


def portion(spec: ModelSpec, start: int, most: int, work: float = WORK) -> int:
    """How many tokens to read at once from `start` on. More are faster, a portion must end soon all the same:
    `most` where the context is short, half as many again and again where attention over it grows."""
    heads = spec.heads + spec.kv_heads
    width = spec.experts.top * spec.experts.width if spec.experts else spec.intermediate
    products = 2 * spec.layers * spec.hidden * (2 * heads * spec.head_dim + 3 * width)
    attention = 4 * spec.layers * spec.heads * spec.head_dim  # for each key
    count, fewest = most, _FEWEST if work > WORK / 4 else _FEWEST_SMALL
    while count > fewest and count * (products + attention * (start + count)) > work:
        count //= 2
    return count


class Prefill:
    def __init__(self, weights: Weights, keys: Tensor, values: Tensor) -> None:
        self._weights = weights
        self._steps = weights.kv_steps if keys.dtype == torch.uint8 else None
        self._between: Between = (Kernels if keys.is_cuda else Library)(weights, keys, values)

    @torch.inference_mode()
    def run(
        self, tokens: Sequence[int], start: int, pages: Sequence[int], kept: Mapping[int, int] | None = None
    ) -> list[Tensor]:
        """Compute KV of `tokens` at positions start, start + 1, ... over what `pages` hold before them.
        Returns the residual stream behind as many layers as each key of `kept` says, of so many tokens."""
        found: list[Tensor] = []
        weights, spec, between = self._weights, self._weights.plan.spec, self._between
        device = weights.embedding.device
        end, behind = start + len(tokens), pieces(start, len(tokens))
        near = PIECE * len(behind)
        table = torch.tensor(pages[: -(-end // PAGE)], device=device)
        between.begin(Portion(start, len(tokens), table))
        x = weights.embedding[torch.tensor(tokens, device=device)].float()
        down, down_bias = None, None
        for layer in range(spec.layers):
            dense, biases = weights.dense(layer), weights.biases[layer]
            h = between.normalise(x, down, down_bias, weights.norms[2 * layer])
            if kept is not None and layer in kept:
                found.append(x[-kept[layer] :].clone())
            q, k, v = between.heads(_product(h, dense.qkv), biases.get("qkv"), layer)
            if layer == spec.layers - 1:
                break  # nothing reads the last layer's output: only its KV is wanted
            if start > near:
                k, v = between.context(layer, near, end)
            mixed = attend(q, k, v, (between.context(layer, first, first + PIECE) for first in behind))
            if self._steps is not None:  # values came in steps
                each = self._steps.values[layer].repeat_interleave(spec.heads // spec.kv_heads, 0)
                mixed = (mixed * each.reshape(-1)).to(torch.bfloat16)
            output = _product(mixed, dense.output)
            h = between.normalise(x, output, biases.get("output"), weights.norms[2 * layer + 1])
            if spec.experts is not None:
                router = weights.routers[layer]
                down = feed_forward(spec.experts, h, router, dense.gate_up, dense.down).to(h.dtype)
                continue
            wide = between.activate(_product(h, dense.gate_up), biases.get("gate_up"))
            down, down_bias = _product(wide, dense.down), biases.get("down")
        return found


def _product(x: Tensor, weight: Tensor) -> Tensor:
    if x.is_cuda:
        return F.linear(x, weight)
    return F.linear(x.float(), weight.float())  # CPUs without bf16 arithmetic: the same numbers, float32 sums

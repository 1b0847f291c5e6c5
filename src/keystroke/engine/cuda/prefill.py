"""Prefill: computes KV of many tokens at once with torch's matrix products and attention.

Uses the decode kernel's weights, unpacked by `Weights.dense`, and writes the same pages. One call is one
portion; the caller checks its interrupt between portions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from keystroke.engine.checkpoint.spec import ModelSpec
from keystroke.engine.cuda.plan import PAGE, Plan, used_experts
from keystroke.engine.cuda.prefill_attention import PIECE, attend, piece_starts
from keystroke.engine.cuda.prefill_delta import DeltaRows, RecurrentSlot, read_rows
from keystroke.engine.cuda.prefill_experts import feed_forward
from keystroke.engine.cuda.prefill_kernels import KernelOps, Portion, PrefillOps, TorchOps
from keystroke.engine.cuda.weights import DenseMixer, Weights

PORTION = 8192  # tokens at most
WORK = 110e12  # operations of one portion: 0.2 s on an H200, the longest delay of an interrupt
_FEWEST = 2048  # tokens of a portion: fewer do not use an H200 fully
_FEWEST_SMALL = 512  # the same for a GPU with a quarter of its speed
_H200 = 132  # multiprocessors


def operations_per_portion(plan: Plan) -> float:
    """The operations of one portion on this plan's GPU."""
    rate = plan.target.matrix_rate
    return WORK if rate >= 1 else WORK * rate * plan.blocks / _H200


def portion_size(spec: ModelSpec, start: int, most: int, work: float = WORK) -> int:
    """How many tokens one portion has from `start` on: `most`, halved until the portion needs at most `work`
    operations."""
    heads = spec.heads + spec.kv_heads
    width = spec.experts.top * spec.experts.width if spec.experts else spec.intermediate
    products = 2 * spec.layers * spec.hidden * (2 * heads * spec.head_dim + 3 * width)
    attention = 4 * spec.layers * spec.heads * spec.head_dim  # for each key
    count, fewest = most, _FEWEST if work > WORK / 4 else _FEWEST_SMALL
    while count > fewest and count * (products + attention * (start + count)) > work:
        count //= 2
    return count


def portion_bytes(plan: Plan) -> int:
    """Memory that reading a portion takes at most, beside weights and KV: the matrices of a layer in 16 bits,
    gate and up sharing theirs with the down projection; what rows hold; a piece of the context. Counted for
    mixtures without biases whose matrices are all stored and on the GPU."""
    spec, experts = plan.spec, plan.spec.experts
    assert experts is not None
    rows = portion_size(spec, 0, PORTION, operations_per_portion(plan))
    heads, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    mixer = 2 * 3 * spec.hidden * (2 * heads + 2 * keys)  # joined queries, keys and values; the last layer's
    large = 2 * max(plan.gate_up.tiles * 16 * plan.gate_up.inner, plan.down.tiles * 16 * plan.down.inner)
    # Of every expert that a row uses: its input, gate and up and two products of them in 32 bits; or
    # activations, weighted ones, and results before and after they are sorted.
    hidden, width = spec.hidden, experts.width
    each = used_experts(experts) * max(2 * hidden + 16 * width, 6 * hidden + 10 * width)
    each += 10 * hidden + 4 * (heads + keys) + max(12 * heads - each, 0)  # what attention leaves, or holds
    context = 4 * keys * min(spec.context_length, 2 * PIECE)
    return mixer + large + rows * each + context


class Prefill:
    def __init__(self, weights: Weights, keys: Tensor, values: Tensor) -> None:
        self._weights = weights
        self._steps = weights.kv_steps if keys.dtype == torch.uint8 else None
        self._ops: PrefillOps = (KernelOps if keys.is_cuda else TorchOps)(weights, keys, values)

    @torch.inference_mode()
    def run(
        self,
        tokens: Sequence[int],
        start: int,
        pages: Sequence[int],
        feature_windows: Mapping[int, int] | None = None,
        slot: RecurrentSlot | None = None,
    ) -> list[Tensor]:
        """Compute KV of `tokens` at positions start, start + 1, ... over the context in `pages`; of a hybrid
        model also the state behind them, in `slot`. Returns the residual stream before each layer in
        `feature_windows`, of as many last tokens as it says."""
        found: list[Tensor] = []
        weights, spec, ops = self._weights, self._weights.plan.spec, self._ops
        device = weights.embedding.device
        end, behind = start + len(tokens), piece_starts(start, len(tokens))
        near = PIECE * len(behind)
        table = torch.tensor(pages[: -(-end // PAGE)], device=device)
        ops.begin(Portion(start, len(tokens), table))
        x = weights.embedding[torch.tensor(tokens, device=device)].float()
        down, down_bias = None, None
        deltas = 0  # layers so far
        for layer in range(spec.layers):
            mixer, biases = weights.mixer(layer), weights.biases[layer]
            h = ops.normalise(x, down, down_bias, weights.norms[2 * layer])
            if feature_windows is not None and layer in feature_windows:
                found.append(x[-feature_windows[layer] :].clone())
            last = layer == spec.layers - 1  # only its KV or state is needed
            if weights.plan.is_delta(layer):
                output, output_bias = self._read_recurrently(h, mixer, deltas, start, slot), None
                deltas += 1
            else:
                kv = layer - deltas
                q, k, v = ops.heads(_product(h, mixer.qkv), biases.get("qkv"), kv)
                if last:
                    break
                sinks = weights.sinks[layer] if spec.sinks else None
                if layer in spec.windowed:
                    if start:
                        k, v = ops.context(kv, max(start - spec.window, 0) // PAGE * PAGE, end)
                    mixed = attend(q, k, v, sinks=sinks, window=spec.window)
                else:
                    if start > near:
                        k, v = ops.context(kv, near, end)
                    past = (ops.context(kv, first, first + PIECE) for first in behind)
                    mixed = attend(q, k, v, past, sinks=sinks)
                if self._steps is not None:  # values are in quantisation steps
                    each = self._steps.values[kv].repeat_interleave(spec.heads // spec.kv_heads, 0)
                    mixed = (mixed * each.reshape(-1)).to(torch.bfloat16)
                if mixer.gate is not None:
                    mixed = (mixed * _product(h, mixer.gate).float().sigmoid()).to(torch.bfloat16)
                output, output_bias = _product(mixed, mixer.output), biases.get("output")
            if last:
                break
            h = ops.normalise(x, output, output_bias, weights.norms[2 * layer + 1])
            if spec.experts is not None:
                down = feed_forward(
                    spec.experts,
                    h,
                    (weights.routers[layer], weights.router_biases[layer]),
                    (partial(weights.gate_up, layer), biases.get("gate_up")),
                    (partial(weights.down, layer), biases.get("down")),
                ).to(h.dtype)
                continue
            wide = ops.activate(_product(h, weights.gate_up(layer)), biases.get("gate_up"))
            down, down_bias = _product(wide, weights.down(layer)), biases.get("down")
        return found

    def _read_recurrently(
        self, h: Tensor, mixer: DenseMixer, layer: int, start: int, slot: RecurrentSlot | None
    ) -> Tensor:
        weights, spec = self._weights, self._weights.plan.spec
        assert spec.delta is not None
        assert weights.delta is not None
        assert slot is not None
        wide = _product(h, mixer.qkv).float()
        inputs, gates = torch.split(wide, [spec.delta.channels, spec.delta.values], -1)
        heads = F.linear(h.float(), weights.delta.heads[layer])
        rows = DeltaRows(torch.cat((inputs, heads), -1), gates, start)
        mixed = read_rows(spec.delta, weights.delta, layer, rows, slot, spec.norm_eps)
        return _product(mixed.to(torch.bfloat16), mixer.output)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    if x.is_cuda:
        return F.linear(x, weight)
    return F.linear(x.float(), weight.float())  # for CPUs without bf16 arithmetic

"""The feed-forward part of a mixture of experts for many rows, sorted by expert for grouped products.

A row's result is summed over its experts in a fixed order, so it does not depend on the other rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from keystroke.engine.checkpoint.spec import ExpertsSpec
from keystroke.engine.cuda.reference import choose_experts


def feed_forward(experts: ExpertsSpec, x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Float32 output of rows x [rows, hidden] through the experts that `router` [count, hidden] chooses.
    `gate_up` stacks the gates of all experts, then their ups; `down` their down projections."""
    chosen, weights = choose_experts(experts, F.linear(x.float(), router))
    order = chosen.flatten().argsort(stable=True)
    ends = torch.bincount(chosen.flatten(), minlength=experts.count).cumsum(0)
    sorted_rows = x[order // experts.top]
    gates, ups = gate_up.chunk(2)
    gate = _grouped(sorted_rows, gates.view(experts.count, -1, gates.shape[-1]), ends)
    up = _grouped(sorted_rows, ups.view(experts.count, -1, ups.shape[-1]), ends)
    shares = weights.flatten()[order, None]
    inner = (F.silu(gate.float()) * up.float() * shares).to(torch.bfloat16)
    out = _grouped(inner, down.view(experts.count, -1, down.shape[-1]), ends)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=x.device)
    return out[places].view(len(x), experts.top, -1).sum(1, dtype=torch.float32)


def _grouped(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Rows up to ends[0] times the first matrix, those up to ends[1] times the second, and so on."""
    if rows.is_cuda:
        return torch._grouped_mm(rows, matrices.transpose(1, 2), offs=ends.to(torch.int32))
    parts, first = [], 0
    for matrix, end in zip(matrices, ends.tolist(), strict=True):
        parts.append(F.linear(rows[first:end].float(), matrix.float()))
        first = end
    return torch.cat(parts)

"""The feed-forward part of a mixture of experts for many rows, sorted by expert for grouped products.

A row's result is summed over its experts in a fixed order, so it does not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from keystroke.engine.checkpoint.spec import ExpertsSpec
from keystroke.engine.cuda.plan import all_experts
from keystroke.engine.cuda.reference import choose_experts, gate_activation

Biased = tuple[Tensor, Tensor | None]  # a matrix and its bias
Unpacked = tuple[Callable[[], Tensor], Tensor | None]  # what unpacks the matrix when it is needed


def feed_forward(
    experts: ExpertsSpec, x: Tensor, router: Biased, gate_up: Unpacked, down: Unpacked
) -> Tensor:
    """Float32 output of rows x [rows, hidden] through the experts that `router` [experts, hidden] chooses,
    and through a shared one, whose score and matrices are the last.
    `gate_up` stacks the gates of all experts, then their ups; `down` their down projections."""
    chosen, weights = choose_all_experts(experts, F.linear(x.float(), *router))
    count, top = all_experts(experts), chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)
    owners = chosen.flatten()[order]
    ends = torch.bincount(owners, minlength=count).cumsum(0)
    sorted_rows = x[order // top]

    def product(rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        out = _grouped(rows, matrix.view(count, -1, matrix.shape[-1]), ends).float()
        return out if bias is None else out + bias.view(count, -1)[owners]

    gates, ups = gate_up[0]().chunk(2)
    gate_bias, up_bias = (None, None) if gate_up[1] is None else gate_up[1].chunk(2)
    inner = gate_activation(
        experts, product(sorted_rows, gates, gate_bias), product(sorted_rows, ups, up_bias)
    )
    del gates, ups
    shares, downs = weights.flatten()[order, None], down[0]()
    if down[1] is None:
        out = _grouped((inner * shares).to(torch.bfloat16), downs.view(count, -1, downs.shape[-1]), ends)
    else:
        out = product(inner.to(torch.bfloat16), downs, down[1]) * shares
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=x.device)
    return out[places].view(len(x), top, -1).sum(1, dtype=torch.float32)


def choose_all_experts(experts: ExpertsSpec, scores: Tensor) -> tuple[Tensor, Tensor]:
    """As `choose_experts`; a shared expert comes last, weighted by the sigmoid of the last score."""
    chosen, weights = choose_experts(experts, scores[:, : experts.count])
    if not experts.shared:
        return chosen, weights
    last = torch.full_like(chosen[:, :1], experts.count)
    return torch.cat((chosen, last), 1), torch.cat((weights, scores[:, experts.count :].sigmoid()), 1)


def _grouped(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Rows up to ends[0] times the first matrix, those up to ends[1] times the second, and so on."""
    if rows.is_cuda:
        return torch._grouped_mm(rows, matrices.transpose(1, 2), offs=ends.to(torch.int32))
    parts, first = [], 0
    for matrix, end in zip(matrices, ends.tolist(), strict=True):
        parts.append(F.linear(rows[first:end].float(), matrix.float()))
        first = end
    return torch.cat(parts)

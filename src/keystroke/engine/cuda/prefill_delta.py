"""Gated delta nets of a prefill portion: rows are solved together in chunks, in float32.

Starts from a sequence's state and log as the decode kernel leaves them (kernels/delta.cuh): the state lacks
the last `replay` rows before the portion, whose inputs are in the log. Leaves the state behind the last row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from keystroke.engine.checkpoint.spec import DeltaSpec
from keystroke.engine.cuda.reference import unit_heads
from keystroke.engine.cuda.weights import DeltaWeights

CHUNK = 64  # rows that are solved together


@dataclass(frozen=True)
class RecurrentSlot:
    """The recurrent memory of one sequence, which a run changes, and how many rows its states have yet to
    read."""

    states: Tensor  # [layers, value_heads, key_size, value_size]
    logs: Tensor  # [layers, log rows, channels + 2 value_heads]
    replay: int = 0


@dataclass(frozen=True)
class DeltaRows:
    """What a delta net reads of a portion's rows, float32."""

    inputs: Tensor  # [rows, channels + 2 value_heads]: queries, keys, values, b, a
    gates: Tensor  # [rows, values]
    start: int


def read_rows(
    delta: DeltaSpec, weights: DeltaWeights, layer: int, rows: DeltaRows, slot: RecurrentSlot, norm_eps: float
) -> Tensor:
    """Results [rows, values] of the `layer`-th delta net, before its out projection."""
    count, past, log = len(rows.inputs), slot.replay + delta.kernel - 1, slot.logs[layer]
    places = torch.arange(rows.start - past, rows.start, device=log.device)
    before = log[places % len(log)] * (places >= 0)[:, None]
    seen = torch.cat((before, rows.inputs))
    channels, b, a = torch.split(seen, [delta.channels, delta.value_heads, delta.value_heads], -1)
    taps, rows_read = weights.convolutions[layer], slot.replay + count
    mixed = channels[:rows_read] * taps[:, 0]
    for tap in range(1, delta.kernel):
        mixed.addcmul_(channels[tap : tap + rows_read], taps[:, tap])
    mixed = F.silu(mixed)
    b, a = b[delta.kernel - 1 :], a[delta.kernel - 1 :]
    decay = weights.decays[layer] * F.softplus(a + weights.biases[layer])
    q, k, v = torch.split(mixed, [delta.keys, delta.keys, delta.values], -1)
    q, k = (unit_heads(each.reshape(len(each), delta.key_heads, -1)) for each in (q, k))
    ratio = delta.value_heads // delta.key_heads
    q, k = (each.repeat(1, ratio, 1) if delta.tiled else each.repeat_interleave(ratio, 1) for each in (q, k))
    v = v.reshape(len(v), delta.value_heads, -1)
    out, state = _solve(slot.states[layer], (q * delta.key_size**-0.5, k, v), b.sigmoid(), decay)
    slot.states[layer] = state
    newest = torch.arange(
        max(rows.start, rows.start + count - len(log)), rows.start + count, device=log.device
    )
    log[newest % len(log)] = rows.inputs[newest - rows.start]
    out = F.rms_norm(out[-count:], out.shape[-1:], weights.norms[layer], norm_eps)
    return (out * F.silu(rows.gates.view(out.shape))).reshape(count, -1)


def _solve(
    state: Tensor, qkv: tuple[Tensor, Tensor, Tensor], beta: Tensor, decay: Tensor
) -> tuple[Tensor, Tensor]:
    """Results [rows, heads, value] and the state behind them. Within a chunk, the correction of row i is
    u_i = beta_i (v_i - d_i k_i S - sum_j<i d_i/d_j (k_i k_j) u_j), where S is the state before the chunk and
    d_i the product of what is kept up to row i: a triangular system."""
    rows = len(beta)

    def chunked(x: Tensor) -> Tensor:
        """[rows, heads, ...] -> [chunks, heads, CHUNK, ...]; missing rows are zero and change nothing."""
        padded = F.pad(x, (0, 0) * (x.ndim - 1) + (0, -rows % CHUNK))
        return padded.view(-1, CHUNK, *x.shape[1:]).transpose(1, 2)

    q, k, v, beta, decay = (chunked(x) for x in (*qkv, beta, decay))
    kept = decay.cumsum(-1)
    future = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=kept.device).triu(1)
    between = (kept[..., :, None] - kept[..., None, :]).masked_fill(future, float("-inf")).exp()
    system = ((k * beta[..., None]) @ k.transpose(-1, -2) * between).tril(-1)
    keep = kept.exp()[..., None]
    right = torch.cat((v, k * keep), -1) * beta[..., None]
    # Solved for the identity: its columns are fewer than those of `right`, and products are faster.
    identity = torch.eye(CHUNK, device=k.device).expand_as(system)
    solved = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True) @ right
    corrections, known = torch.split(solved, [v.shape[-1], k.shape[-1]], -1)
    scores = q @ k.transpose(-1, -2) * between
    last = kept[..., -1:, None]
    late = (k * (last - kept[..., None]).exp()).transpose(-1, -2)
    # The state behind a chunk is carried @ state + added, so that chunks wait for one product each.
    carried = torch.eye(k.shape[-1], device=k.device) * last.exp() - late @ known
    added = late @ corrections
    before = torch.empty_like(added)
    for i in range(len(q)):
        before[i] = state
        state = torch.baddbmm(added[i], carried[i], state)
    out = (q * keep) @ before + scores @ (corrections - known @ before)
    return out.transpose(1, 2).flatten(0, 1)[:rows], state

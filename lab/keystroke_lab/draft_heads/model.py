"""The draft head: one decoder layer over [embedding of the newest token ; the target's features before it].

The arithmetic is written once, here, in four parts that training and reference drafting share:

    h = fuse(rms(feature_1), ..., rms(feature_n))      of the token before, or the last pass's own result g
    q, k, v = projections of [rms(e) w_e ; rms(h) w_h]  e: the target's embedding of the newest token
    g = h + o(attention); g = g + down(silu(gate(y)) up(y)), y = rms(g) w_m
    guess = argmax over the reduced vocabulary of out(rms(g) w_o)

The key of the token at index i stands at rotary position i - 1: the place of the feature it came with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from keystroke_lab.draft_heads.attention import merged
from keystroke_lab.draft_heads.shape import HeadShape
from keystroke_lab.training.rotary import rotate_halves

Attention = Callable[[Tensor, Tensor, Tensor, Sequence[tuple[Tensor, Tensor]]], Tensor]


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.size(-1),), self.weight, self.eps).to(x.dtype)


class DraftHeadModule(nn.Module):
    def __init__(self, shape: HeadShape, *, seed: int = 0, device: torch.device | None = None) -> None:
        super().__init__()
        self.shape = shape
        hidden, size = shape.hidden, shape.head_dim
        with torch.device(device or "cpu"):
            self.fuse = nn.Linear(len(shape.layers) * hidden, hidden, bias=False)
            self.token_norm = Norm(hidden, shape.norm_eps)
            self.hidden_norm = Norm(hidden, shape.norm_eps)
            self.q_proj = nn.Linear(2 * hidden, shape.heads * size, bias=False)
            self.k_proj = nn.Linear(2 * hidden, shape.kv_heads * size, bias=False)
            self.v_proj = nn.Linear(2 * hidden, shape.kv_heads * size, bias=False)
            self.o_proj = nn.Linear(shape.heads * size, hidden, bias=False)
            self.mlp_norm = Norm(hidden, shape.norm_eps)
            self.gate_proj = nn.Linear(hidden, shape.intermediate, bias=False)
            self.up_proj = nn.Linear(hidden, shape.intermediate, bias=False)
            self.down_proj = nn.Linear(shape.intermediate, hidden, bias=False)
            self.norm = Norm(hidden, shape.norm_eps)
            self.out = nn.Linear(hidden, shape.vocabulary, bias=False)
        self._start(torch.Generator(device or "cpu").manual_seed(seed))

    def _start(self, generator: torch.Generator) -> None:
        """Small random weights. What writes to the stream starts at zero, and the stream starts as the
        highest feature: the nearest to what the output matrix reads."""
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            if name in ("o_proj.weight", "down_proj.weight"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=0.5 * parameter.size(1) ** -0.5, generator=generator)
        with torch.no_grad():
            self.fuse.weight.mul_(0.1)
            self.fuse.weight[:, -self.shape.hidden :] += torch.eye(
                self.shape.hidden, device=self.fuse.weight.device
            )

    @torch.no_grad()
    def copy_output(self, rows: Tensor, norm: Tensor) -> None:
        """Start the output from the target's own rows and last norm: what it reads is then known from the
        first step."""
        self.out.weight.copy_(rows)
        self.norm.weight.copy_(norm)

    def fuse_features(self, features: Tensor) -> Tensor:
        """features [..., layers, hidden] as one stream [..., hidden]."""
        even = F.rms_norm(features.float(), (features.size(-1),), None, self.shape.norm_eps)
        found: Tensor = self.fuse(even.to(features.dtype).flatten(-2))
        return found

    def project_qkv(self, embedded: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [rows, heads, length, head_dim], not yet rotated."""
        x = torch.cat((self.token_norm(embedded), self.hidden_norm(h)), -1)
        rows, length, _ = x.shape

        def split(linear: nn.Module) -> Tensor:
            found: Tensor = linear(x).view(rows, length, -1, self.shape.head_dim).transpose(1, 2)
            return found

        return split(self.q_proj), split(self.k_proj), split(self.v_proj)

    def finish_layer(self, h: Tensor, mixed: Tensor) -> Tensor:
        """The layer's result from its input and its attention's."""
        g = h + self.o_proj(mixed.transpose(1, 2).flatten(2))
        y = self.mlp_norm(g)
        out: Tensor = g + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))
        return out

    def read_out(self, g: Tensor) -> Tensor:
        """What the output matrix multiplies."""
        normed: Tensor = self.norm(g)
        return normed

    def unroll(
        self,
        features: Tensor,
        embedded: Tensor,
        angles: tuple[Tensor, Tensor],
        steps: int,
        attention: Attention = merged,
    ) -> list[Tensor]:
        """Normed results [rows, length, hidden] of `steps` passes over whole sequences, every index a start.

        Pass s at index i has seen features up to i and the tokens up to i + s + 1, and guesses the token
        i + s + 2. `embedded` [rows, length + steps, hidden] holds at index j the embedding of token j + 1;
        `angles` are cosines and sines of length + steps positions."""
        length, group = features.size(1), self.shape.heads // self.shape.kv_heads
        h = self.fuse_features(features)
        past: tuple[Tensor, Tensor] | None = None
        own: list[tuple[Tensor, Tensor]] = []
        found: list[Tensor] = []
        for step in range(steps):
            q, k, v = self.project_qkv(embedded[:, step : step + length], h)
            at = tuple(table[step : step + length] for table in angles)
            q, k = rotate_halves(q, *at), rotate_halves(k, *at)
            k, v = (t.repeat_interleave(group, 1) for t in (k, v))
            if past is None:
                past = k, v
            else:
                own.append((k, v))
            h = self.finish_layer(h, attention(q, *past, own))
            found.append(self.read_out(h))
        return found

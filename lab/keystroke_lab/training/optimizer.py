"""Muon for matrices, AdamW for the rest, behind one step.

Matrices of one shape are orthogonalised together in one batched product, so a step costs a few milliseconds
whatever the number of layers. The learning rate arrives as a factor from the schedule.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_A, _B, _C = 3.4445, -4.7750, 2.0315  # quintic iteration that pushes singular values towards one


def orthogonalise(stack: Tensor, steps: int = 5) -> Tensor:
    """The nearest semi-orthogonal matrices to a stack [n, rows, columns], approximately."""
    x = stack.bfloat16() if stack.is_cuda else stack.float()  # few CPUs multiply bfloat16 quickly
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    found: Tensor = x.mT if tall else x
    return found


class Muon:
    """Momentum orthogonalised by matrix; `parameters` must be two-dimensional."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        rate: float = 0.02,
        momentum: float = 0.95,
        decay: float = 0.01,
    ):
        groups: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            groups[tuple(parameter.shape)].append(parameter)
        self.groups = list(groups.values())
        self.rate, self.momentum, self.decay = rate, momentum, decay
        self.velocity = [
            torch.zeros(len(g), *g[0].shape, dtype=torch.float32, device=g[0].device) for g in self.groups
        ]

    @torch.no_grad()
    def step(self, factor: float, momentum: float | None = None) -> None:
        beta = self.momentum if momentum is None else momentum
        for group, velocity in zip(self.groups, self.velocity, strict=True):
            gradient = torch.stack([p.grad for p in group if p.grad is not None]).float()
            velocity.lerp_(gradient, 1 - beta)
            update = orthogonalise(gradient.lerp(velocity, beta))
            rate = self.rate * factor
            scale = rate * max(1.0, velocity.size(-2) / velocity.size(-1)) ** 0.5
            for parameter, change in zip(group, update, strict=True):
                parameter.mul_(1 - rate * self.decay).add_(change.to(parameter.dtype), alpha=-scale)


class Optimizer:
    """Muon over a model's matrices, AdamW over the rest: norms, and matrices whose name holds one of
    `vectors`, such as embeddings."""

    def __init__(
        self,
        model: nn.Module,
        *,
        matrix_rate: float = 0.02,
        other_rate: float = 0.003,
        decay: float = 0.01,
        eps: float = 1e-10,
        vectors: tuple[str, ...] = ("embed_tokens",),
    ) -> None:
        def is_matrix(name: str, parameter: nn.Parameter) -> bool:
            return parameter.ndim == 2 and not any(vector in name for vector in vectors)

        named = list(model.named_parameters())
        others = [p for name, p in named if not is_matrix(name, p)]
        self.muon = Muon([p for name, p in named if is_matrix(name, p)], rate=matrix_rate, decay=decay)
        self.other_rate = other_rate
        self.adam = torch.optim.AdamW(
            others, lr=other_rate, betas=(0.9, 0.95), eps=eps, weight_decay=0.0, fused=others[0].is_cuda
        )

    def step(self, factor: float, momentum: float = 0.95) -> None:
        for group in self.adam.param_groups:
            group["lr"] = self.other_rate * factor
        self.adam.step()
        self.muon.step(factor, momentum)

    def state_dict(self) -> dict[str, Any]:
        return {"adam": self.adam.state_dict(), "velocity": self.muon.velocity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adam.load_state_dict(state["adam"])
        for mine, saved in zip(self.muon.velocity, state["velocity"], strict=True):
            mine.copy_(saved)

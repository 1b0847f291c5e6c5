"""The matrices that give the scores of experts before attention's output is in the residual stream.

With R the router, g the weights of the norm before it and O the output projection, an expert's score is
R g (x + O a), divided by the norm of x + O a: of the row x before attention and of what attention gives, a.
R g and R g O are rounded to float16, an eighth of bf16's rounding error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keystroke.engine.cuda.plan import EARLY_COLUMNS, EARLY_SCORES, Plan


@dataclass(frozen=True)
class EarlyRouter:
    """float16 [layers, parts, groups, columns / 32, 8, 32], and a factor for each score of both."""

    before: Tensor  # for the row before attention
    behind: Tensor  # for what attention gives
    scales: Tensor  # float32 [layers, 2, 8 groups]

    @classmethod
    def empty(cls, plan: Plan, device: torch.device) -> EarlyRouter:
        """Room for the matrices of all layers; none for a model whose experts are not scored early."""
        early, layers = plan.early_scores, plan.spec.layers
        widths = (0, 0) if early is None else (early.before, early.behind)
        groups = 0 if early is None else early.groups
        before, behind = (
            torch.zeros(
                (layers, plan.output.split, groups, width // EARLY_COLUMNS, EARLY_SCORES, EARLY_COLUMNS),
                dtype=torch.float16,
                device=device,
            )
            for width in widths
        )
        return cls(before, behind, torch.zeros(layers, 2, groups * EARLY_SCORES, device=device))

    def put(self, layer: int, router: Tensor, norm: Tensor, output: Tensor) -> None:
        """Set those of one layer: from its router, the norm before it and its output projection, float32."""
        wanted = router * norm
        for i, (to, matrix) in enumerate(((self.before, wanted), (self.behind, wanted @ output))):
            _, parts, groups, _, _, _ = to.shape
            padded = matrix.new_zeros(groups * EARLY_SCORES, matrix.shape[1])
            largest = matrix.abs().amax(1).clamp(min=1e-30)
            padded[: len(matrix)] = matrix / largest[:, None]
            pieces = padded.view(groups, EARLY_SCORES, parts, -1, EARLY_COLUMNS).permute(2, 0, 3, 1, 4)
            to[layer, :, :, : pieces.shape[2]] = pieces.half()
            self.scales[layer, i, : len(matrix)] = largest

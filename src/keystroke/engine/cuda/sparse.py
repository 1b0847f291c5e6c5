"""Sparse attention: when a session uses it, and what the kernel must know of its pages.

Keeps, for whole pages, the largest and smallest value of every key dimension, so that the kernel can
bound what a page may weigh. Bounds belong to a page's content: whoever writes to a page forgets them. Which
chunks a row attends to is the kernel's choice (kernels/selection.cuh).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from keystroke.engine.cuda.plan import CHOSEN_CHUNKS, CHUNK, NEAR, PAGE, Plan
from keystroke.engine.cuda.quantisation import from_bytes

# "auto" takes a step again with the whole context wherever the bounds cannot rule out that more than
# `MOST_OMITTED` of a head's attention was left out; "always" never does: faster, and an approximation.
Sparse = Literal["off", "auto", "always"]

SPARSE_FROM = 16_384  # tokens; a shorter context is read faster than it is chosen from
BUDGET = CHOSEN_CHUNKS  # the first, the last three, and 28 of up to 256 keys each by their bounds
MOST_OMITTED = 0.02
TRUST_AGAIN = 256  # tokens after a doubtful step before the next attempt
_MOST_CHUNKS = 1024  # that the kernel can choose from
_BATCH = 64  # pages at a time, so that little memory is needed


def usable(plan: Plan) -> bool:
    """Whether the kernel can choose chunks for this model here; else its sessions attend to everything."""
    spec = plan.spec
    chunks = NEAR // PAGE + -(-max(spec.context_length - NEAR, 0) // CHUNK)
    return spec.heads // spec.kv_heads <= 16 and chunks <= _MOST_CHUNKS and plan.can_choose


class PageBounds:
    def __init__(self, keys: Tensor) -> None:
        """`keys` [layers, pages, kv_heads, PAGE, head_dim], bf16 or bytes."""
        layers, pages, heads, _, width = keys.shape
        kind = torch.float16 if keys.dtype == torch.uint8 else keys.dtype  # what attention multiplies
        self.tensor = torch.zeros(layers, pages, heads, 2, width, dtype=kind, device=keys.device)
        self._keys = keys
        self._known = bytearray(pages)

    def forget(self, pages: Iterable[int]) -> None:
        """These pages may be written to from now on."""
        for page in pages:
            self._known[page] = 0

    @torch.inference_mode()
    def ensure(self, pages: Iterable[int]) -> None:
        """Bounds of these pages, all of them whole, are up to date when the next kernel runs."""
        missing = [page for page in pages if not self._known[page]]
        for at in range(0, len(missing), _BATCH):
            batch = torch.tensor(missing[at : at + _BATCH], device=self._keys.device)
            keys = self._keys[:, batch]
            self.tensor[:, batch, :, 0] = from_bytes(keys.amax(3), torch.float16)
            self.tensor[:, batch, :, 1] = from_bytes(keys.amin(3), torch.float16)
        for page in missing:
            self._known[page] = 1

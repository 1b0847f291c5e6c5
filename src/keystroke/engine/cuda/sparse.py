"""Sparse attention: its settings, and bounds on the keys of full pages.

The kernel bounds the weight of a page by the largest and smallest value of each key dimension, and chooses
chunks of pages from that (kernels/selection.cuh). Writing to a page invalidates its bounds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from keystroke.engine.cuda.plan import CHOSEN_CHUNKS, CHUNK, NEAR, PAGE, Plan
from keystroke.engine.cuda.quantisation import from_bytes

# "auto" repeats a step with the whole context unless the bounds prove that at most `MOST_OMITTED` of each
# head's attention was omitted; "always" never repeats: faster, and an approximation.
Sparse = Literal["off", "auto", "always"]

SPARSE_FROM = 16_384  # tokens; reading a shorter context is faster than choosing from it
BUDGET = CHOSEN_CHUNKS  # the first, the last three, and 28 of up to 256 keys each by their bounds
MOST_OMITTED = 0.02
DENSE_TOKENS_AFTER_DOUBT = 256  # before sparse attention is tried again
_MOST_CHUNKS = 1024  # that the kernel can choose from
_BATCH = 64  # pages at a time, to limit memory


def supports_sparse(plan: Plan) -> bool:
    """Whether the kernel supports sparse attention for this plan."""
    spec = plan.spec
    chunks = NEAR // PAGE + -(-max(spec.context_length - NEAR, 0) // CHUNK)
    if spec.windowed or spec.sinks or spec.delta is not None or spec.head_dim > 128:
        return False
    return spec.heads // spec.kv_heads <= 16 and chunks <= _MOST_CHUNKS and plan.ring_fits_sparse


class PageBounds:
    def __init__(self, keys: Tensor) -> None:
        """`keys` [layers, pages, kv_heads, PAGE, head_dim], bf16 or bytes."""
        layers, pages, heads, _, width = keys.shape
        kind = torch.float16 if keys.dtype == torch.uint8 else keys.dtype  # what attention multiplies
        self.tensor = torch.zeros(layers, pages, heads, 2, width, dtype=kind, device=keys.device)
        self._keys = keys
        self._known = bytearray(pages)

    def invalidate(self, pages: Iterable[int]) -> None:
        """Call before writing to these pages."""
        for page in pages:
            self._known[page] = 0

    @torch.inference_mode()
    def update(self, pages: Iterable[int]) -> None:
        """Compute missing bounds of these full pages before the next kernel runs."""
        missing = [page for page in pages if not self._known[page]]
        for at in range(0, len(missing), _BATCH):
            batch = torch.tensor(missing[at : at + _BATCH], device=self._keys.device)
            keys = self._keys[:, batch]
            self.tensor[:, batch, :, 0] = from_bytes(keys.amax(3), torch.float16)
            self.tensor[:, batch, :, 1] = from_bytes(keys.amin(3), torch.float16)
        for page in missing:
            self._known[page] = 1

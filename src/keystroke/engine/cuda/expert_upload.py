"""Copies experts from host memory to the device: threads fill pinned memory, from which the copy engine reads
while the next ones are filled."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from keystroke.engine.cores import usable_cores
from keystroke.engine.host_experts import ExpertTable

_THREADS = 8  # enough to keep a PCIe link busy
_BUFFERS = 2


class ExpertUploader:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(min(_THREADS, usable_cores()), thread_name_prefix="experts")
        self._buffers: list[tuple[Tensor, torch.cuda.Event] | None] = [None] * _BUFFERS
        self._turn = 0

    def rows(self, table: ExpertTable, experts: Sequence[int], count: int) -> Tensor:
        """The rows of some of `count` experts on the device, as bytes: [rows, bytes of a row]."""
        stored = table.rows.view(np.uint8).reshape(count, -1)
        height = len(table.rows) // count
        if self._device.type != "cuda":
            return torch.from_numpy(stored[list(experts)]).view(len(experts) * height, -1)
        pinned, event = self._buffer(len(experts) * stored.shape[1])
        filled = pinned[: len(experts) * stored.shape[1]].view(len(experts), -1)
        target = filled.numpy()

        def fill(index: int) -> None:
            target[index] = stored[experts[index]]

        list(self._pool.map(fill, range(len(experts))))
        found = filled.to(self._device, non_blocking=True)
        event.record()
        return found.view(len(experts) * height, -1)

    def _buffer(self, size: int) -> tuple[Tensor, torch.cuda.Event]:
        """Pinned memory whose last copy is complete."""
        self._turn = (self._turn + 1) % _BUFFERS
        known = self._buffers[self._turn]
        if known is not None:
            known[1].synchronize()
        if known is None or known[0].numel() < size:
            known = torch.empty(size, dtype=torch.uint8).pin_memory(), torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._buffers[self._turn] = known
        return known

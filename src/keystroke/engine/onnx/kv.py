"""KV memory of the embedded engine: growable buffers, copied on write.

A buffer may have several owners, such as a fork or a session that shares its prefix; an owner copies it
before writing if there are others.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnxruntime as ort

from keystroke.engine.checkpoint import ModelSpec
from keystroke.engine.disk_prefixes import BLOCK, whole_blocks
from keystroke.engine.onnx.precision import MIN_ATTENTION_ROWS
from keystroke.engine.onnx.recurrent import RecurrentState, recurrent_shapes
from keystroke.errors import NotEnoughMemory

KEY_BLOCK = BLOCK  # native attention stores keys in transposed blocks: see native/attention.h
FIRST_CAPACITY = 256  # tokens; small, so that an idle session costs little
NARROW_ROOM = 64  # tokens of room to grow when the budget is nearly used up


class KvBuffers:
    """Keys and values of every layer with attention, [1, kv_heads, capacity, head_dim] each.

    The capacity is a number of whole blocks, and only whole blocks are copied.
    """

    __slots__ = ("arrays", "capacity", "nbytes", "owners", "recurrent", "values")

    def __init__(self, spec: ModelSpec, dtype: np.dtype[np.floating], capacity: int) -> None:
        shape = (1, spec.kv_heads, capacity, spec.head_dim)
        # The system allocates zeroed pages on first use: unused capacity costs no memory.
        self.arrays = [np.zeros(shape, dtype=dtype) for _ in range(2 * len(spec.attention_layers))]
        self.values = [ort.OrtValue.ortvalue_from_numpy(array) for array in self.arrays]
        self.capacity = capacity
        self.recurrent = RecurrentState(spec.delta) if spec.delta is not None else None
        self.owners = 1
        self._count_bytes()

    def _count_bytes(self) -> None:
        recurrent = self.recurrent.nbytes if self.recurrent is not None else 0
        self.nbytes = sum(array.nbytes for array in self.arrays) + recurrent

    def reach(self, length: int) -> int:
        """The largest position up to `length` at which a run can start."""
        return length if self.recurrent is None else self.recurrent.reach(length)

    def grow(self, keep: int, capacity: int) -> None:
        """Grow layer by layer, so that there are never two full copies. A failure leaves every layer with its
        first `keep` tokens."""
        for index, held in enumerate(self.arrays):
            one, heads, _, width = held.shape
            array = np.zeros((one, heads, capacity, width), dtype=held.dtype)
            array[:, :, : whole_blocks(keep)] = held[:, :, : whole_blocks(keep)]
            self.values[index], self.arrays[index] = ort.OrtValue.ortvalue_from_numpy(array), array
        self.capacity = capacity
        self._count_bytes()


class KvPool:
    """Allocates buffers within a budget of bytes. If it is exceeded, `make_room` is called as long as it
    frees something and returns True."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: np.dtype[np.floating],
        budget: int,
        make_room: Callable[[], bool] = lambda: False,
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.budget = budget
        self.used = 0
        self._make_room = make_room

    def bytes_for(self, capacity: int) -> int:
        spec = self.spec
        each = 2 * len(spec.attention_layers) * spec.kv_heads * spec.head_dim
        held = 0
        if spec.delta is not None:
            held = 2 * 4 * len(spec.delta.layers) * recurrent_shapes(spec.delta)[0][0]
        return each * self.dtype.itemsize * capacity + held

    def capacity_for(self, length: int) -> int:
        """The capacity for `length` tokens; grows by half, so that a session copies each token only a few
        times."""
        capacity = FIRST_CAPACITY
        while capacity < length:
            capacity += max(capacity // 2, FIRST_CAPACITY)
        return whole_blocks(min(capacity, max(self.spec.context_length + MIN_ATTENTION_ROWS, length)))

    def allocate(self, length: int) -> KvBuffers:
        capacity = self._affordable_capacity(length, 0)
        try:
            buffers = KvBuffers(self.spec, self.dtype, capacity)
        except MemoryError:
            raise self._memory_error(capacity) from None
        self.used += buffers.nbytes
        return buffers

    def copy(self, buffers: KvBuffers, keep: int, length: int) -> KvBuffers:
        """New buffers for `length` tokens with a copy of the first `keep`."""
        fresh = self.allocate(length)
        for source, target in zip(buffers.arrays, fresh.arrays, strict=True):
            target[:, :, : whole_blocks(keep)] = source[:, :, : whole_blocks(keep)]
        if buffers.recurrent is not None and fresh.recurrent is not None:
            buffers.recurrent.copy_to(fresh.recurrent, keep)
        return fresh

    def grow(self, buffers: KvBuffers, keep: int, length: int) -> None:
        """Grow buffers with one owner to `length` tokens, keeping the first `keep`."""
        before = buffers.nbytes
        capacity = self._affordable_capacity(length, before)
        try:
            buffers.grow(keep, capacity)
        except MemoryError:
            raise self._memory_error(capacity) from None
        self.used += buffers.nbytes - before

    def share(self, buffers: KvBuffers) -> KvBuffers:
        buffers.owners += 1
        return buffers

    def release(self, buffers: KvBuffers) -> None:
        buffers.owners -= 1
        if buffers.owners == 0:
            self.used -= buffers.nbytes

    def _affordable_capacity(self, length: int, returned: int) -> int:
        """The capacity for `length` tokens, with room to grow if the budget allows. `returned` bytes are
        freed in exchange."""
        for capacity in (self.capacity_for(length), whole_blocks(length + NARROW_ROOM)):
            need = self.bytes_for(capacity) - returned
            while self.used + need > self.budget and self._make_room():
                pass
            if self.used + need <= self.budget:
                return capacity
        raise NotEnoughMemory(
            f"a session of {length:,} tokens needs {self.bytes_for(length) / 2**20:,.0f} MB of KV cache and "
            f"{max(self.budget - self.used + returned, 0) / 2**20:,.0f} MB of the budget are left; "
            "close sessions or raise engine.kv_budget_mb"
        )

    def _memory_error(self, capacity: int) -> NotEnoughMemory:
        return NotEnoughMemory(
            f"the system refused {self.bytes_for(capacity) / 2**20:,.0f} MB for the KV cache; "
            "close other programs or shorten the context"
        )

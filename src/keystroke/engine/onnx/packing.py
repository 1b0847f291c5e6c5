"""Copies a graph's matrices into the order in which products on ARM read them: see native/packed_arm.h.

Only matrices that every token reads are copied; experts and the embedding stay mapped.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from keystroke.engine.checkpoint import EMBEDDING, Checkpoint, tensor_shapes
from keystroke.engine.cores import usable_cores
from keystroke.engine.memory import available_bytes
from keystroke.engine.onnx.plan import MOST_PACKED
from keystroke.engine.onnx.stored import TYPES

_LINE = 64  # bytes
_LANES = 4  # rows that lie in one row of a packed table
_OTHER_OPERATORS = (".experts.", ".k_b_proj.", ".v_b_proj.")  # not multiplied by StoredMatMul

Tables = dict[str, npt.NDArray[np.uint8]]


def pack_tables(
    library: Path, checkpoint: Checkpoint, tables: Mapping[str, npt.NDArray[np.uint8]], threads: int
) -> Tables:
    """The tables, packed where the operators have a faster product for that and there is memory for it. All
    results stay the same, to the last bit."""
    pack = ctypes.CDLL(str(library)).pack_table
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    pack.argtypes, pack.restype = [size, pointer, size, size, pointer, size], size
    widths, strips = {name: shape[-1] for name, shape in tensor_shapes(checkpoint.spec).items()}, {}
    for name, table in tables.items():
        kind = TYPES.get(checkpoint.storage(name))
        if kind is not None and name != EMBEDDING and not any(part in name for part in _OTHER_OPERATORS):
            sizes = (kind, table.ctypes.data, len(table), widths[name])
            if strip := pack(*sizes, None, 0):
                strips[name] = (sizes, strip)
    free = available_bytes()
    needed = sum(len(tables[name]) // _LANES * strip for name, (_, strip) in strips.items())
    packed = dict(tables)
    if free is not None and needed * MOST_PACKED > free:
        return packed
    for name, (sizes, strip) in strips.items():
        rows = len(tables[name]) // _LANES
        memory = np.empty(rows * strip + _LINE, np.uint8)
        start = -memory.ctypes.data % _LINE
        copy = memory[start : start + rows * strip].reshape(rows, strip)
        if pack(*sizes, copy.ctypes.data, threads or usable_cores()):
            packed[name] = copy
    return packed

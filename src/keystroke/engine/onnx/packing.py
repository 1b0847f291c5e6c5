"""Copies matrices into the order in which products read them: see packed_arm.h and packed_x86.h in native/.

Plans pack theirs themselves and ask here whether there is memory for it. Of a graph only matrices that every
token reads are copied; experts and the embedding stay mapped.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from keystroke.engine.checkpoint import EMBEDDING, Checkpoint, ModelSpec, tensor_shapes
from keystroke.engine.cores import usable_cores
from keystroke.engine.memory import available_bytes
from keystroke.engine.onnx.stored import TYPES

_MOST_PACKED = 4  # copies are made if they take at most this part of the free memory
_LINE = 64  # bytes
_WILL_NEED = 3  # of `madvise`, on Linux and macOS
_OTHER_OPERATORS = (".experts.", ".k_b_proj.", ".v_b_proj.")  # not multiplied by StoredMatMul

Tables = dict[str, npt.NDArray[np.uint8]]
_Sizes = tuple[int, int, int, int]  # the first arguments of native `pack_table`


def pack_tables(library: Path, checkpoint: Checkpoint, tables: Tables, threads: int) -> Tables:
    """The tables, packed where the operators have a faster product for that and there is memory for it. All
    results stay the same, to the last bit."""
    native = ctypes.CDLL(str(library))
    pack, lanes = _pack_table(native), native.packed_lanes()
    types = {
        name: TYPES[kind] for name in _every_token(tables) if (kind := checkpoint.storage(name)) in TYPES
    }
    strips = _strips(pack, checkpoint.spec, tables, types)
    packed = dict(tables)
    if not _has_memory(strips, lanes):
        return packed
    for name, (sizes, strip) in strips.items():
        rows = len(tables[name]) // lanes
        memory = np.empty(rows * strip + _LINE, np.uint8)
        start = -memory.ctypes.data % _LINE
        copy = memory[start : start + rows * strip].reshape(rows, strip)
        if pack(*sizes, copy.ctypes.data, threads or usable_cores()):
            packed[name] = copy
    return packed


def has_memory_to_pack(
    library: ctypes.CDLL, spec: ModelSpec, tables: Tables, types: Mapping[str, int]
) -> bool:
    """Whether a plan may pack its matrices, whose GGUF types are `types`."""
    multiplied = {name: kind for name, kind in types.items() if name != EMBEDDING or spec.tied}
    return _has_memory(_strips(_pack_table(library), spec, tables, multiplied), library.packed_lanes())


def read_ahead(tables: Tables) -> None:
    """Have the system read the matrices of every token from the disk while other work is done."""
    if os.name == "nt":
        return  # no such advice there
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for name in _every_token(tables):
        at, size = tables[name].ctypes.data, tables[name].nbytes
        advise(at - at % mmap.PAGESIZE, size + at % mmap.PAGESIZE, _WILL_NEED)


def _every_token(tables: Tables) -> list[str]:
    """The names of matrices that StoredMatMul multiplies with every token."""
    return [
        name for name in tables if name != EMBEDDING and not any(part in name for part in _OTHER_OPERATORS)
    ]


def _pack_table(library: ctypes.CDLL) -> ctypes._NamedFuncPointer:
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    pack = library.pack_table
    pack.argtypes, pack.restype = [size, pointer, size, size, pointer, size], size
    return pack


def _strips(
    pack: ctypes._NamedFuncPointer, spec: ModelSpec, tables: Tables, types: Mapping[str, int]
) -> dict[str, tuple[_Sizes, int]]:
    """Of each table that has a packed form, the arguments to pack it and the bytes of its packed rows."""
    shapes, found = tensor_shapes(spec), {}
    for name, kind in types.items():
        sizes = (kind, tables[name].ctypes.data, len(tables[name]), shapes[name][-1])
        if strip := pack(*sizes, None, 0):
            found[name] = (sizes, strip)
    return found


def _has_memory(strips: Mapping[str, tuple[_Sizes, int]], lanes: int) -> bool:
    """`lanes`: the rows of a matrix that lie in one packed row."""
    free = available_bytes()
    needed = sum(height // lanes * strip for (_, _, height, _), strip in strips.values())
    return free is None or needed * _MOST_PACKED <= free

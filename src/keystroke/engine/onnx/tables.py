"""Matrices of a model in the storage types of GGUF files, in one mapped file of the conversion cache.

For models whose layers only the native operators run and whose file does not hold matrices that these read as
they are. Matrices are written as they are produced, so that converting needs the memory of one of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from keystroke.engine.checkpoint import Checkpoint, tensor_shapes
from keystroke.engine.onnx.convert import conversion_cache
from keystroke.engine.onnx.precision import Precision
from keystroke.engine.onnx.quantise import quantise
from keystroke.engine.onnx.stored import is_matrix

_TABLES, _INDEX = "tables.bin", "tables.json"
_VERSION = 1  # part of the cache key
_BLOCK, _PAGE, _LEAST_ROWS = 32, 4096, 16
_UNQUANTISED = (".mlp.gate.", ".shared_expert_gate.", ".in_proj_a.", ".in_proj_b.")  # small, and they decide
_KINDS = {8: "Q8_0", 4: "Q4_0"}


def convert_tables(
    checkpoint: Checkpoint,
    precision: Precision,
    *,
    progress: Callable[[int, int], None] | None = None,
    cache: Path | None = None,
) -> TablesCheckpoint:
    """The checkpoint with its matrices converted to `precision`, from the cache if it has them. Vectors are
    read from the original, which must stay open."""

    def make(folder: Path) -> None:
        index: dict[str, dict[str, object]] = {}
        done, total = 0, checkpoint.spec.parameters
        with (folder / _TABLES).open("wb") as file:
            for name, shape in tensor_shapes(checkpoint.spec).items():
                if is_matrix(name, shape):
                    table, kind = _convert(checkpoint, name, precision)
                    file.write(bytes(-file.tell() % _PAGE))
                    index[name] = {"start": file.tell(), "shape": list(table.shape), "type": kind}
                    file.write(table.tobytes())
                    done += shape[0] * shape[1]
                    if progress is not None:
                        progress(done, total)
        (folder / _INDEX).write_text(json.dumps(index))

    key = {"weights": checkpoint.fingerprint(), "precision": precision.name, "tables": _VERSION}
    room = sum(4 * s[0] * s[1] for n, s in tensor_shapes(checkpoint.spec).items() if is_matrix(n, s))
    room = room // 8 * (precision.body_bits or 32) // 4
    name = f"{checkpoint.spec.name}-{precision.name}-tables"
    place = conversion_cache(cache).entry(name, json.dumps(key, sort_keys=True), make, room)
    return TablesCheckpoint(checkpoint, place, precision.name)


class TablesCheckpoint(Checkpoint):
    def __init__(self, original: Checkpoint, folder: Path, precision: str) -> None:
        self.spec = original.spec
        self._original = original
        self._precision = precision
        self._index = json.loads((folder / _INDEX).read_bytes())
        self._bytes: npt.NDArray[np.uint8] = np.asarray(np.memmap(folder / _TABLES, dtype=np.uint8, mode="r"))

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        return self._original.tensor(name)

    def raw(self, name: str) -> tuple[npt.NDArray[np.generic], str]:
        entry = self._index.get(name)
        if entry is None:
            return self._original.raw(name)
        rows, size = entry["shape"]
        start = entry["start"]
        return self._bytes[start : start + rows * size].reshape(rows, size), entry["type"]

    def fingerprint(self) -> str:
        return f"{self._original.fingerprint()}/{self._precision}/{_VERSION}"

    def close(self) -> None:
        self._bytes = np.empty(0, dtype=np.uint8)


def _convert(checkpoint: Checkpoint, name: str, precision: Precision) -> tuple[npt.NDArray[np.uint8], str]:
    """A matrix as rows of bytes, and its type. What is stored with few bits stays as it is."""
    stored = checkpoint.storage(name)
    if stored == "MXFP4" and precision.body_bits:
        return np.asarray(checkpoint.raw(name)[0], np.uint8), stored
    values = checkpoint.tensor(name)
    outside = name.endswith(("embed_tokens.weight", "lm_head.weight"))
    bits = precision.head_bits if outside else precision.body_bits
    plain = any(part in name for part in _UNQUANTISED) or values.shape[0] < _LEAST_ROWS
    if not bits or plain or values.shape[1] % _BLOCK:
        half = precision.name == "fp16" and not plain
        kind = "F16" if half else "F32"
        return np.ascontiguousarray(values, "<f2" if half else "<f4").view(np.uint8), kind
    made = quantise(values, bits=bits, block=_BLOCK, symmetric=True)
    rows, blocks = values.shape[0], values.shape[1] // _BLOCK
    scales = made.scales.astype("<f2").reshape(rows, blocks, 1).view(np.uint8)
    packed = made.packed.reshape(rows, blocks, -1)
    codes = packed ^ np.uint8(0x80) if bits == 8 else _halves_apart(packed)
    return np.concatenate([scales, codes], axis=-1).reshape(rows, -1), _KINDS[bits]


def _halves_apart(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """From neighbours in a byte to weights i and i + 16 in byte i, as Q4_0 has them."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], 32)
    joined: npt.NDArray[np.uint8] = codes[..., :16] | codes[..., 16:] << np.uint8(4)
    return joined

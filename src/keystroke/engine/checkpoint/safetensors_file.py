"""Reads a memory-mapped safetensors file; tensors are views.

Every offset is checked against the file size, so that a truncated or malicious file raises ModelDamaged and
never causes a crash or a large allocation.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import numpy as np
import numpy.typing as npt

from keystroke.errors import ModelDamaged, UnsupportedModel

_HEADER_LIMIT = 100_000_000  # the format's own limit
_TYPES: dict[str, np.dtype[np.generic]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}


@dataclass(frozen=True, slots=True)
class TensorLocation:
    type: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            size = path.stat().st_size
            if size < 8:
                raise _damage(path, "is too short to be a safetensors file")
            self._bytes: npt.NDArray[np.uint8] = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
        except OSError as error:
            raise ModelDamaged(
                f"{path} cannot be read ({error.strerror}); check the file and its permissions"
            ) from error
        self.entries = _read_header(path, self._bytes, size)

    def raw(self, name: str) -> tuple[npt.NDArray[np.generic], str]:
        entry = self.entries[name]
        dtype = _TYPES.get(entry.type)
        if dtype is None:
            raise UnsupportedModel(
                f"tensor {name} in {self.path.name} is stored as {entry.type}; use a version of the model in "
                "bfloat16, float16 or float32, or a GGUF file"
            )
        return self._bytes[entry.start : entry.end].view(dtype).reshape(entry.shape), entry.type

    def array(self, name: str) -> npt.NDArray[np.uint8]:
        """One tensor of single bytes, in its shape."""
        entry = self.entries[name]
        if entry.end - entry.start != math.prod(entry.shape):
            raise _damage(self.path, f"does not hold tensor {name!r} in bytes")
        return self.stored_bytes(name).reshape(entry.shape)

    def stored_bytes(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of one tensor, whatever its type."""
        entry = self.entries[name]
        return self._bytes[entry.start : entry.end]

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        return to_float32(*self.raw(name))


def to_float32(values: npt.NDArray[np.generic], type_name: str) -> npt.NDArray[np.float32]:
    """Convert a stored float type to float32, exactly. float32 is not copied."""
    if type_name == "BF16":  # bfloat16 is the upper half of a float32
        bits = values.astype(np.uint32)
        bits <<= np.uint32(16)
        return bits.view(np.float32)
    return values.astype(np.float32, copy=False)


def _read_header(path: Path, data: npt.NDArray[np.uint8], size: int) -> dict[str, TensorLocation]:
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > min(_HEADER_LIMIT, size - 8):
        raise _damage(path, f"has a header of {length} bytes that does not fit its {size} bytes")
    try:
        header = json.loads(data[8 : 8 + length].tobytes())
    except (ValueError, RecursionError) as error:
        raise _damage(path, "has a header that is not JSON") from error
    if not isinstance(header, dict):
        raise _damage(path, "has a header that is not a table")
    header.pop("__metadata__", None)
    return {name: _read_entry(path, name, value, 8 + length, size) for name, value in header.items()}


def _read_entry(path: Path, name: str, value: object, base: int, size: int) -> TensorLocation:
    if not isinstance(value, dict):
        raise _damage(path, f"does not describe tensor {name!r}")
    type_name, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if (
        not isinstance(type_name, str)
        or not _are_naturals(shape)
        or not _are_naturals(offsets)
        or len(offsets) != 2
    ):
        raise _damage(path, f"does not describe tensor {name!r}")
    start, end = base + offsets[0], base + offsets[1]
    if not start <= end <= size:
        raise _damage(path, f"ends before tensor {name!r} does")
    dtype = _TYPES.get(type_name)
    if dtype is not None and math.prod(shape) * dtype.itemsize != end - start:
        raise _damage(path, f"gives tensor {name!r} {end - start} bytes, which its shape does not need")
    return TensorLocation(type_name, tuple(shape), start, end)


def _are_naturals(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(each) is int and 0 <= each < 1 << 62 for each in value)


def _damage(path: Path, what: str) -> ModelDamaged:
    return ModelDamaged(f"{path} {what}; download it again")

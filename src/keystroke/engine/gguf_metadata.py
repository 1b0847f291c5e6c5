"""The key-value header of a GGUF file, read directly.

Law: reads only the header, in one pass over a memory map, and trusts none of its lengths. Tensors are
somebody else's business. (The `gguf` package's reader takes seconds for a vocabulary: it keeps
each string as an array.)
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from keystroke.errors import ModelDamaged, NotFound

_SCALARS = {
    0: ("<B", "u1"),
    1: ("<b", "i1"),
    2: ("<H", "<u2"),
    3: ("<h", "<i2"),
    4: ("<I", "<u4"),
    5: ("<i", "<i4"),
    6: ("<f", "<f4"),
    7: ("<?", "?"),
    10: ("<Q", "<u8"),
    11: ("<q", "<i8"),
    12: ("<d", "<f8"),
}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")


def read_metadata(path: Path, wanted: Callable[[str], bool] = lambda key: True) -> dict[str, Any]:
    """Values by key, for keys that `wanted` accepts: int, float, bool, str, or a list of one of them."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(data, path).read(wanted)
    except FileNotFoundError:
        raise NotFound(f"there is no model file at {path}") from None
    except (struct.error, ValueError, OverflowError, RecursionError) as error:
        raise ModelDamaged(f"{path.name} is not a complete GGUF file; fetch it again") from error


class _Header:
    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._at = 0
        self._path = path

    def read(self, wanted: Callable[[str], bool]) -> dict[str, Any]:
        magic, version, _tensors, count = struct.unpack_from("<4sIQQ", self._data)
        if magic != b"GGUF":
            raise ModelDamaged(f"{self._path.name} does not begin like a GGUF file; fetch it again")
        if version not in (2, 3):
            raise ModelDamaged(f"{self._path.name} is GGUF version {version}; versions 2 and 3 can be read")
        self._at = 24
        values: dict[str, Any] = {}
        for _ in range(count):
            key = self._string()
            value = self._value(self._number("<I"))
            if wanted(key):
                values[key] = value
        return values

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self._data, self._at)
        self._at += struct.calcsize(code)
        return value

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if size < 0 or end > len(self._data):
            raise ValueError("past the end")
        part = self._data[self._at : end]
        self._at = end
        return part

    def _string(self) -> str:
        return self._take(self._number("<Q")).decode("utf-8", "replace")

    def _strings(self, count: int) -> list[str]:
        """As `_string`, many times: a vocabulary has a hundred thousand, so this loop is kept bare."""
        data, at, length = self._data, self._at, _LENGTH.unpack_from
        values = []
        for _ in range(count):
            start = at + 8
            at = start + length(data, at)[0]
            values.append(data[start:at])
        if at > len(data):
            raise ValueError("past the end")
        self._at = at
        return [value.decode("utf-8", "replace") for value in values]

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            element, count = self._number("<I"), self._number("<Q")
            if element in _SCALARS:
                dtype = np.dtype(_SCALARS[element][1])
                if count > len(self._data):
                    raise ValueError("past the end")
                return np.frombuffer(self._take(count * dtype.itemsize), dtype=dtype).tolist()
            if count > len(self._data):
                raise ValueError("past the end")
            if element == _STRING:
                return self._strings(count)
            return [self._value(element) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"unknown value type {kind}")
        return self._number(_SCALARS[kind][0])

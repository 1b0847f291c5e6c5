"""Reads the GGUF container: its metadata and the location of its tensors.

Lengths are checked against the file size and counts are limited, so that a truncated or malicious file raises
ModelDamaged with little time and memory. Long arrays, such as a vocabulary, are decoded on demand. A header
is parsed once while a reference to it exists.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import mmap
import re
import struct
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keystroke.engine.checkpoint.ggml_types import STORAGE_TYPES, StorageType
from keystroke.errors import ModelDamaged, NotFound, UnsupportedModel

_KEYS_LIMIT = 1 << 16
_TENSORS_LIMIT = 1 << 16
_ELEMENTS_LIMIT = 1 << 24
_NAME_LIMIT = 1 << 16
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32, _U64 = _SCALARS[4], _SCALARS[10]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    type: StorageType
    shape: tuple[int, ...]  # rows first, as numpy has it
    start: int  # in the file
    size: int


class GGUFArray:
    """An array in the metadata, decoded on iteration."""

    __slots__ = ("_cursor", "_type", "length")

    def __init__(self, cursor: _Cursor, type_id: int, length: int) -> None:
        self._cursor, self._type, self.length = cursor, type_id, length

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return f"an array of {self.length} values"

    def __iter__(self) -> Iterator[object]:
        return iter(self.values())

    def text(self, index: int) -> str:
        """One element of an array of strings, without decoding the others."""
        cursor = self._cursor.copy()
        cursor.skip_strings(index)
        return cursor.text()

    def values(self) -> list[object]:
        cursor = self._cursor.copy()
        if self._type == _STRING:
            return [*cursor.texts(self.length)]
        kind = _SCALARS[self._type]
        start = cursor.take(self.length * kind.size)
        return [value for (value,) in kind.iter_unpack(cursor.view[start : cursor.at])]


class GGUFHeader:
    """`metadata` maps keys to int, float, bool, str or Array; `tensors` maps names to TensorInfo."""

    metadata: Mapping[str, object]
    tensors: Mapping[str, TensorInfo]

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                start = file.read(4)
                if start != b"GGUF":
                    raise _damage(path, "does not begin as a GGUF file does")
                self.view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelDamaged(
                f"{path} cannot be read ({error.strerror}); check the file and its permissions"
            ) from error
        cursor = _Cursor(path, self.view, 4)
        _check_version(path, cursor.scalar(_U32))
        tensors, keys = cursor.scalar(_U64), cursor.scalar(_U64)
        if tensors > _TENSORS_LIMIT or keys > _KEYS_LIMIT:
            raise _damage(path, f"claims {tensors} tensors and {keys} keys, which no model has")
        self.metadata = _read_metadata(path, cursor, keys)
        self._metadata_end = cursor.at
        self.tensors = _read_tensors(path, cursor, tensors, self.metadata)

    def metadata_digest(self) -> str:
        """A hash of the whole metadata, including the vocabulary."""
        return hashlib.sha256(memoryview(self.view)[: self._metadata_end]).hexdigest()


_held: weakref.WeakValueDictionary[tuple[Path, int, int, int], GGUFHeader] = weakref.WeakValueDictionary()


def open_header(path: Path) -> GGUFHeader:
    """The header of a file; reuses one that is still referenced, unless the file changed."""
    try:
        info = path.stat()
    except OSError:
        return GGUFHeader(path)
    key = (path.absolute(), info.st_ino, info.st_size, info.st_mtime_ns)
    header = _held.get(key)
    if header is None:
        header = _held[key] = GGUFHeader(path)
    return header


@contextlib.contextmanager
def cached_header(path: Path) -> Iterator[None]:
    """A context in which the header of a GGUF file is parsed at most once."""
    header = open_header(path) if path.suffix == ".gguf" and path.is_file() else None
    try:
        yield
    finally:
        del header


def read_metadata(path: Path, wanted: Callable[[str], bool] = lambda key: True) -> dict[str, Any]:
    """Values by key, for keys that `wanted` accepts: int, float, bool, str, or a list of one of them."""
    if not path.exists():
        raise NotFound(f"there is no model file at {path}")
    return {
        key: value.values() if isinstance(value, GGUFArray) else value
        for key, value in open_header(path).metadata.items()
        if wanted(key)
    }


SPLIT = re.compile(r"-(\d{5})-of-(\d{5})$")  # how the parts of a model end, before .gguf


def split_parts(path: Path) -> list[Path]:
    """All files of a model that is split over several, by the name of one; `path` itself if its name is not
    one of a part. Raises ModelDamaged if a part is missing."""
    match = SPLIT.search(path.stem)
    if match is None:
        return [path]
    count, start = int(match[2]), path.stem[: match.start()]
    names = (f"{start}-{n:05}-of-{count:05}{path.suffix}" for n in range(1, min(count, 999) + 1))
    parts = [path.with_name(name) for name in names]
    for part in parts:
        if not part.is_file():
            raise ModelDamaged(f"{path.parent} lacks {part.name}, a part of the model; download it too")
    return parts or [path]


class _Cursor:
    """A read position that only moves forward, and never past the end."""

    __slots__ = ("_path", "_size", "at", "view")

    def __init__(self, path: Path, view: mmap.mmap, at: int) -> None:
        self._path, self.view, self._size, self.at = path, view, len(view), at

    def copy(self) -> _Cursor:
        return _Cursor(self._path, self.view, self.at)

    def take(self, length: int) -> int:
        start, self.at = self.at, self.at + length
        if self.at > self._size:
            raise _damage(self._path, "ends in the middle of its header")
        return start

    def scalar(self, kind: struct.Struct) -> int:
        # Also used for floats and booleans; readers of the metadata check the type.
        value: int = kind.unpack_from(self.view, self.take(kind.size))[0]
        return value

    def bytes(self) -> bytes:
        length = self.scalar(_U64)
        start = self.take(length)
        return self.view[start : start + length]

    def text(self) -> str:
        return self.bytes().decode("utf-8", errors="replace")

    def texts(self, count: int) -> list[str]:
        # A vocabulary has a hundred thousand: no method calls. `skip_strings` has checked the lengths.
        view, at, unpack = self.view, self.at, _U64.unpack_from
        found = []
        for _ in range(count):
            start = at + 8
            at = start + unpack(view, at)[0]
            found.append(view[start:at])
        self.at = at
        return [text.decode("utf-8", errors="replace") for text in found]

    def name(self) -> str:
        start = self.at
        if self.scalar(_U64) > _NAME_LIMIT:
            raise _damage(self._path, "has a name that is too long")
        self.at = start
        return self.text()

    def value(self, type_id: int) -> object:
        if type_id == _STRING:
            return self.text()
        if type_id == _ARRAY:
            return self._array()
        kind = _SCALARS.get(type_id)
        if kind is None:
            raise _damage(self._path, f"has a value of the unknown type {type_id}")
        return self.scalar(kind)

    def _array(self) -> GGUFArray:
        type_id, length = self.scalar(_U32), self.scalar(_U64)
        if type_id != _STRING and type_id not in _SCALARS:
            raise _damage(self._path, f"has an array of the unknown type {type_id}")
        if length > _ELEMENTS_LIMIT:
            raise _damage(self._path, f"claims an array of {length} values")
        array = GGUFArray(self.copy(), type_id, length)
        if type_id == _STRING:
            self.skip_strings(length)
        else:
            self.take(length * _SCALARS[type_id].size)
        return array

    def skip_strings(self, count: int) -> None:
        # The only long loop of the header (a vocabulary and its merges): no method calls.
        view, size, at, unpack = self.view, self._size, self.at, _U64.unpack_from
        for _ in range(count):
            if at + 8 > size:
                break
            at += 8 + unpack(view, at)[0]
        else:
            self.at = at
            self.take(0)
            return
        raise _damage(self._path, "ends in the middle of its header")


def _check_version(path: Path, version: int) -> None:
    if version in (2, 3):
        return
    if version & 0xFFFF == 0 and version:
        raise UnsupportedModel(
            f"{path} is written for big-endian machines; use the usual little-endian version of it"
        )
    raise UnsupportedModel(
        f"{path} is GGUF version {version}, but versions 2 and 3 are read; use a newer conversion of it"
    )


def _read_metadata(path: Path, cursor: _Cursor, count: int) -> dict[str, object]:
    found: dict[str, object] = {}
    for _ in range(count):
        key = cursor.name()
        if key in found:
            raise _damage(path, f"has the key {key!r} twice")
        found[key] = cursor.value(cursor.scalar(_U32))
    return found


def _read_tensors(
    path: Path, cursor: _Cursor, count: int, metadata: Mapping[str, object]
) -> dict[str, TensorInfo]:
    described: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(count):
        name = cursor.name()
        dimensions = cursor.scalar(_U32)
        if name in described or not 1 <= dimensions <= 4:
            raise _damage(path, f"does not describe tensor {name!r}")
        shape = tuple(cursor.scalar(_U64) for _ in range(dimensions))[::-1]  # innermost first in the file
        described[name] = shape, cursor.scalar(_U32), cursor.scalar(_U64)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20:
        raise _damage(path, f"asks for an alignment of {alignment!r}")
    base = -(-cursor.at // alignment) * alignment
    return {name: _make_tensor_info(path, cursor, name, base, *fields) for name, fields in described.items()}


def _make_tensor_info(
    path: Path, cursor: _Cursor, name: str, base: int, shape: tuple[int, ...], type_id: int, offset: int
) -> TensorInfo:
    kind = STORAGE_TYPES.get(type_id)
    if kind is None:
        raise UnsupportedModel(
            f"tensor {name!r} in {path} is quantised in a way this version does not read (type {type_id}); "
            "use another quantisation of the model, such as Q4_K_M or Q8_0"
        )
    if shape[-1] % kind.block:
        raise _damage(
            path, f"gives tensor {name!r} rows of {shape[-1]} values, which {kind.name} cannot hold"
        )
    size = math.prod(shape) // kind.block * kind.block_bytes
    if base + offset + size > len(cursor.view):
        raise _damage(path, f"ends before tensor {name!r} does")
    return TensorInfo(kind, shape, base + offset, size)


def _damage(path: Path, what: str) -> ModelDamaged:
    return ModelDamaged(f"{path} {what}; download it again")

"""KV prefixes on disk, so that a long context need not be computed again after a restart.

A file holds one prefix: its model, settings and scope, its tokens, keys and values, and a checksum. A file
that is damaged or owned by another user is deleted, never used. The total size is limited; the least recently
used files are deleted first. Files are readable by their owner only, since tokens are text.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from keystroke.config import Settings
from keystroke.engine.checkpoint.digest import quick_digest
from keystroke.engine.prefix import common_prefix

log = logging.getLogger("keystroke.engine")

BLOCK = 64  # tokens; engines may store those of a block in an order of their own
WORTH_KEEPING = 256  # tokens: fewer are quickly computed again
_MAGIC = b"keystroke-kv-2\n"
_SUFFIX = ".kv"


Float32 = npt.NDArray[np.float32]


def whole_blocks(tokens: int) -> int:
    """The number of tokens in the blocks that hold the first `tokens`."""
    return -(-tokens // BLOCK) * BLOCK


class _About(msgspec.Struct, frozen=True):
    model: str  # model, precision and version of the graph
    scope: str  # a digest
    tokens: list[int]
    dtype: str
    shape: tuple[int, int, int]  # arrays, heads, width
    states: tuple[int, ...] = ()  # positions of recurrent states, which follow the arrays


@dataclass(slots=True)
class _Entry:
    file: Path
    about: _About
    body: int  # offset of the arrays


class DiskPrefixes:
    """The prefixes of one model in `folder`. `model` identifies everything that the values depend on."""

    def __init__(self, folder: Path, model: str, limit: int) -> None:
        self._folder, self._model, self._limit = folder, model, limit
        self._entries: list[_Entry] | None = None  # read on first use

    def find(self, tokens: Sequence[int], scope: str, beyond: int) -> tuple[_Entry | None, int]:
        """The prefix with the most tokens in common, if they are more than `beyond`."""
        best, length = None, beyond
        mine = _scope_digest(scope)
        for entry in self._list_entries():
            if entry.about.scope == mine:
                shared = common_prefix(entry.about.tokens, tokens)
                if entry.about.states:  # a recurrent model can only continue from one of its states
                    shared = max((at for at in entry.about.states if at <= shared), default=0)
                if shared > length and shared >= WORTH_KEEPING:
                    best, length = entry, shared
        return best, length if best is not None else 0

    def load(
        self,
        entry: _Entry,
        arrays: Sequence[np.ndarray],
        length: int,
        restore: Callable[[int, Float32], None] | None = None,
    ) -> bool:
        """Fill the first `length` tokens of `arrays`, [1, heads, capacity, width] each; `restore` is called
        with the position and content of each recurrent state up to there. Returns False, and deletes the
        file, if it is damaged."""
        try:
            data = entry.file.read_bytes()
            if hashlib.blake2b(data[:-32], digest_size=32).digest() != data[-32:]:
                raise ValueError("its checksum differs")
            count, heads, width = entry.about.shape
            first = arrays[0]
            if first.dtype.name != entry.about.dtype or first.shape[1::2] != (heads, width):
                raise ValueError("it is of another kind")
            shape = (count, heads, whole_blocks(len(entry.about.tokens)), width)
            kind = np.dtype(entry.about.dtype)
            end = entry.body + math.prod(shape) * kind.itemsize
            values = np.frombuffer(data[entry.body : end], dtype=kind).reshape(shape)
            if restore is not None:
                states = np.frombuffer(data[end:-32], np.float32).reshape(len(entry.about.states), -1)
                for at, state in zip(entry.about.states, states, strict=True):
                    if at <= length:
                        restore(at, state)
            elif len(data) != end + 32:
                raise ValueError("it has another size")
            for array, value in zip(arrays, values, strict=True):
                array[0, :, : whole_blocks(length)] = value[:, : whole_blocks(length)]
            os.utime(entry.file)
        except (OSError, ValueError) as error:
            log.warning("a KV prefix on disk was not usable and is deleted: %s", error)
            self._delete(entry)
            return False
        return True

    def save(
        self,
        tokens: Sequence[int],
        arrays: Sequence[np.ndarray],
        scope: str,
        states: Mapping[int, Sequence[Float32]] | None = None,
    ) -> None:
        """Write one prefix; of a recurrent model with its `states` by position. Errors are logged and
        ignored."""
        if len(tokens) < WORTH_KEEPING or states == {}:
            return
        held, first = whole_blocks(len(tokens)), arrays[0]
        parts_of_states = [array for each in (states or {}).values() for array in each]
        about = _About(
            self._model,
            _scope_digest(scope),
            list(tokens),
            first.dtype.name,
            (len(arrays), first.shape[1], first.shape[3]),
            tuple(states or ()),
        )
        head = _make_header(about)
        size = len(head) + held * sum(a[:, :, :1].nbytes for a in arrays) + 32
        size += sum(array.nbytes for array in parts_of_states)
        if size > self._limit:
            return
        for entry in self._list_entries():  # delete shorter prefixes of it
            if entry.about.scope == about.scope and common_prefix(entry.about.tokens, tokens) == len(
                entry.about.tokens
            ):
                self._delete(entry)
        name = hashlib.blake2b(head, digest_size=16).hexdigest()
        file, draft = self._folder / f"{name}{_SUFFIX}", self._folder / f"{name}.{os.getpid()}.tmp"
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._make_room(size)
            with open(draft, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as out:
                total = hashlib.blake2b(digest_size=32)
                parts = itertools.chain(
                    [head],
                    (np.ascontiguousarray(array[0, :, :held]).tobytes() for array in arrays),
                    (array.tobytes() for array in parts_of_states),
                )
                for part in parts:
                    total.update(part)
                    out.write(part)
                out.write(total.digest())
            os.replace(draft, file)
            self._list_entries().append(_Entry(file, about, len(head)))
        except OSError as error:
            log.warning("a KV prefix could not be written to disk: %s", error.strerror)
            draft.unlink(missing_ok=True)

    def _list_entries(self) -> list[_Entry]:
        if self._entries is None:
            self._entries = []
            for file in sorted(self._folder.glob(f"*{_SUFFIX}")):
                entry = self._read_entry(file)
                if entry is not None:
                    self._entries.append(entry)
        return self._entries

    def _read_entry(self, file: Path) -> _Entry | None:
        """The entry of a file; None for another model's file, which stays."""
        try:
            own = not hasattr(os, "getuid") or file.stat().st_uid == os.getuid()
            with file.open("rb") as stream:
                if not own or stream.read(len(_MAGIC)) != _MAGIC:
                    raise ValueError
                size = int.from_bytes(stream.read(8), "big")
                if size > 64 << 20:
                    raise ValueError
                about = msgspec.msgpack.decode(stream.read(size), type=_About)
        except (OSError, ValueError, msgspec.DecodeError):
            file.unlink(missing_ok=True)
            return None
        return _Entry(file, about, len(_MAGIC) + 8 + size) if about.model == self._model else None

    def _make_room(self, size: int) -> None:
        """Delete the least recently used files. All models share the folder and its limit."""
        files = sorted(self._folder.glob(f"*{_SUFFIX}"), key=lambda f: f.stat().st_mtime)
        held = sum(file.stat().st_size for file in files)
        for file in files:
            if held + size <= self._limit:
                return
            held -= file.stat().st_size
            file.unlink(missing_ok=True)
            self._entries = [entry for entry in self._list_entries() if entry.file != file]

    def _delete(self, entry: _Entry) -> None:
        entry.file.unlink(missing_ok=True)
        self._entries = [other for other in self._list_entries() if other is not entry]


def prefixes_of_model(path: Path, how: str, settings: Settings) -> DiskPrefixes | None:
    """The prefixes of a model that is run as `how` says: everything that values depend on besides the weights
    and the processor. None if settings turn them off."""
    limit = settings.engine.prefix_disk_mb << 20
    if not limit:
        return None
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    model = f"{quick_digest(files)}/{how}/{platform.machine()}"
    return DiskPrefixes(settings.paths.cache / "prefixes", model, limit)


def _make_header(about: _About) -> bytes:
    header = msgspec.msgpack.encode(about)
    return _MAGIC + len(header).to_bytes(8, "big") + header


def _scope_digest(scope: str) -> str:
    return hashlib.blake2b(scope.encode(), digest_size=16).hexdigest()

"""Hashes of big files: a quick one that samples, a full one that reads everything.

Equal content gives equal digests, wherever the files lie and whatever the folder is called.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from keystroke.engine.checkpoint.spec import Progress

_EDGE = 1 << 20  # read whole at both ends: headers, vocabulary and the last tensors live there
_BLOCK = 1 << 16
_SAMPLES = 64


def quick_digest(paths: Sequence[Path]) -> str:
    """SHA-256 over each file's size, both ends and `_SAMPLES` blocks spread evenly between them."""
    total = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        total.update(f"{path.name if path.suffix == '.json' else ''}:{size};".encode())
        with path.open("rb") as file:
            for start, length in _sampled(size):
                file.seek(start)
                total.update(file.read(length))
    return total.hexdigest()


def full_digest(paths: Sequence[Path], progress: Progress | None = None) -> str:
    total = hashlib.sha256()
    size = sum(path.stat().st_size for path in paths)
    done = 0
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(_EDGE * 4):
                total.update(block)
                done += len(block)
                if progress:
                    progress(done, size)
    return total.hexdigest()


def _sampled(size: int) -> Iterator[tuple[int, int]]:
    if size <= 2 * _EDGE + _SAMPLES * _BLOCK:
        yield 0, size
        return
    yield 0, _EDGE
    middle = size - 2 * _EDGE - _BLOCK
    for sample in range(_SAMPLES):
        yield _EDGE + middle * sample // (_SAMPLES - 1), _BLOCK
    yield size - _EDGE, _EDGE

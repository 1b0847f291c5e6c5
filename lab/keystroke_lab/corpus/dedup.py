"""Near-duplicate detection by MinHash over pairs of neighbouring lines.

The first of a group of near-copies is kept. One hash per line pair and one permutation (bins of the hash's
range) make a signature, so a file costs about as much as reading it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Signature = NDArray[np.uint32]
LineHashes = NDArray[np.uint64]

BINS = 128
BANDS = 16  # of 8 bins: two files meet in one band with probability one half at a similarity near 0.7
SIMILAR = 0.7


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A finaliser that spreads every input bit over the output (splitmix64's constants)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def line_hashes(text: str) -> LineHashes:
    """One number for each line of more than a character; indentation does not count."""
    lines = [line for raw in text.encode().split(b"\n") if len(line := raw.strip()) > 1]
    return np.fromiter(map(zlib.crc32, lines), dtype=np.uint64, count=len(lines))


def signature(text: str) -> Signature:
    """The text's MinHash: similar texts agree in about their Jaccard similarity's share of bins."""
    return signature_of(line_hashes(text))


def signature_of(hashes: LineHashes) -> Signature:
    """`signature` of a text whose lines are hashed already."""
    if len(hashes) > 1:
        hashes = (hashes[:-1] << np.uint64(32)) | hashes[1:]
    elif not len(hashes):
        hashes = np.zeros(1, dtype=np.uint64)
    mixed = _mixed(hashes)
    empty = np.uint32(0xFFFFFFFF)
    found = np.full(BINS, empty, dtype=np.uint32)
    np.minimum.at(
        found, (mixed >> np.uint64(57)).astype(np.int64), (mixed & np.uint64(0xFFFFFFFE)).astype(np.uint32)
    )
    # An empty bin borrows from the next filled one, changed by the distance, so that only equal texts
    # borrow equally.
    filled = np.flatnonzero(found != empty)
    where = np.searchsorted(filled, np.arange(BINS))
    source = filled[where % len(filled)]
    distance = ((source - np.arange(BINS)) % BINS).astype(np.uint32)
    return found[source] + distance * np.uint32(0x9E3779B1)


def similarity(a: Signature, b: Signature) -> float:
    return float(np.mean(a == b))


class Deduplicator:
    """Remembers what it was shown and says whether a text is new."""

    def __init__(self, known: NDArray[np.uint32] | None = None) -> None:
        """`known`: the `signatures()` of an earlier one, to continue from."""
        self._bands: list[dict[bytes, int]] = [{} for _ in range(BANDS)]
        self._kept: list[Signature] = []
        for mine in known if known is not None else ():
            self._keep(mine)

    def is_new(self, text: str) -> bool:
        """Whether no text shown and kept before is nearly this one. A new text is remembered."""
        return self.is_new_signature(signature(text))

    def is_new_signature(self, mine: Signature) -> bool:
        """`is_new` of a text that is known by its signature."""
        for table, key in zip(self._bands, _keys(mine), strict=True):
            rival = table.get(key)
            if rival is not None and similarity(mine, self._kept[rival]) >= SIMILAR:
                return False
        self._keep(mine)
        return True

    def remember(self, text: str) -> None:
        """Take the text as kept without comparing it."""
        self._keep(signature(text))

    def _keep(self, mine: Signature) -> None:
        for table, key in zip(self._bands, _keys(mine), strict=True):
            table.setdefault(key, len(self._kept))
        self._kept.append(mine)

    def signatures(self) -> NDArray[np.uint32]:
        """What is remembered, in order: [texts, BINS]."""
        return np.array(self._kept, dtype=np.uint32).reshape(len(self._kept), BINS)


def _keys(mine: Signature) -> list[bytes]:
    return [band.tobytes() for band in mine.reshape(BANDS, -1)]


def unique(texts: Iterable[str]) -> list[int]:
    """Indices of the texts to keep."""
    seen = Deduplicator()
    return [i for i, text in enumerate(texts) if seen.is_new(text)]

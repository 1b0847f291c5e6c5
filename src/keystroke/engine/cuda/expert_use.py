"""Which experts a GPU holds follows use: the profile of a model is kept across loads, and experts may be
exchanged between turns.

A profile is how often each expert of each layer was chosen; old counts weigh half as much after each load.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

Uses = npt.NDArray[np.int64]  # [layers, experts]
_GAIN = 1.25  # an expert is exchanged for one that was used so many times as often,
_LEAST = 8  # and at least so many times more


def hottest(uses: Uses | None, layers: int, held: int) -> list[list[int]]:
    """The `held` experts of each layer that were used most; the first ones without a profile."""
    if uses is None:
        return [list(range(held)) for _ in range(layers)]
    return [sorted(np.argsort(-row, kind="stable")[:held].tolist()) for row in uses]


def exchanges(uses: Uses, resident: Sequence[Sequence[int]], most: int) -> list[tuple[int, int, int]]:
    """Up to `most` exchanges (layer, position, expert) that put experts used more in place of those used
    less, those that gain most first."""
    found: list[tuple[int, int, int, int]] = []
    for layer, (row, held) in enumerate(zip(uses, resident, strict=True)):
        absent = sorted(set(range(len(row))) - set(held), key=lambda expert: -row[expert])
        positions = sorted(range(len(held)), key=lambda position: row[held[position]])
        for expert, position in zip(absent, positions, strict=False):
            hot, cold = int(row[expert]), int(row[held[position]])
            if hot < cold * _GAIN or hot < cold + _LEAST:
                break
            found.append((hot - cold, layer, position, expert))
    found.sort(key=lambda each: -each[0])
    return [(layer, position, expert) for _, layer, position, expert in found[:most]]


def read_profile(path: Path, layers: int, experts: int) -> Uses | None:
    """The profile in a file; None if there is none of this shape."""
    try:
        found: Uses = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    if found.shape != (layers, experts) or found.dtype != np.int64 or int(found.min(initial=0)) < 0:
        return None
    halved: Uses = found // 2
    return halved


def write_profile(path: Path, uses: Uses) -> None:
    """Never raises OSError: a profile is only a guess of what will be used."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.npy")
        np.save(partial, uses)
        partial.replace(path)
    except OSError:
        pass

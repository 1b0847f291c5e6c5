"""Token sequences on disk: prompts, the target's answers, and excerpts of code.

A file is one compressed numpy archive. A text is its tokens, how many of them were given (the target
generated the rest), its kind, and how its tokens were chosen. A damaged file is an error that names it.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from keystroke.errors import InputError

SUFFIX = ".npz"


@dataclass(frozen=True, slots=True)
class TokenText:
    tokens: NDArray[np.int32]
    given: int  # the first tokens, which the target did not write
    kind: str
    temperature: float = 0.0
    seed: int = 0

    @property
    def written(self) -> int:
        return len(self.tokens) - self.given


def write_texts(path: Path, texts: Iterable[TokenText]) -> None:
    every = list(texts)
    kinds = sorted({text.kind for text in every})
    lengths = np.array([len(text.tokens) for text in every], np.int32)
    flat = np.concatenate([text.tokens for text in every]) if every else np.zeros(0, np.int32)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as stream:
        np.savez_compressed(
            stream,
            low=(flat & 0xFFFF).astype(np.uint16),  # halves pack far better apart
            high=(flat >> 16).astype(np.uint8),
            lengths=lengths,
            given=np.array([text.given for text in every], np.int32),
            kinds=np.array(kinds),
            kind=np.array([kinds.index(text.kind) for text in every], np.uint8),
            temperature=np.array([text.temperature for text in every], np.float32),
            seed=np.array([text.seed for text in every], np.int64),
        )
    os.replace(partial, path)


def read_texts(path: Path) -> list[TokenText]:
    """Raises InputError where `path` is not a piece of texts."""
    try:
        with np.load(path, allow_pickle=False) as held:
            flat = held["low"].astype(np.int32) | (held["high"].astype(np.int32) << 16)
            ends = np.cumsum(held["lengths"])
            kinds = [str(kind) for kind in held["kinds"]]
            if len(flat) != (int(ends[-1]) if len(ends) else 0):
                raise ValueError("its lengths do not add up")
            columns = (held["given"], held["kind"], held["temperature"], held["seed"])
            return [
                TokenText(flat[end - size : end], int(given), kinds[kind], float(temperature), int(seed))
                for end, size, given, kind, temperature, seed in zip(
                    ends, held["lengths"], *columns, strict=True
                )
            ]
    except (OSError, EOFError, ValueError, KeyError, IndexError, zipfile.BadZipFile) as error:
        raise InputError(f"{path} is not a piece of texts ({error}); write it again") from error


def read_folder(folder: Path) -> Iterator[TokenText]:
    """Every text of the folder's pieces, in the order of their names."""
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        yield from read_texts(path)

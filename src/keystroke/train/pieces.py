"""The corpus on disk as training reads it: compressed pieces of whole projects.

A piece is JSON lines under bzip2 (source code packs nearly as small as under xz, eight times as
fast), each line one file. It can be sent, read and transformed on its own. Damage is an error that names
the piece.
"""

from __future__ import annotations

import bz2
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from keystroke.errors import InputError
from keystroke.train.documents import Source

SUFFIX = ".jsonl.bz2"


def write_piece(path: Path, sources: Iterable[Source]) -> int:
    """Write one piece; its size in bytes."""
    partial = path.with_name(path.name + ".partial")
    with bz2.open(partial, "wt", encoding="utf-8") as stream:
        for source in sources:
            stream.write(json.dumps([source.project, source.path, source.text], ensure_ascii=False) + "\n")
    os.replace(partial, path)
    return path.stat().st_size


def read_piece(path: Path) -> list[Source]:
    try:
        with bz2.open(path, "rt", encoding="utf-8") as stream:
            return [Source(*json.loads(line)) for line in stream]
    except (OSError, EOFError, ValueError, TypeError) as error:
        raise InputError(f"{path} is not a piece of the corpus ({error}); build the corpus again") from error


def piece_paths(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.glob(f"*{SUFFIX}"))

"""The corpus on disk as training reads it: compressed shards of whole projects.

A shard is bzip2-compressed JSON lines, one file a line (nearly as small as xz and eight times as fast to
write). It can be sent, read and transformed on its own. A damaged shard is an error that names it.
"""

from __future__ import annotations

import bz2
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from keystroke.errors import InputError
from keystroke_lab.pretraining.documents import SourceText

SUFFIX = ".jsonl.bz2"


def write_shard(path: Path, sources: Iterable[SourceText]) -> int:
    """Write one piece; its size in bytes."""
    partial = path.with_name(path.name + ".partial")
    with bz2.open(partial, "wt", encoding="utf-8") as stream:
        for source in sources:
            stream.write(json.dumps([source.project, source.path, source.text], ensure_ascii=False) + "\n")
    os.replace(partial, path)
    return path.stat().st_size


def read_shard(path: Path) -> list[SourceText]:
    try:
        with bz2.open(path, "rt", encoding="utf-8") as stream:
            return [SourceText(*json.loads(line)) for line in stream]
    except (OSError, EOFError, ValueError, TypeError) as error:
        raise InputError(f"{path} is not a piece of the corpus ({error}); build the corpus again") from error


def shard_paths(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.glob(f"*{SUFFIX}"))

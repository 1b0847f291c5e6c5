"""Code to make prompts from: corpus shards, or plain folders of source files.

Never follows links out of a folder, and reads only files of known languages and a bounded size. The caller is
responsible for licences; a corpus of `keystroke train corpus` holds permissive ones only.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from keystroke.errors import NotFound
from keystroke_lab.corpus.shards import read_shard, shard_paths
from keystroke_lab.draft_heads.definitions import knows
from keystroke_lab.pretraining.documents import SourceText

_SMALLEST, _LARGEST = 200, 200_000  # bytes


def source_texts(folders: Sequence[Path]) -> list[SourceText]:
    """Every source file of the folders. Raises NotFound for one that is not there."""
    found: list[SourceText] = []
    for folder in folders:
        if not folder.is_dir():
            raise NotFound(f"there is no folder {folder}; name one with source files or corpus pieces")
        pieces = list(shard_paths(folder))
        if pieces:
            found += [source for piece in pieces for source in read_shard(piece) if knows(source.path)]
        else:
            found += _plain(folder)
    return found


def _plain(folder: Path) -> list[SourceText]:
    found = []
    for path in sorted(folder.rglob("*")):
        if not knows(path.name) or path.is_symlink() or not path.is_file():
            continue
        if not _SMALLEST <= path.stat().st_size <= _LARGEST:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError):
            continue  # not text, or not ours to read: one file fewer
        found.append(SourceText(folder.name, str(path.relative_to(folder)), text))
    return found

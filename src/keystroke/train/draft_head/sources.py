"""Code to make asks from: corpus pieces, or plain folders of source files.

Reads, never follows links out of a folder, and takes only files of languages it knows and of a sensible
size. Licences are the caller's business: a corpus made by `keystroke train corpus` holds permissive ones
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from keystroke.errors import NotFound
from keystroke.train.documents import Source
from keystroke.train.draft_head.definitions import knows
from keystroke.train.pieces import piece_paths, read_piece

_SMALLEST, _LARGEST = 200, 200_000  # bytes


def code_in(folders: Sequence[Path]) -> list[Source]:
    """Every source file of the folders. Raises NotFound for one that is not there."""
    found: list[Source] = []
    for folder in folders:
        if not folder.is_dir():
            raise NotFound(f"there is no folder {folder}; name one with source files or corpus pieces")
        pieces = list(piece_paths(folder))
        if pieces:
            found += [source for piece in pieces for source in read_piece(piece) if knows(source.path)]
        else:
            found += _plain(folder)
    return found


def _plain(folder: Path) -> list[Source]:
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
        found.append(Source(folder.name, str(path.relative_to(folder)), text))
    return found

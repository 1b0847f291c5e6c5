"""Edit trajectories on disk: one JSON line for each file that changed between two releases.

Needs only the standard library, so a machine that only trains can read it. A damaged file is an error that
names it.
"""

from __future__ import annotations

import bz2
import gzip
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Literal

from keystroke.errors import InputError
from keystroke_lab.corpus.hunks import EditHunk, Trajectory


@dataclass(frozen=True, slots=True)
class FileEdit:
    """A file of `project` on its way from one release to the next; see `Hunk` for what the numbers mean."""

    project: str
    licence: str
    release_from: str
    release_to: str
    path: str
    before: str
    hunks: list[EditHunk]

    def after(self) -> str:
        return Trajectory(self.before, self.hunks).after()

    @property
    def changed(self) -> str:
        """The changed lines alone: what two edits are compared by."""
        return "\n".join("\n".join((*h.old, "=>", *h.new)) for h in self.hunks)


def _open(path: Path, mode: Literal["rt", "wt"]) -> IO[str]:
    packed = ".bz2" in path.suffixes
    return bz2.open(path, mode, encoding="utf-8") if packed else gzip.open(path, mode, encoding="utf-8")


def write_edits(path: Path, edits: Iterable[FileEdit]) -> int:
    """Write the edits, compressed as the name says (.gz or .bz2); the size in bytes."""
    partial = path.with_name(path.name + ".partial")
    with _open(partial, "wt") as stream:
        for edit in edits:
            stream.write(json.dumps(asdict(edit), ensure_ascii=False) + "\n")
    os.replace(partial, path)
    return path.stat().st_size


def read_edits(path: Path) -> list[FileEdit]:
    try:
        with _open(path, "rt") as stream:
            rows = [json.loads(line) for line in stream]
        return [FileEdit(**{**row, "hunks": [EditHunk(**hunk) for hunk in row["hunks"]]}) for row in rows]
    except (OSError, EOFError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path} holds no edits ({error}); delete it and collect them again") from error

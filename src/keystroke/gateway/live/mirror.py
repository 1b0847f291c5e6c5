"""The gateway's copy of one open buffer's text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from keystroke.text import Edit, apply_edits


class BufferLocation(NamedTuple):
    """The buffer's file and workspace; None where it has no file, or none that may be read."""

    path: Path | None = None
    root: Path | None = None


NOWHERE = BufferLocation()


@dataclass(slots=True)
class BufferMirror:
    """`path` is relative to `root`, the workspace's folder; both are None where the client named none.
    `location`: what of it may be read."""

    name: str
    text: str
    version: int
    cursor: int = 0
    language: str | None = None
    path: str | None = None
    root: str | None = None
    location: BufferLocation = NOWHERE

    def apply_edits(self, edits: Sequence[Edit], version: int) -> str:
        """Apply edits one after another; returns the text before them. Raises InputError, with nothing
        changed, for an edit outside the text."""
        before = text = self.text
        for edit in edits:
            text = apply_edits(text, (edit,))
        self.text, self.version = text, version
        return before

"""A change requested of a model for texts in memory, and the resulting proposal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from keystroke.assist.edit.operations import EditFailure
from keystroke.assist.edit.rewrite import Region
from keystroke.errors import InputError
from keystroke.text import Edit, minimal_diff


@dataclass(frozen=True, slots=True)
class EditProposal:
    """New texts by path (None: remove the file), or failures. `answer` is the model's last answer."""

    files: Mapping[str, str]
    answer: str
    texts: Mapping[str, str | None] = field(default_factory=dict)
    moves: Mapping[str, str] = field(default_factory=dict)
    failures: tuple[EditFailure, ...] = ()
    answers: tuple[str, ...] = ()

    def edits(self, path: str) -> tuple[Edit, ...]:
        """The smallest edits of one of the files."""
        after = self.texts.get(path, self.files.get(path, ""))
        return minimal_diff(self.files.get(path, ""), after or "")


@dataclass(frozen=True, slots=True)
class EditTask:
    """Texts by path and an instruction. With a `region` only those lines may change. Raises InputError for an
    empty instruction, no files, or a region of another file."""

    files: Mapping[str, str]
    instruction: str
    region: Region | None = None
    rules: str = ""
    near: tuple[str, int] | None = None  # the file and line (from 0) of the cursor

    def __post_init__(self) -> None:
        if not self.instruction.strip():
            raise InputError("the instruction is empty; say what to change")
        if not self.files:
            raise InputError("no file was given; name at least one")
        if self.region is not None and self.region.path not in self.files:
            raise InputError(f"the region's file {self.region.path} is not among the files given")

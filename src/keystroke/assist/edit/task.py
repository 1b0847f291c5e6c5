"""A change asked of a model, for texts in memory: what is asked, and what came of it.

Values only. No disk, no model: the ladder asks the questions, and whoever drives it has the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from keystroke.assist.edit.operations import Failure
from keystroke.assist.edit.rewrite import Region
from keystroke.errors import InputError
from keystroke.text import Edit, minimal_diff


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a model proposes for some texts: new ones by path (None: remove it), or why there are none.
    `answer` is the last thing it wrote, `answers` all of them."""

    files: Mapping[str, str]
    answer: str
    texts: Mapping[str, str | None] = field(default_factory=dict)
    moves: Mapping[str, str] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    answers: tuple[str, ...] = ()

    def edits(self, path: str) -> tuple[Edit, ...]:
        """The smallest edits of one of the files."""
        after = self.texts.get(path, self.files.get(path, ""))
        return minimal_diff(self.files.get(path, ""), after or "")


@dataclass(frozen=True, slots=True)
class EditTask:
    """Texts by path, and what to do with them. With a `region` only those lines may change. Raises InputError
    where there is nothing to do or nothing to do it to."""

    files: Mapping[str, str]
    instruction: str
    region: Region | None = None
    rules: str = ""
    near: tuple[str, int] | None = None  # a file and a line (from 0): where the user's cursor stands

    def __post_init__(self) -> None:
        if not self.instruction.strip():
            raise InputError("the instruction is empty; say what to change")
        if not self.files:
            raise InputError("no file was given; name at least one")
        if self.region is not None and self.region.path not in self.files:
            raise InputError(f"the region's file {self.region.path} is not among the files given")

"""Diagnostics of a text and their checked fixes. Offsets are indices into the checked text."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from keystroke.text import Edit


class Level(StrEnum):
    ERROR = "error"  # it will fail when it runs
    WARNING = "warning"  # it probably fails, or is not intended
    HINT = "hint"

    @property
    def rank(self) -> int:
        return list(Level)[::-1].index(self)


@dataclass(frozen=True, slots=True)
class Fix:
    """Edits that were applied and checked: the diagnostic is gone and there is no new one."""

    title: str
    edits: tuple[Edit, ...]


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """`subject` is the name as written; `context` the module or class it belongs to."""

    code: str
    level: Level
    message: str
    start: int
    end: int
    subject: str = ""
    context: str = ""
    fixes: tuple[Fix, ...] = ()

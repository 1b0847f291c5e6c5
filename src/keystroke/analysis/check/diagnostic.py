"""What is wrong with a text: where, how bad, and the edits that were proved to mend it.

Pure values; offsets are indices into the text that was checked. A `Fix` here has been tried: applied
to the text it belongs to, its diagnostic is gone and nothing worse has come.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from keystroke.text import Edit


class Level(StrEnum):
    ERROR = "error"  # it will fail when it runs
    WARNING = "warning"  # it probably fails, or is not meant
    HINT = "hint"

    @property
    def rank(self) -> int:
        return list(Level)[::-1].index(self)


@dataclass(frozen=True, slots=True)
class Fix:
    """Edits that were applied and checked: the diagnostic is gone and no other has come."""

    title: str
    edits: tuple[Edit, ...]


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """`subject` is the name it is about, as written; `context` what that belongs to (a module, a class)."""

    code: str
    level: Level
    message: str
    start: int
    end: int
    subject: str = ""
    context: str = ""
    fixes: tuple[Fix, ...] = ()

"""A finding of a review. `start` and `end` are offsets in the file's new text, `line` and `column` count from
1."""

from __future__ import annotations

from dataclasses import dataclass

from keystroke.analysis.audit import Severity
from keystroke.text import Edit


@dataclass(frozen=True, slots=True)
class ReviewFix:
    """Edits that remove the finding; the text still parses."""

    title: str
    edits: tuple[Edit, ...]


@dataclass(frozen=True, slots=True)
class ReviewFinding:
    source: str  # check, audit, ruff, model
    code: str
    severity: Severity
    message: str
    path: str
    line: int
    column: int
    start: int
    end: int
    fix: ReviewFix | None = None

    @property
    def subject(self) -> tuple[str, int, str]:
        """Equal for findings of two tools about the same fault."""
        return self.path, self.line, SAME.get(self.code, self.code)


# Codes of ruff and the equivalent codes of our own check.
SAME = {
    "F401": "unused-import",
    "F541": "useless-f-prefix",
    "F632": "is-literal",
    "F811": "redefined-unused",
    "F821": "undefined-name",
    "F823": "undefined-local",
    "F841": "unused-variable",
    "F601": "repeated-key",
    "E999": "syntax-error",
    "invalid-syntax": "syntax-error",
}

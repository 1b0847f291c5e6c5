"""The results of an audit: findings, positions and the edits that fix them. Offsets count characters."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from keystroke.text import Edit, shift


class Severity(StrEnum):
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"
    CRITICAL = "critical"

    @property
    def rank(self) -> int:
        return list(Severity).index(self)


class FixGrade(StrEnum):
    SAFE = "safe"  # applied by --fix
    SUGGESTION = "suggestion"  # shown with what it may change, never applied in bulk
    NONE = "none"


@dataclass(frozen=True, slots=True)
class AuditFix:
    """Edits after which the rule no longer matches here and the text parses no worse."""

    title: str
    edits: tuple[Edit, ...]
    changes: str = ""  # of a suggestion: what it may change besides the weakness

    def move_by(self, by: int) -> AuditFix:
        return AuditFix(self.title, tuple(shift(edit, by) for edit in self.edits), self.changes)


@dataclass(frozen=True, slots=True)
class Finding:
    """One weakness: its rule, its span in the text and the fixes for it."""

    rule: str
    cwe: int
    severity: Severity
    message: str
    start: int
    end: int
    origin: str = ""  # where the data comes from: "request.args.get()"
    fixes: tuple[AuditFix, ...] = field(default=())  # may be applied without review
    also: tuple[int, ...] = ()  # broader or narrower CWE numbers of the same weakness
    suggestions: tuple[AuditFix, ...] = ()  # need a review before they are applied

    @property
    def grade(self) -> FixGrade:
        return FixGrade.SAFE if self.fixes else FixGrade.SUGGESTION if self.suggestions else FixGrade.NONE

    @property
    def cwes(self) -> tuple[int, ...]:
        """All CWE numbers, the most specific first."""
        return (self.cwe, *(number for number in self.also if number != self.cwe))

    def move_by(self, by: int) -> Finding:
        if not by:
            return self
        return replace(
            self,
            start=self.start + by,
            end=self.end + by,
            fixes=tuple(fix.move_by(by) for fix in self.fixes),
            suggestions=tuple(fix.move_by(by) for fix in self.suggestions),
        )

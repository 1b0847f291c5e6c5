"""What an audit says: a finding, where it is, and the edits that would silence it.

Pure values, offsets are indices into the audited text. Nothing here knows how a finding was made.
"""

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


@dataclass(frozen=True, slots=True)
class Fix:
    """Edits under which the rule is silent at this place and the text parses as before."""

    title: str
    edits: tuple[Edit, ...]

    def move_by(self, by: int) -> Fix:
        return Fix(self.title, tuple(shift(edit, by) for edit in self.edits))


@dataclass(frozen=True, slots=True)
class Finding:
    """One weakness: its rule, where it stands in characters of the text, and the fixes that end it."""

    rule: str
    cwe: int
    severity: Severity
    message: str
    start: int
    end: int
    origin: str = ""  # where the data comes from, in words: "request.args.get()"
    fixes: tuple[Fix, ...] = field(default=())  # of kinds that are right: may be applied without a look
    also: tuple[int, ...] = ()  # other CWE numbers that name the same weakness more or less narrowly
    suggestions: tuple[Fix, ...] = ()  # the direction is known, the rest is for a person to say

    @property
    def cwes(self) -> tuple[int, ...]:
        """Every CWE number that describes it, the closest first."""
        return (self.cwe, *(number for number in self.also if number != self.cwe))

    def move_by(self, by: int) -> Finding:
        """The same finding `by` characters further on."""
        if not by:
            return self
        return replace(
            self,
            start=self.start + by,
            end=self.end + by,
            fixes=tuple(fix.move_by(by) for fix in self.fixes),
            suggestions=tuple(fix.move_by(by) for fix in self.suggestions),
        )

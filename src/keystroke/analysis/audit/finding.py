"""What an audit says: a finding, where it is, and the edits that would silence it.

Law: pure values, offsets are indices into the audited text. Nothing here knows how a finding was made.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from keystroke.text import Edit


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
    """Edits proved to silence the rule at this place without breaking the parse."""

    title: str
    edits: tuple[Edit, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """One weakness: its rule, where it stands in characters of the text, and fixes proved to end it."""

    rule: str
    cwe: int
    severity: Severity
    message: str
    start: int
    end: int
    origin: str = ""  # where the data comes from, in words: "request.args.get()"
    fixes: tuple[Fix, ...] = field(default=())
    also: tuple[int, ...] = ()  # other CWE numbers that name the same weakness more or less narrowly

    @property
    def cwes(self) -> tuple[int, ...]:
        """Every CWE number that describes it, the closest first."""
        return (self.cwe, *(number for number in self.also if number != self.cwe))

    def moved(self, by: int) -> Finding:
        """The same finding `by` characters further on."""
        if not by:
            return self
        fixes = tuple(
            Fix(fix.title, tuple(Edit(edit.start + by, edit.end + by, edit.text) for edit in fix.edits))
            for fix in self.fixes
        )
        return replace(self, start=self.start + by, end=self.end + by, fixes=fixes)

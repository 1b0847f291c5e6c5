"""Fixes on their way from the unit they were built in to the file they are offered for.

An offer holds edits of its unit and what the file must import. Placed, it is a `Fix` of the whole text:
moved there, with the imports it needs and without those it made unused_imports.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from keystroke.analysis.audit.finding import AuditFix, Finding
from keystroke.analysis.audit.fixes.imports import bound_name, import_edit, unused_imports
from keystroke.analysis.audit.source.units import FileOutline
from keystroke.errors import InputError
from keystroke.text import Edit, apply_edits, shift


@dataclass(frozen=True, slots=True)
class UnitFix:
    title: str
    edits: tuple[Edit, ...]
    needs: tuple[str, ...]
    changes: str = ""  # what it may change; a safe fix has none

    def move_by(self, by: int) -> UnitFix:
        return UnitFix(self.title, tuple(shift(edit, by) for edit in self.edits), self.needs, self.changes)

    def from_outline(self, outline: FileOutline, text: str) -> UnitFix | None:
        """The fix with offsets of the text instead of the outline; None if it spans a unit."""
        edits = [
            Edit(outline.origin(edit.start), outline.origin(edit.start) + edit.end - edit.start, edit.text)
            for edit in self.edits
        ]
        same = all(
            text[new.start : new.end] == outline.text[old.start : old.end]
            for new, old in zip(edits, self.edits, strict=True)
        )
        return UnitFix(self.title, tuple(edits), self.needs, self.changes) if same else None


def with_fixes(
    finding: Finding, unit_fixes: Iterable[UnitFix], text: str, language: str, known: Iterable[str]
) -> Finding:
    """The finding with its fixes and suggestions as edits of `text`; `known` are the file's names."""
    fixes: list[AuditFix] = []
    suggestions: list[AuditFix] = []
    names = set(known)
    for unit_fix in unit_fixes:
        fix = place_fix(unit_fix, text, language, names)
        if fix is not None:
            (suggestions if unit_fix.changes else fixes).append(fix)
    if not fixes and not suggestions:
        return finding
    return replace(finding, fixes=tuple(fixes), suggestions=tuple(suggestions))


def place_fix(unit_fix: UnitFix, text: str, language: str, names: set[str]) -> AuditFix | None:
    """The fix for the whole file; None if its edits conflict."""
    added: list[Edit] = []
    for need in unit_fix.needs:
        if language == "python" and bound_name(need, language) in names:
            continue
        edit = import_edit(text, language, need)
        if edit is not None:
            added.append(edit)
    edits = (*added, *unit_fix.edits)
    if language == "go":
        try:
            after = apply_edits(text, edits)
        except InputError:
            return None
        for gone in unused_imports(text, after):
            back = _before(gone, edits)
            if back is None:
                return None
            edits = (*edits, back)
    if "\r\n" in text:
        edits = tuple(Edit(edit.start, edit.end, _LINE.sub("\r\n", edit.text)) for edit in edits)
    ordered = tuple(sorted(edits, key=lambda edit: (edit.start, edit.end)))
    return AuditFix(unit_fix.title, ordered, unit_fix.changes)


_LINE = re.compile(r"\r?\n")


def _before(edit: Edit, edits: Iterable[Edit]) -> Edit | None:
    """Converts an edit of the text after `edits` to one of the text before; None if they overlap."""
    moved = 0
    for other in sorted(edits, key=lambda item: (item.start, item.end)):
        if other.start + moved + len(other.text) <= edit.start:
            moved += other.delta
        elif other.start + moved < edit.end:
            return None
    return Edit(edit.start - moved, edit.end - moved, edit.text)

"""Findings as text, JSON and SARIF 2.1.0. Lines and columns count from 1."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from keystroke.analysis.audit.finding import AuditFix, Finding, FixGrade, Severity
from keystroke.analysis.audit.fixes.imports import unused_imports
from keystroke.analysis.audit.rules.catalog import Rule, all_rules
from keystroke.analysis.audit.source.suppress import UNEXPLAINED
from keystroke.text import Edit, apply_edits

_LEVELS = {
    Severity.LOW: "note",
    Severity.MEDIUM: "warning",
    Severity.HIGH: "error",
    Severity.CRITICAL: "error",
}
_SCORES = {Severity.LOW: "3.0", Severity.MEDIUM: "5.5", Severity.HIGH: "8.0", Severity.CRITICAL: "9.5"}


@dataclass(frozen=True, slots=True)
class AuditedFile:
    """A file's text and its findings."""

    path: str
    text: str
    findings: tuple[Finding, ...]

    def line_and_column(self, offset: int) -> tuple[int, int]:
        before = self.text.rfind("\n", 0, offset)
        return self.text.count("\n", 0, offset) + 1, offset - before


def as_text(files: Sequence[AuditedFile]) -> list[str]:
    lines: list[str] = []
    for file in files:
        for finding in file.findings:
            line, column = file.line_and_column(finding.start)
            origin = f" [from {finding.origin}]" if finding.origin else ""
            fix = _offer(finding)
            lines.append(
                f"{file.path}:{line}:{column}: {finding.severity.value} {finding.rule} (CWE-{finding.cwe}): "
                f"{finding.message}{origin}{fix}"
            )
    return lines


def _offer(finding: Finding) -> str:
    if finding.fixes:
        return " (safe fix)"
    if finding.suggestions:
        first = finding.suggestions[0]
        return f" (suggestion) {first.title}; it may change: {first.changes}"
    return ""


def as_json(files: Sequence[AuditedFile]) -> dict[str, Any]:
    return {"findings": [_entry(file, finding) for file in files for finding in file.findings]}


def _entry(file: AuditedFile, finding: Finding) -> dict[str, Any]:
    line, column = file.line_and_column(finding.start)
    end_line, end_column = file.line_and_column(finding.end)
    return {
        "path": file.path,
        "line": line,
        "column": column,
        "end_line": end_line,
        "end_column": end_column,
        "start": finding.start,
        "end": finding.end,
        "rule": finding.rule,
        "cwe": finding.cwe,
        "cwes": list(finding.cwes),
        "severity": finding.severity.value,
        "message": finding.message,
        "origin": finding.origin,
        "grade": finding.grade.value,
        "fixes": [_change(fix) for fix in finding.fixes],
        "suggestions": [_change(fix) for fix in finding.suggestions],
    }


def _change(fix: AuditFix) -> dict[str, Any]:
    edits = [{"start": e.start, "end": e.end, "text": e.text} for e in fix.edits]
    grade = FixGrade.SUGGESTION if fix.changes else FixGrade.SAFE
    return {"title": fix.title, "grade": grade.value, "changes": fix.changes, "edits": edits}


def as_sarif(files: Sequence[AuditedFile], version: str) -> dict[str, Any]:
    rules = all_rules()
    used = sorted({finding.rule for file in files for finding in file.findings})
    order = {name: at for at, name in enumerate(used)}
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "keystroke",
                        "version": version,
                        "rules": [_descriptor(name, rules.get(name)) for name in used],
                    }
                },
                "columnKind": "unicodeCodePoints",
                "results": [_result(file, finding, order) for file in files for finding in file.findings],
            }
        ],
    }


def _descriptor(name: str, rule: Rule | None) -> dict[str, Any]:
    if rule is None:
        text = "A suppression names its rule and gives a reason." if name == UNEXPLAINED else name
        return {"id": name, "shortDescription": {"text": text}}
    return {
        "id": rule.id,
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": rule.why},
        "helpUri": rule.references[0]
        if rule.references
        else f"https://cwe.mitre.org/data/definitions/{rule.cwe}.html",
        "defaultConfiguration": {"level": _LEVELS[rule.severity]},
        "properties": {
            "tags": ["security", *(f"external/cwe/cwe-{number:03d}" for number in (rule.cwe, *rule.also))],
            "security-severity": _SCORES[rule.severity],
        },
    }


def _result(file: AuditedFile, finding: Finding, order: dict[str, int]) -> dict[str, Any]:
    line, column = file.line_and_column(finding.start)
    end_line, end_column = file.line_and_column(finding.end)
    uri = quote(file.path.replace("\\", "/"))
    result: dict[str, Any] = {
        "ruleId": finding.rule,
        "ruleIndex": order[finding.rule],
        "level": _LEVELS[finding.severity],
        "message": {"text": finding.message},
        "properties": {"cwe": list(finding.cwes), "grade": finding.grade.value},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": uri},
                    "region": {
                        "startLine": line,
                        "startColumn": column,
                        "endLine": end_line,
                        "endColumn": end_column,
                    },
                }
            }
        ],
    }
    if finding.fixes:
        result["fixes"] = [
            {
                "description": {"text": fix.title},
                "artifactChanges": [
                    {
                        "artifactLocation": {"uri": uri},
                        "replacements": [
                            {
                                "deletedRegion": {
                                    "charOffset": edit.start,
                                    "charLength": edit.end - edit.start,
                                },
                                "insertedContent": {"text": edit.text},
                            }
                            for edit in fix.edits
                        ],
                    }
                ],
            }
            for fix in finding.fixes
        ]
    return result


def apply_fixes(file: AuditedFile) -> tuple[str, int]:
    """The text with the first fix of each finding that overlaps no earlier one, and their number.

    Suggestions are never applied.
    """
    edits: list[Edit] = []
    count = 0
    for finding in file.findings:
        if not finding.fixes:
            continue
        new = [edit for edit in finding.fixes[0].edits if edit not in edits]
        if not new or any(_overlap(one, other) for one in new for other in edits):
            continue
        edits.extend(new)
        count += 1
    if not edits:
        return file.text, 0
    after = apply_edits(file.text, edits)
    if file.path.endswith(".go"):  # all fixes together may make an import unused that each one alone needs
        after = apply_edits(after, unused_imports(file.text, after))
    return after, count


def _overlap(one: Edit, other: Edit) -> bool:
    """Whether two edits overlap; two insertions at one point do not."""
    if one.is_insertion and other.is_insertion:
        return False
    return one.start < other.end and other.start < one.end


def diff(path: str, before: str, after: str) -> str:
    return "".join(
        difflib.unified_diff(
            before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{path}", f"b/{path}"
        )
    )

"""A model's remarks on a change: prompt and parser.

One remark is one JSON object. Remarks about unchanged lines, and those the model does not confirm, are
dropped. A replacement becomes a fix only if the file then parses and has no new error.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import msgspec

from keystroke.analysis.audit import Severity
from keystroke.analysis.check import Level, Project, can_check, check
from keystroke.assist.edit import Writer
from keystroke.assist.edit.blocks import chat
from keystroke.assist.review.changes import ChangedFile
from keystroke.assist.review.confirm import new_has_defect
from keystroke.assist.review.finding import ReviewFinding, ReviewFix
from keystroke.text import Document, Edit, apply_edits

MAX_LINES = 400  # changed lines of one file that are shown
MAX_REMARKS = 5
AROUND = 15
_LONGEST = 4000  # characters of one remark

_SYSTEM = """You review a change of a source file. Report only defects: wrong results, crashes, races, leaks,
security holes, broken callers. No praise, no style. Lines that are new begin with "+".
Write one JSON object per line and nothing else:
{"line": 12, "severity": "high", "message": "one sentence", "replacement": "the corrected line, or null"}
severity is high, medium or low. Write nothing if there is no defect."""


class _Remark(msgspec.Struct):
    line: int
    message: str
    severity: str = "medium"
    replacement: str | None = None


def model_findings(file: ChangedFile, root: Path, writer: Writer, rules: str = "") -> Iterator[ReviewFinding]:
    """The model's remarks on one file that it confirms in a second question."""
    system = f"{_SYSTEM}\n\nThe project's rules:\n{rules.strip()}" if rules.strip() else _SYSTEM
    document = Document(file.text)
    reported: list[ReviewFinding] = []
    for text in _split_objects(writer.write(chat(system, _show_changes(file)), None)):
        finding = _parse_remark(text, file, document, root)
        if finding is not None and finding.line not in {other.line for other in reported}:
            reported.append(finding)
        if len(reported) >= MAX_REMARKS:
            break
    for finding in reported:
        # Without an earlier text there is nothing to compare, and the remark is dropped.
        if new_has_defect(file, finding.line, finding.message, writer):
            yield finding


def _split_objects(pieces: Iterator[str]) -> Iterator[str]:
    """The JSON objects of an answer as they are completed, one per line or over several lines."""
    line = pending = ""
    for piece in itertools.chain(pieces, ("\n",)):
        *lines, line = (line + piece).split("\n")
        for text in lines:
            bare = text.strip().strip("`").strip()
            if bare == "{" or (bare.startswith("{") and '"line"' in bare):
                pending = ""  # a new one begins
            pending = f"{pending}{bare} " if pending or bare.startswith("{") else ""
            if _is_object(whole := pending.rstrip(" ,")):
                yield whole
                pending = ""
            elif len(pending) > _LONGEST:
                pending = ""


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict) if text else False
    except msgspec.DecodeError:
        return False


def _show_changes(file: ChangedFile) -> str:
    """The changed lines with those around them, numbered."""
    lines = file.text.split("\n")
    near = {n for line in sorted(file.lines)[:MAX_LINES] for n in range(line - AROUND, line + AROUND + 1)}
    shown = [
        f"{'+' if number in file.lines else ' '}{number:5} {lines[number - 1]}"
        for number in sorted(near)
        if 1 <= number <= len(lines)
    ]
    return f"File: {file.path}\n" + "\n".join(shown)


def _parse_remark(text: str, file: ChangedFile, document: Document, root: Path) -> ReviewFinding | None:
    try:
        remark = msgspec.json.decode(text, type=_Remark)
    except msgspec.DecodeError:
        return None
    message = " ".join("".join(c if c.isprintable() else " " for c in remark.message).split())[:300]
    if remark.line not in file.lines or not message or remark.line > document.line_count:
        return None
    start, end = document.line_span(remark.line - 1)
    severity = {"high": Severity.HIGH, "low": Severity.LOW}.get(remark.severity.lower(), Severity.MEDIUM)
    fix = _make_fix(remark.replacement, file, start, end, root)
    return ReviewFinding("model", "remark", severity, message, file.path, remark.line, 1, start, end, fix)


def _make_fix(
    replacement: str | None, file: ChangedFile, start: int, end: int, root: Path
) -> ReviewFix | None:
    old = file.text[start:end]
    if not replacement or "\n" in replacement or replacement.strip() == old.strip():
        return None
    if not can_check(file.path):
        return None
    indent = old[: len(old) - len(old.lstrip())]
    edit = Edit(start, end, indent + replacement.strip())
    project = Project(root)
    errors = [
        sum(i.level is Level.ERROR for i in check(text, root / file.path, project=project, fixes=False))
        for text in (file.text, apply_edits(file.text, [edit]))
    ]
    return ReviewFix("Fix written by the model", (edit,)) if errors[1] <= errors[0] else None

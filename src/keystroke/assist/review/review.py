"""Reviews a change: runs every reviewer over every changed file and yields findings as they come.

Only changed lines are reviewed and each fault is reported once: checks come before the audit, then the
linter, the examples and the model. What a model says is a finding only where an example confirms it,
otherwise a suspicion. A reviewer that fails does not end the review.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path

from keystroke.analysis.audit import Auditor, Severity
from keystroke.analysis.audit.auditor import MAX_LINE
from keystroke.analysis.audit.files import language_of
from keystroke.analysis.check import Level, Project, can_check, check
from keystroke.analysis.check.check import is_python
from keystroke.analysis.check.other_languages import find_syntax_slips, mark_parsed, other_language
from keystroke.analysis.check.syntax_fixes import parse_failure
from keystroke.assist.edit import Writer
from keystroke.assist.review.changes import ChangedFile, committed_text
from keystroke.assist.review.demonstrate import (
    changed_definitions,
    definitions,
    find_contradictions,
    find_differences,
)
from keystroke.assist.review.expect import claims_from_docstrings, claims_from_model, claims_from_tests
from keystroke.assist.review.finding import ReviewFinding, ReviewFix
from keystroke.assist.review.linter import find_ruff, lint
from keystroke.assist.review.model_review import model_findings
from keystroke.assist.review.scripts import Claim
from keystroke.errors import Interrupted, KeystrokeError
from keystroke.text import Document, Edit, apply_edits

_SEVERITY = {Level.ERROR: Severity.HIGH, Level.WARNING: Severity.MEDIUM, Level.HINT: Severity.LOW}

CLAIMS = 60  # from tests and documentation, per file
ASKED = 3  # definitions per file that a model is asked about


def review(
    files: Sequence[ChangedFile],
    root: Path,
    writer: Writer | None = None,
    rules: str = "",
    *,
    run: bool = True,
    remark: bool = True,
) -> Iterator[ReviewFinding | str]:
    """Yield findings; a text between them says what could not be reviewed, or what a model suspects. `run`:
    run pure definitions, old and new, on examples. `remark`: also ask the model for its own remarks."""
    program = find_ruff(root)
    project = Project(root)
    shown: dict[str, set[int]] = {}  # lines of definitions with a finding from an example
    for file in files:
        seen: set[tuple[str, int, str]] = set()
        audited: set[int] = set()
        wrong: set[int] = set()  # lines that cannot run, so examples add nothing
        for finding in _review_file(file, root, project, program):
            if isinstance(finding, str):
                yield finding
                continue
            security = finding.source == "ruff" and finding.code.startswith("S") and finding.line in audited
            if finding.subject in seen or security:
                continue
            if finding.source == "audit":
                audited.add(finding.line)
            if finding.source == "check" and finding.severity is Severity.HIGH:
                wrong.add(finding.line)
            seen.add(finding.subject)
            yield finding
        if run:
            examples = _run_examples(file, root, writer, wrong, shown.setdefault(file.path, set()))
            yield from _report_failure(examples, f"the model did not judge the examples of {file.path}")
    for file in files if writer is not None and remark else ():
        remarks = model_findings(file, root, writer, rules)  # type: ignore[arg-type]
        for finding in _report_failure(remarks, f"the model did not review {file.path}"):
            if isinstance(finding, ReviewFinding) and finding.line not in shown.get(file.path, ()):
                place = f"{finding.path}:{finding.line}"
                finding = f"{place}: the model suspects, and no example shows: {finding.message}"
            yield finding


def _report_failure(findings: Iterator[ReviewFinding], reason: str) -> Iterator[ReviewFinding | str]:
    """The findings; where the reviewer fails, a sentence with the reason ends them."""
    try:
        yield from findings
    except Interrupted:
        raise
    except KeystrokeError as error:
        yield f"{reason}: {error}"


def _review_file(
    file: ChangedFile, root: Path, project: Project, program: str | None
) -> Iterator[ReviewFinding | str]:
    if any(len(line) > MAX_LINE for line in file.text.split("\n")):
        yield f"{file.path} was left out: it has a line of more than {MAX_LINE} characters"
        return
    yield from _report_failure(_run_checks(file, root, project), f"{file.path} was not checked")
    yield from _report_failure(_run_audit(file), f"{file.path} was not audited")
    if program is not None and file.path.endswith((".py", ".pyi")):
        try:
            yield from lint(program, root, file)
        except KeystrokeError as error:
            yield str(error)


def _run_checks(file: ChangedFile, root: Path, project: Project) -> Iterator[ReviewFinding]:
    if not can_check(file.path) or not Path(file.path).suffix:
        return
    language = other_language(file.path)
    base = committed_text(root, file.path) if language is not None else None
    if language is not None and base and not find_syntax_slips(base, language):
        mark_parsed(root / file.path)  # the grammar parses this file
    document = Document(file.text)
    for item in check(file.text, root / file.path, project=project):
        fix = ReviewFix(item.fixes[0].title, item.fixes[0].edits) if item.fixes else None
        severity, span = _SEVERITY[item.level], (item.start, item.end)
        yield from _place_finding(file, document, "check", item.code, severity, item.message, span, fix)


def _run_audit(file: ChangedFile) -> Iterator[ReviewFinding]:
    language = language_of(Path(file.path))
    if language is None:
        return
    document = Document(file.text)
    for item in Auditor(language).audit(file.text):
        fix = ReviewFix(item.fixes[0].title, item.fixes[0].edits) if item.fixes else None
        message = f"{item.message} (CWE-{item.cwe})"
        if fix is None and item.suggestions:  # mentioned, never applied
            message += f" Suggestion: {item.suggestions[0].title}."
        yield from _place_finding(
            file, document, "audit", item.rule, item.severity, message, (item.start, item.end), fix
        )


def _place_finding(
    file: ChangedFile,
    document: Document,
    source: str,
    code: str,
    severity: Severity,
    message: str,
    span: tuple[int, int],
    fix: ReviewFix | None,
) -> Iterator[ReviewFinding]:
    """The finding with its line, if one of its lines changed."""
    start, end = span
    first = document.position(start, "utf-32")
    last = document.position(max(start, end - 1), "utf-32")
    if file.lines.isdisjoint(range(first.line + 1, last.line + 2)):
        return
    yield ReviewFinding(
        source, code, severity, message, file.path, first.line + 1, first.column + 1, start, end, fix
    )


def _run_examples(
    file: ChangedFile, root: Path, writer: Writer | None, wrong: Set[int], shown: set[int]
) -> Iterator[ReviewFinding]:
    """Findings from running both versions: claims of tests or documentation that no longer hold, calls that
    fail now or lose a common property, and results that a model, without seeing the code, expects to be as
    before. Definitions with `wrong` lines are skipped; the lines of those with a finding go to `shown`."""
    if file.before is None or not is_python(file.path):
        return
    changed = changed_definitions(file.before, file.text)
    reported: set[str] = {name for name, lines in changed.items() if not wrong.isdisjoint(lines)}
    for name, message, severity in _findings_from_examples(file, root, changed, reported, writer):
        reported.add(name)
        lines = changed[name]
        line = min(file.lines.intersection(lines), default=lines.start)
        start, end = Document(file.text).line_span(line - 1)
        text = " ".join(message.split())[:400]
        shown.update(lines)
        yield ReviewFinding("example", "regression", severity, text, file.path, line, 1, start, end)


def _findings_from_examples(
    file: ChangedFile, root: Path, changed: Mapping[str, range], reported: Set[str], writer: Writer | None
) -> Iterator[tuple[str, str, Severity]]:
    """The definition, the sentence and the severity of each finding. The caller adds each to `reported`."""
    before, names = file.before or "", definitions(file.text)
    claims = [
        *claims_from_tests(root, file.path, names),
        *((file.path, c) for c in claims_from_docstrings(file.text, names)),
    ]
    paths = {id(claim): path for path, claim in claims}
    intended: set[str] = set()  # a test or the documentation changed with it
    for found in (
        find_contradictions(before, file.text, [claim for _, claim in claims][:CLAIMS]) if changed else ()
    ):
        name = _find_concerned(found.claim, changed)
        if name is None:
            continue
        if found.holds:
            intended.add(name)
        elif name not in reported:
            place = paths[id(found.claim)]
            by = "its documentation" if place == file.path else f"{place}:{found.claim.line}"
            yield name, f"{by} says {found.claim.text}; now that is {found.after}", Severity.HIGH
    for difference in find_differences(before, file.text) if changed else ():
        if difference.name in reported or difference.name in intended:
            continue
        call, was, gives = difference.call, difference.before, difference.after
        if difference.broken:
            verb = "gives" if gives.startswith("no answer") else "fails with"
            yield difference.name, f"{call} {verb} {gives}; before this change it gave {was}", Severity.HIGH
        elif difference.lost:
            message = f"{call} gives {gives}; before this change it gave {was}, and {difference.lost}"
            yield difference.name, message, Severity.MEDIUM
    if writer is None:
        return
    for name in [name for name in changed if name not in reported | intended][:ASKED]:
        against = find_contradictions(before, file.text, claims_from_model(file.text, name, names, writer))
        if against and not any(found.holds for found in against):
            found = against[0]
            message = f"{found.claim.text} held before this change; now it gives {found.after}"
            yield name, message, Severity.MEDIUM


def _find_concerned(claim: Claim, changed: Mapping[str, range]) -> str | None:
    """The changed definition that a claim is about: the last one it calls."""
    for step in reversed(claim.plan):
        for name in changed:
            if name.rpartition(".")[2] == step["call"]:
                return name
    return next(iter(changed), None)


def sort_findings(findings: Iterable[ReviewFinding]) -> list[ReviewFinding]:
    """Sort by severity, then by file and position."""
    return sorted(findings, key=lambda item: (-item.severity.rank, item.path, item.start, item.code))


def combine_fixes(
    files: Sequence[ChangedFile], findings: Iterable[ReviewFinding]
) -> tuple[dict[str, tuple[Edit, ...]], list[ReviewFinding]]:
    """The edits that apply the fixes of these findings together, by file, and the fixed findings. A fix that
    overlaps another, or breaks the file, is left out."""
    texts = {file.path: file.text for file in files if file.on_disk}
    edits: dict[str, tuple[Edit, ...]] = {}
    done: list[ReviewFinding] = []
    for finding in findings:
        if finding.fix is None or finding.path not in texts:
            continue
        taken = edits.get(finding.path, ())
        new = tuple(edit for edit in finding.fix.edits if edit not in taken)
        if any(_overlap(a, b) for a in taken for b in new):
            continue
        text = texts[finding.path]
        python = is_python(finding.path) and parse_failure(apply_edits(text, taken)) is None
        if python and parse_failure(apply_edits(text, (*taken, *new))) is not None:
            continue
        edits[finding.path] = (*taken, *new)
        done.append(finding)
    return edits, done


def _overlap(a: Edit, b: Edit) -> bool:
    return (a.start < b.end and b.start < a.end) or a.start == b.start

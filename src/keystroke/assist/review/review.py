"""The review of a change: every reviewer over every changed file, findings as they come.

Law: only what changed is reviewed, and each fault is said once, by whoever says it first (checks before the
audit, the audit before the linter, then what examples show, the model last). What a model says is a finding
only where an example shows that something went wrong; else it is told as a suspicion. A reviewer that fails
is a remark, not the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path

from keystroke.analysis.audit import Auditor, Severity
from keystroke.analysis.audit.auditor import MAX_LINE
from keystroke.analysis.audit.files import language_of
from keystroke.analysis.check import Level, Project, check, concerns
from keystroke.analysis.check.check import is_python
from keystroke.analysis.check.foreign import foreign_language, remember, slips
from keystroke.analysis.check.syntax_fixes import parses
from keystroke.assist.edit import Writer
from keystroke.assist.review.changes import Changed, committed_text
from keystroke.assist.review.confirm import old_was_right
from keystroke.assist.review.demonstrate import differences
from keystroke.assist.review.finding import Finding, Fix
from keystroke.assist.review.linter import lint, ruff_of
from keystroke.assist.review.model_review import remarks
from keystroke.errors import Interrupted, KeystrokeError
from keystroke.text import Document, Edit, apply_edits

_SEVERITY = {Level.ERROR: Severity.HIGH, Level.WARNING: Severity.MEDIUM, Level.HINT: Severity.LOW}


def review(
    files: Sequence[Changed],
    root: Path,
    writer: Writer | None = None,
    rules: str = "",
    *,
    run: bool = True,
    remark: bool = True,
) -> Iterator[Finding | str]:
    """Findings as they are found; a text between them says what could not be reviewed, or what a model
    suspects. `run`: definitions that only compute may be run, old and new, on examples. `remark`: the model
    is asked for remarks of its own, and not only about examples."""
    program = ruff_of(root)
    project = Project(root)
    shown: dict[str, set[int]] = {}  # lines of definitions that an example has shown to go wrong
    for file in files:
        seen: set[tuple[str, int, str]] = set()
        audited: set[int] = set()
        wrong: set[int] = set()  # lines that cannot run: an example would only say it again
        for finding in _of_file(file, root, project, program):
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
            try:
                for finding, lines in _demonstrated(file, writer, wrong):
                    shown.setdefault(file.path, set()).update(lines)
                    yield finding
            except Interrupted:
                raise
            except KeystrokeError as error:
                yield f"the model did not judge the examples of {file.path}: {error}"
    for file in files if writer is not None and remark else ():
        try:
            for finding in remarks(file, root, writer, rules):  # type: ignore[arg-type]
                known = finding.line in shown.get(file.path, ())
                yield finding if known else _suspicion(finding)
        except Interrupted:
            raise
        except KeystrokeError as error:
            yield f"the model did not review {file.path}: {error}"


def _of_file(file: Changed, root: Path, project: Project, program: str | None) -> Iterator[Finding | str]:
    if any(len(line) > MAX_LINE for line in file.text.split("\n")):
        yield f"{file.path} was left out: it has a line of more than {MAX_LINE} characters"
        return
    try:
        yield from _checked(file, root, project)
    except KeystrokeError as error:
        yield f"{file.path} was not checked: {error}"
    try:
        yield from _audited(file)
    except KeystrokeError as error:
        yield f"{file.path} was not audited: {error}"
    if program is not None and file.path.endswith((".py", ".pyi")):
        try:
            yield from lint(program, root, file)
        except KeystrokeError as error:
            yield str(error)


def _checked(file: Changed, root: Path, project: Project) -> Iterator[Finding]:
    if not concerns(file.path) or not Path(file.path).suffix:
        return
    language = foreign_language(file.path)
    if language is not None and (base := committed_text(root, file.path)) and not slips(base, language):
        remember(root / file.path)  # the grammar understands this file
    document = Document(file.text)
    for item in check(file.text, root / file.path, project=project):
        fix = Fix(item.fixes[0].title, item.fixes[0].edits) if item.fixes else None
        severity, span = _SEVERITY[item.level], (item.start, item.end)
        yield from _placed(file, document, "check", item.code, severity, item.message, span, fix)


def _audited(file: Changed) -> Iterator[Finding]:
    language = language_of(Path(file.path))
    if language is None:
        return
    document = Document(file.text)
    for item in Auditor(language).audit(file.text):
        fix = Fix(item.fixes[0].title, item.fixes[0].edits) if item.fixes else None
        message = f"{item.message} (CWE-{item.cwe})"
        if fix is None and item.suggestions:  # only the direction is known: said, never applied
            message += f" Suggestion: {item.suggestions[0].title}."
        yield from _placed(
            file, document, "audit", item.rule, item.severity, message, (item.start, item.end), fix
        )


def _placed(
    file: Changed,
    document: Document,
    source: str,
    code: str,
    severity: Severity,
    message: str,
    span: tuple[int, int],
    fix: Fix | None,
) -> Iterator[Finding]:
    """The finding with its line, if one of its lines changed."""
    start, end = span
    first = document.position(start, "utf-32")
    last = document.position(max(start, end - 1), "utf-32")
    if file.lines.isdisjoint(range(first.line + 1, last.line + 2)):
        return
    yield Finding(
        source, code, severity, message, file.path, first.line + 1, first.column + 1, start, end, fix
    )


def _suspicion(finding: Finding) -> str:
    return f"{finding.path}:{finding.line}: the model suspects, and no example shows: {finding.message}"


def _demonstrated(
    file: Changed, writer: Writer | None, wrong: Set[int]
) -> Iterator[tuple[Finding, Iterable[int]]]:
    """Calls that fail now and did not before; and, if a model says that the old result was the right one,
    calls that give something else; each with the lines of its definition. Definitions with `wrong` lines are
    known not to run."""
    if file.before is None or not is_python(file.path):
        return
    document = Document(file.text)
    for found in differences(file.before, file.text):
        if not wrong.isdisjoint(found.lines):
            continue
        line = min(file.lines.intersection(found.lines), default=found.lines.start)
        start, end = document.line_span(line - 1)
        if found.broken:
            message = f"{found.call} fails with {found.after}; before this change it gave {found.before}"
        elif writer is not None and not found.meant and old_was_right(file, found, writer):
            message = f"{found.call} gives {found.after}; before this change it gave {found.before}"
        else:
            continue
        severity = Severity.HIGH if found.broken else Severity.MEDIUM
        text = " ".join(message.split())[:400]
        yield Finding("example", "regression", severity, text, file.path, line, 1, start, end), found.lines


def ranked(findings: Iterable[Finding]) -> list[Finding]:
    """The gravest first, then in the order of the files."""
    return sorted(findings, key=lambda item: (-item.severity.rank, item.path, item.start, item.code))


def fixed_texts(
    files: Sequence[Changed], findings: Iterable[Finding]
) -> tuple[dict[str, tuple[Edit, ...]], list[Finding]]:
    """The edits that apply the fixes of these findings together, by file, and the findings they mend. A fix
    that touches what another has changed is left for the next review, and so is one that breaks the file."""
    texts = {file.path: file.text for file in files if file.live}
    edits: dict[str, tuple[Edit, ...]] = {}
    done: list[Finding] = []
    for finding in findings:
        if finding.fix is None or finding.path not in texts:
            continue
        taken = edits.get(finding.path, ())
        new = tuple(edit for edit in finding.fix.edits if edit not in taken)
        if any(_touch(a, b) for a in taken for b in new):
            continue
        text = texts[finding.path]
        python = is_python(finding.path) and parses(apply_edits(text, taken))
        if python and not parses(apply_edits(text, (*taken, *new))):
            continue
        edits[finding.path] = (*taken, *new)
        done.append(finding)
    return edits, done


def _touch(a: Edit, b: Edit) -> bool:
    return (a.start < b.end and b.start < a.end) or a.start == b.start

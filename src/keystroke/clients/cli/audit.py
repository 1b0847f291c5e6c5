"""`keystroke audit`: finds security weaknesses in files and fixes them.

Exit code 0: no findings; 1: findings; 2: wrong usage. Files are changed only with --fix and only by fixes,
never by suggestions; the diff is shown first, and on a terminal the user is asked. With --check only fixes
remain after which the project's checks pass.
"""

from __future__ import annotations

import json as codec
import sys
from collections import Counter
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from keystroke.analysis.audit import LANGUAGES, Auditor, Severity, all_rules, find_rule
from keystroke.analysis.audit.files import SourceFile, find_sources
from keystroke.analysis.audit.project import ProjectFacts, project_root
from keystroke.analysis.audit.report import AuditedFile, apply_fixes, as_json, as_sarif, as_text, diff
from keystroke.analysis.audit.rules.wrappers import project_wrappers
from keystroke.clients.cli import options
from keystroke.clients.cli.console import Console, format_count, print_error
from keystroke.clients.cli.installed_version import release
from keystroke.clients.cli.options import Invocation, argument, invocation_of, option
from keystroke.errors import InputError, KeystrokeError, UsageError

_BOM = b"\xef\xbb\xbf"
PROGRESS_FROM = 40  # files; fewer are audited without a progress display


class Format(StrEnum):
    TEXT = "text"
    JSON = "json"
    SARIF = "sarif"


def audit(
    ctx: typer.Context,
    paths: Annotated[list[str] | None, argument("Files or folders to audit.", metavar="PATH...")] = None,
    form: Annotated[Format | None, option("--format", "Output format.")] = None,
    severity: Annotated[Severity, option("Omit findings below this severity.")] = Severity.LOW,
    rules: Annotated[str, option("`list` all rules, or `show` the rule named as PATH.")] = "",
    fix: Annotated[
        bool, option("--fix", "Apply fixes, but not suggestions; asks first on a terminal.")
    ] = False,
    yes: options.Yes = False,
    check: Annotated[
        str,
        option(
            "With --fix: keep only fixes after which this command passes; "
            "`auto` runs the project's type checker, compiler and tests.",
            metavar="CMD",
        ),
    ] = "",
    check_seconds: Annotated[float, option("Time limit of one run of --check.", min=0.1, max=86400)] = 300.0,
    show_diff: Annotated[bool, option("--diff", "Show what --fix would change; write nothing.")] = False,
    every: Annotated[
        bool, option("--all", "Also audit vendored, minified, bundled and generated files.")
    ] = False,
    exit_zero: options.ExitZero = False,
    stdin: Annotated[bool, option("--stdin", "Audit standard input.")] = False,
    language: Annotated[str, option(f"One of {', '.join(LANGUAGES)}.")] = "",
    nosec: Annotated[bool, option("--nosec", "Also honour `# nosec` and `# noqa: S...`.")] = False,
    json: options.Json = False,
) -> None:
    run = invocation_of(ctx)
    if form is None:
        form = Format.JSON if run.json else Format.TEXT
    elif json and form is not Format.JSON:
        raise UsageError(f"--json and --format {form.value} cannot be combined; choose one")
    if rules:
        _print_rules(rules, paths or [], form)
        return
    if language and language not in LANGUAGES:
        raise UsageError(f"--language {language!r} is not known; use one of {', '.join(LANGUAGES)}")
    if stdin == bool(paths):
        raise UsageError("give files or folders to audit, or use --stdin with --language")
    if stdin and not language:
        raise UsageError("--stdin needs --language")
    if check and (not fix or stdin or show_diff):
        raise UsageError("--check judges the fixes that --fix writes to files; use it with --fix")
    chosen = [_standard_input(language)] if stdin else _collect_sources(paths or [], language, every)
    found = _audit_files(chosen, severity, nosec, quiet=run.quiet)
    if show_diff:
        for file in found:
            sys.stdout.write(Console.plain(diff(file.path, file.text, apply_fixes(file)[0])))
    else:
        _write(found, form)
        if fix and not stdin:
            accepted = _accept_fixes(run, found, yes=yes or form is not Format.TEXT)
            _write_fixes(run, accepted, check, check_seconds)
    failed = any(file.findings for file in found)
    raise typer.Exit(1 if failed and not exit_zero else 0)


def _audit_files(
    chosen: list[SourceFile], severity: Severity, nosec: bool, *, quiet: bool
) -> list[AuditedFile]:
    found = []
    projects: dict[Path, ProjectFacts] = {}
    helpers = project_wrappers(source.text for source in chosen if source.language == "python")
    with Console(quiet=quiet or len(chosen) < PROGRESS_FROM).progress() as report:
        for at, source in enumerate(chosen):
            report("audit", at, len(chosen))
            try:
                project = _project_of(source.path, projects)
                auditor = Auditor(source.language, honour_others=nosec, helpers=helpers, project=project)
                findings = auditor.audit(source.text)
            except KeystrokeError as error:
                print_error(f"{source.path} was skipped: {error}")
                continue
            selected = tuple(item for item in findings if item.severity.rank >= severity.rank)
            found.append(AuditedFile(str(source.path), source.text, selected))
    return found


def _project_of(path: Path, known: dict[Path, ProjectFacts]) -> ProjectFacts | None:
    """The facts of the project of a file; read once for each project."""
    if not path.is_file():
        return None
    folder = path.resolve().parent
    if folder not in known:
        root = project_root(folder)
        known[folder] = known.setdefault(root, ProjectFacts(root))
    return known[folder]


def _standard_input(language: str) -> SourceFile:
    data = sys.stdin.buffer.read()
    try:
        return SourceFile(Path("-"), language, data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError("standard input is not UTF-8 text") from error


def _collect_sources(paths: list[str], language: str, every: bool) -> list[SourceFile]:
    out: list[SourceFile] = []
    foreign: Counter[str] = Counter()
    for path in paths:
        for item in find_sources(Path(path), language or None, foreign=every):
            if isinstance(item, SourceFile):
                out.append(item)
            elif item.foreign:
                foreign[item.why] += 1
            else:
                print_error(f"{item.path} was skipped: {item.why}")
    if foreign:
        listed = ", ".join(f"{count} {why}" for why, count in sorted(foreign.items()))
        files = format_count(foreign.total(), "file")
        print_error(f"{files} skipped: {listed}; --all audits them too")
    return out


def _accept_fixes(run: Invocation, found: list[AuditedFile], *, yes: bool) -> Iterator[AuditedFile]:
    """The files whose fixes are to be written: shows each diff, and asks if there is a terminal."""
    from keystroke.clients.cli.changes import read_key, show_diff_lines

    asks = not yes and sys.stdin.isatty() and sys.stderr.isatty()
    for file in found:
        after, count = apply_fixes(file)
        if not count:
            continue
        show_diff_lines(run, diff(file.path, file.text, after))
        if asks:
            pressed = read_key(
                f"{file.path}: apply {count} fix{'' if count == 1 else 'es'}? y, n, q quit ", "yqn"
            )
            if pressed == "q":
                return
            if pressed != "y":
                continue
        yield file


def _write_fixes(run: Invocation, accepted: Iterator[AuditedFile], check: str, seconds: float) -> None:
    """Write the fixed texts; with a check, only the fixes after which it passes."""
    if not check:
        fixed = []
        for file in accepted:
            _rewrite(file, file.text, apply_fixes(file)[0])
            print_error(f"{file.path}: {apply_fixes(file)[1]} fixed")
            fixed.append(file)
        _record_in_journals(run, fixed)
        return
    from keystroke.clients.cli.audit_check import FixCheck

    roots: dict[Path, list[AuditedFile]] = {}
    for file in accepted:
        roots.setdefault(project_root(Path(file.path)), []).append(file)
    for root, files in roots.items():
        kept = FixCheck(check, root, seconds, run.console.note, _rewrite).keep_passing(files)
        for file in kept:
            print_error(f"{file.path}: {apply_fixes(file)[1]} fixed; the check passes")
        _record_in_journals(run, kept)


def _record_in_journals(run: Invocation, fixed: list[AuditedFile]) -> None:
    """Record written fixes in the undo journals of their projects, one entry each."""
    from keystroke.assist.edit.journal import InverseChange
    from keystroke.clients.cli.changes import open_workspace, undo_hint, workspace_of
    from keystroke.text import minimal_diff
    from keystroke.text.encoding import decode, digest

    roots: dict[Path, list[AuditedFile]] = {}
    for file in fixed:
        roots.setdefault(workspace_of([file.path]), []).append(file)
    for root, files in roots.items():
        try:
            workspace, journal = open_workspace(run, root)
            changes = []
            for file in files:
                after = Path(file.path).read_bytes()
                mark = _BOM if after.startswith(_BOM) else b""
                before = mark + file.text.encode("utf-8", "surrogateescape")
                old, new = decode(before, file.path), decode(after, file.path)
                edits = tuple((e.start, e.end, e.text) for e in minimal_diff(new.text, old.text))
                name = workspace.name(file.path)
                changes.append(InverseChange(name, digest(before), digest(after), edits))
            with journal.recording("audit --fix", changes):
                run.console.note(undo_hint(root))
        except KeystrokeError as error:
            run.console.note(f"these fixes cannot be undone by `keystroke undo`: {error}")


def _rewrite(file: AuditedFile, before: str, after: str) -> None:
    """Write a file's text; InputError if the file does not hold `before` any more."""
    path = Path(file.path)
    original = path.read_bytes()
    mark = _BOM if original.startswith(_BOM) else b""
    if original.removeprefix(mark) != before.encode("utf-8", "surrogateescape"):
        raise InputError(f"{path} changed during the audit and was not written; run the audit again")
    path.write_bytes(mark + after.encode("utf-8", "surrogateescape"))


def _write(found: list[AuditedFile], form: Format) -> None:
    if form is Format.TEXT:
        lines = as_text(found)
        findings = format_count(sum(len(file.findings) for file in found), "finding")
        lines.append(f"{findings} in {format_count(len(found), 'file')}")
        sys.stdout.write(Console.plain("\n".join(lines) + "\n"))
    else:
        _write_json(as_json(found) if form is Format.JSON else as_sarif(found, release()))


def _write_json(value: object) -> None:
    sys.stdout.write(codec.dumps(value, indent=2) + "\n")


def _print_rules(action: str, names: list[str], form: Format) -> None:
    if action == "list" and not names:
        known = sorted(all_rules().values(), key=lambda rule: rule.id)
        if form is Format.JSON:
            records = [
                {"rule": r.id, "cwe": r.cwe, "severity": r.severity.value, "title": r.title} for r in known
            ]
            _write_json({"rules": records})
        else:
            lines = [f"{r.id:36} CWE-{r.cwe:<5} {r.severity.value:9} {r.title}\n" for r in known]
            sys.stdout.write("".join(lines))
        return
    if action != "show" or len(names) != 1:
        raise UsageError("--rules takes `list`, or `show` and the name of one rule")
    rule = find_rule(names[0])
    if form is Format.JSON:
        fields = ("severity", "title", "message", "why", "references")
        known_fields = {name: getattr(rule, name) for name in fields}
        _write_json({"rule": rule.id, "cwes": [rule.cwe, *rule.also], **known_fields})
        return
    links = "\n".join(rule.references)
    sys.stdout.write(
        f"{rule.id} ({', '.join(f'CWE-{number}' for number in (rule.cwe, *rule.also))}, "
        f"{rule.severity.value})\n{rule.title}\n\n"
        f"{rule.message}\n{rule.why}\n\n{links}\n"
    )

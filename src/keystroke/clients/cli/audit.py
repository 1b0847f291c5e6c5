"""`keystroke audit`: security weaknesses in files, with fixes.

Law: chooses files, asks the auditor, prints. Exit code 0 when nothing was found, 1 when something was, 2 when
the command itself was wrong. A file is rewritten only with --fix and only by fixes that were proved.
"""

from __future__ import annotations

import json as codec
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from keystroke.analysis.audit import LANGUAGES, Auditor, Severity, all_rules, find_rule
from keystroke.analysis.audit.files import Skipped, Source, sources
from keystroke.analysis.audit.report import Audited, as_json, as_sarif, as_text, diff, fixed
from keystroke.clients.cli.console import Console, complain
from keystroke.clients.cli.release import release
from keystroke.errors import InputError, KeystrokeError, UsageError

MANY = 40  # files from which on progress is shown


class Format(StrEnum):
    TEXT = "text"
    JSON = "json"
    SARIF = "sarif"


def audit(
    paths: Annotated[
        list[str] | None, typer.Argument(metavar="PATH...", help="Files or folders to audit.")
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="How findings are written.")] = Format.TEXT,
    severity: Annotated[
        Severity, typer.Option("--severity", help="Leave out findings below this.")
    ] = Severity.LOW,
    rules: Annotated[str, typer.Option("--rules", help="`list` all rules, or `show` the one named.")] = "",
    fix: Annotated[bool, typer.Option("--fix", help="Apply the fixes that were proved.")] = False,
    show_diff: Annotated[
        bool, typer.Option("--diff", help="Show what --fix would change; write nothing.")
    ] = False,
    exit_zero: Annotated[
        bool, typer.Option("--exit-zero", help="Exit 0 even when something was found.")
    ] = False,
    stdin: Annotated[bool, typer.Option("--stdin", help="Audit standard input.")] = False,
    language: Annotated[str, typer.Option("--language", help=f"One of {', '.join(LANGUAGES)}.")] = "",
    nosec: Annotated[bool, typer.Option("--nosec", help="Honour `# nosec` and `# noqa: S...` too.")] = False,
) -> None:
    if rules:
        _rules(rules, paths or [])
        return
    if language and language not in LANGUAGES:
        raise UsageError(f"--language {language!r} is not known; use one of {', '.join(LANGUAGES)}")
    if stdin == bool(paths):
        raise UsageError("name files or folders to audit, or use --stdin with --language")
    if stdin and not language:
        raise UsageError("--stdin needs --language")
    found, failed = [], False
    chosen = [_standard_input(language)] if stdin else _sources(paths or [], language)
    with Console(quiet=len(chosen) < MANY).progress() as report:
        for at, source in enumerate(chosen):
            report("audit", at, len(chosen))
            try:
                findings = Auditor(source.language, honour_others=nosec).audit(source.text)
            except KeystrokeError as error:
                complain(f"{source.path} was skipped: {error}")
                continue
            kept = tuple(item for item in findings if item.severity.rank >= severity.rank)
            file = Audited(str(source.path), source.text, kept)
            found.append(file)
            failed = failed or bool(kept)
            if fix or show_diff:
                _apply(file, source, write=fix and not show_diff and not stdin)
    if not show_diff:
        _write(found, form)
    raise typer.Exit(1 if failed and not exit_zero else 0)


def _standard_input(language: str) -> Source:
    data = sys.stdin.buffer.read()
    try:
        return Source(Path("-"), language, data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError("standard input is not UTF-8 text") from error


def _sources(paths: list[str], language: str) -> list[Source]:
    out: list[Source] = []
    for path in paths:
        for item in sources(Path(path), language or None):
            if isinstance(item, Skipped):
                complain(f"{item.path} was skipped: {item.why}")
            else:
                out.append(item)
    return out


def _apply(file: Audited, source: Source, *, write: bool) -> None:
    after, count = fixed(file)
    if not count:
        return
    if not write:
        sys.stdout.write(diff(file.path, file.text, after))
        return
    original = source.path.read_bytes()
    mark = b"\xef\xbb\xbf" if original.startswith(b"\xef\xbb\xbf") else b""
    source.path.write_bytes(mark + after.encode("utf-8", "surrogateescape"))
    complain(f"{source.path}: {count} fixed")


def _write(found: list[Audited], form: Format) -> None:
    if form is Format.TEXT:
        lines = as_text(found)
        total = sum(len(file.findings) for file in found)
        lines.append(
            f"{total} finding{'' if total == 1 else 's'} in {len(found)} file{'' if len(found) == 1 else 's'}"
        )
        sys.stdout.write("\n".join(lines) + "\n")
    else:
        report = as_json(found) if form is Format.JSON else as_sarif(found, release())
        sys.stdout.write(codec.dumps(report, indent=2, ensure_ascii=True) + "\n")


def _rules(action: str, names: list[str]) -> None:
    if action == "list" and not names:
        for name, rule in sorted(all_rules().items()):
            sys.stdout.write(f"{name:36} CWE-{rule.cwe:<5} {rule.severity.value:9} {rule.title}\n")
        return
    if action != "show" or len(names) != 1:
        raise UsageError("--rules takes `list`, or `show` and the name of one rule")
    rule = find_rule(names[0])
    links = "\n".join(rule.references)
    sys.stdout.write(
        f"{rule.id} ({', '.join(f'CWE-{number}' for number in (rule.cwe, *rule.also))}, "
        f"{rule.severity.value})\n{rule.title}\n\n"
        f"{rule.message}\n{rule.why}\n\n{links}\n"
    )

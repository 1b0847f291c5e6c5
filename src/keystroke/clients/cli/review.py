"""`keystroke review`: reviews uncommitted changes and offers fixes.

Findings are printed as they are found and ranked at the end. Files are changed only when the user presses a
key or gives --fix. Exit code 0: no findings; 1: findings; 2: wrong usage.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keystroke.analysis.audit import Severity
from keystroke.clients.cli import options
from keystroke.clients.cli.console import format_count
from keystroke.clients.cli.options import Invocation, argument, invocation_of, option
from keystroke.errors import UsageError

if TYPE_CHECKING:
    from keystroke.assist.edit import Journal, Workspace
    from keystroke.assist.review import ChangedFile, ReviewFinding

FOUND = 1


def review(
    ctx: typer.Context,
    revision: Annotated[str, argument("Review the changes since REV, or in A..B.", metavar="[REV]")] = "",
    staged: Annotated[bool, option("--staged", "Review the changes staged for the next commit.")] = False,
    severity: Annotated[Severity, option("Omit findings below this severity.")] = Severity.LOW,
    fix: Annotated[bool, option("--fix", "Apply all available fixes.")] = False,
    model: Annotated[str | None, option("Also review with this model.", metavar="MODEL")] = None,
    no_model: Annotated[bool, option("--no-model", "Do not use a model, even a configured one.")] = False,
    no_run: Annotated[bool, option("--no-run", "Do not run changed functions on examples.")] = False,
    exit_zero: options.ExitZero = False,
    json: options.Json = False,
    local: options.Local = False,
) -> None:
    from keystroke.assist.review import changed_files, sort_findings
    from keystroke.clients.cli.changes import open_workspace

    run = invocation_of(ctx)
    if staged and revision:
        raise UsageError("--staged and a revision cannot be combined; choose one")
    workspace, journal = open_workspace(run)
    files, left_out = changed_files(workspace, staged=staged, revision=revision)
    for item in left_out:
        run.console.note(f"skipped {item.path}: {item.why}")
    found: list[ReviewFinding] = []
    with _writer(run, model, no_model) as writer:
        for item in _review_files(files, workspace, writer, run_examples=not no_run):
            if isinstance(item, str):
                run.console.note(item)
            elif item.severity.rank >= severity.rank:
                found.append(item)
                run.console.json(_record(item)) if run.json else run.console.line(_describe(item))
    found = sort_findings(found)
    fixed = _apply_fixes(run, workspace, journal, files, found, fix=fix, ask=not run.json)
    if run.json:
        summary = {"findings": len(found), "files": len(files), "fixed": len(fixed)}
        run.console.json({"type": "summary", **summary})
    else:
        _print_summary(run, found, len(files), len(fixed))
    if len(found) > len(fixed) and not exit_zero:
        raise typer.Exit(FOUND)


def _review_files(files: list[ChangedFile], workspace: Workspace, writer: Any, *, run_examples: bool) -> Any:
    from keystroke.analysis.rules import project_rules
    from keystroke.assist.review import review as review_changes

    root, rules = workspace.root, ""
    if writer is not None:
        rules = project_rules(root / "x.py", root).prompt_header()
    return review_changes(files, root, writer, rules, run=run_examples)


@contextlib.contextmanager
def _writer(run: Invocation, model: str | None, no_model: bool) -> Any:
    """The model that also reviews: the one named, or a configured one that follows instructions."""
    from keystroke.clients.cli.interruption import interruptible
    from keystroke.clients.cli.writers import open_writer
    from keystroke.engine.roles import Role, chat_model_advice, model_for

    name = None if no_model else model or model_for(Role.DEEP, run.settings)
    if name is None:
        if not no_model:
            run.console.note(f"reviewing without a model: {chat_model_advice(run.settings)}")
        yield None
        return
    faster = ["`review --no-model`"]
    with interruptible() as interrupt, open_writer(name, run, interrupt, faster=faster) as writer:
        yield writer
    if interrupt.is_set:
        raise KeyboardInterrupt


def _describe(item: ReviewFinding) -> str:
    ready = " (fix ready)" if item.fix is not None else ""
    return (
        f"{item.path}:{item.line}:{item.column}: {item.severity.value} {item.source}/{item.code}: "
        f"{item.message}{ready}"
    )


def _record(item: ReviewFinding) -> dict[str, Any]:
    from keystroke.clients.cli.changes import edit_records

    names = ("source", "code", "severity", "message", "path", "line", "column", "start", "end")
    fix = item.fix and {"title": item.fix.title, "edits": edit_records(item.fix.edits)}
    return {"type": "finding", **{name: getattr(item, name) for name in names}, "fix": fix}


def _apply_fixes(
    run: Invocation,
    workspace: Workspace,
    journal: Journal,
    files: list[ChangedFile],
    found: list[ReviewFinding],
    *,
    fix: bool,
    ask: bool,
) -> list[ReviewFinding]:
    """Apply the chosen fixes in one edit, which one `undo` reverts."""
    from keystroke.assist.review import combine_fixes
    from keystroke.clients.cli.changes import UNDO_HINT, plan_edits, preview, read_key

    texts = {file.path: file.text for file in files}
    live = {file.path for file in files if file.on_disk}
    ready = [item for item in found if item.fix is not None and item.path in live]
    if fix:
        chosen = ready
    elif ask and ready and sys.stdin.isatty() and sys.stdout.isatty() and sys.stderr.isatty():
        chosen = []
        for item in ready:
            assert item.fix is not None
            run.console.note(f"\n{_describe(item)}")
            preview(run, item.path, texts[item.path], item.fix.edits)
            pressed = read_key(f"  {item.fix.title}: a apply, s skip, q quit? ", "aqs")
            if pressed == "q":
                break
            if pressed == "a":
                chosen.append(item)
    else:
        return []
    edits, done = combine_fixes(files, chosen)
    if done:
        plan = plan_edits(workspace, f"fix {len(done)} findings", edits, texts)
        if fix and ask:
            for path, wanted_edits in edits.items():
                preview(run, path, texts[path], wanted_edits)
        plan.apply(journal)
        run.console.note(f"{len(done)} fixed; {UNDO_HINT}")
    return done


def _print_summary(run: Invocation, found: list[ReviewFinding], files: int, fixed: int) -> None:
    severe = [item for item in found if item.severity.rank >= Severity.HIGH.rank]
    if len(found) > 10 and severe:
        run.console.line("\nthe most severe first:")
        for item in found[:10]:
            run.console.line(_describe(item))
    findings, changed = format_count(len(found), "finding"), format_count(files, "changed file")
    run.console.line(f"{findings} in {changed}, {fixed} fixed")

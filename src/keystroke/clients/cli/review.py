"""`keystroke review`: what changed, looked over before anybody else sees it.

Findings are printed as they are found and ranked at the end. Nothing is written unless the user presses
a key for it or says --fix. Exit code 0: nothing was found; 1: something was; 2: the command was wrong.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keystroke.analysis.audit import Severity
from keystroke.clients.cli import options
from keystroke.clients.cli.invocation import Invocation, invocation_of
from keystroke.errors import UsageError

if TYPE_CHECKING:
    from keystroke.assist.edit import Journal, Workspace
    from keystroke.assist.review import Changed, Finding

FOUND = 1


def review(
    ctx: typer.Context,
    revision: Annotated[
        str, typer.Argument(metavar="[REV]", help="Review what changed since REV, or in A..B.")
    ] = "",
    staged: Annotated[
        bool, typer.Option("--staged", help="Review what is staged for the next commit.")
    ] = False,
    severity: Annotated[
        Severity, typer.Option("--severity", help="Leave out findings below this.")
    ] = Severity.LOW,
    fix: Annotated[bool, typer.Option("--fix", help="Apply every fix that is ready.")] = False,
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="Let this model review too.")
    ] = None,
    no_model: Annotated[
        bool, typer.Option("--no-model", help="Ask no model, even a configured one.")
    ] = False,
    no_run: Annotated[
        bool, typer.Option("--no-run", help="Do not try changed functions on examples.")
    ] = False,
    exit_zero: Annotated[
        bool, typer.Option("--exit-zero", help="Exit 0 even when something was found.")
    ] = False,
    json: options.Json = False,
) -> None:
    from keystroke.assist.review import changed_files, ranked
    from keystroke.clients.cli.changes import open_workspace

    run = invocation_of(ctx)
    if staged and revision:
        raise UsageError("--staged and a revision are two different reviews; choose one")
    as_json = run.wants_json(json)
    workspace, journal = open_workspace(run)
    files, left_out = changed_files(workspace, staged=staged, revision=revision)
    for item in left_out:
        run.console.note(f"{item.path} was left out: {item.why}")
    found: list[Finding] = []
    with _writer(run, model, no_model) as writer:
        for item in _reviewed(files, workspace, writer, run_examples=not no_run):
            if isinstance(item, str):
                run.console.note(item)
            elif item.severity.rank >= severity.rank:
                found.append(item)
                run.console.json(_record(item)) if as_json else run.console.line(_sentence(item))
    found = ranked(found)
    mended = _mend(run, workspace, journal, files, found, fix=fix, ask=not as_json)
    if as_json:
        summary = {"findings": len(found), "files": len(files), "fixed": len(mended)}
        run.console.json({"type": "summary", **summary})
    else:
        _close(run, found, len(files), len(mended))
    if len(found) > len(mended) and not exit_zero:
        raise typer.Exit(FOUND)


def _reviewed(files: list[Changed], workspace: Workspace, writer: Any, *, run_examples: bool) -> Any:
    from keystroke.analysis.rules import project_rules
    from keystroke.assist.review import review as reviewed

    rules = (
        project_rules(workspace.root / "x.py", workspace.root).prompt_header() if writer is not None else ""
    )
    return reviewed(files, workspace.root, writer, rules, run=run_examples)


@contextlib.contextmanager
def _writer(run: Invocation, model: str | None, no_model: bool) -> Any:
    """The model that reviews too: the one named, or a configured one that follows instructions."""
    from keystroke.clients.cli.interruption import interruptible
    from keystroke.clients.cli.writers import open_writer
    from keystroke.engine.roles import Role, advice, model_for

    name = None if no_model else model or model_for(Role.DEEP, run.settings)
    if name is None:
        if not no_model:
            run.console.note(f"no model reviews: {advice(run.settings)}")
        yield None
        return
    with interruptible() as interrupt, open_writer(name, run, interrupt) as writer:
        yield writer
    if interrupt.is_set:
        raise KeyboardInterrupt


def _sentence(item: Finding) -> str:
    ready = " (fix ready)" if item.fix is not None else ""
    return (
        f"{item.path}:{item.line}:{item.column}: {item.severity.value} {item.source}/{item.code}: "
        f"{item.message}{ready}"
    )


def _record(item: Finding) -> dict[str, Any]:
    return {
        "type": "finding",
        "source": item.source,
        "code": item.code,
        "severity": item.severity.value,
        "message": item.message,
        "path": item.path,
        "line": item.line,
        "column": item.column,
        "start": item.start,
        "end": item.end,
        "fix": None
        if item.fix is None
        else {
            "title": item.fix.title,
            "edits": [{"start": e.start, "end": e.end, "text": e.text} for e in item.fix.edits],
        },
    }


def _mend(
    run: Invocation,
    workspace: Workspace,
    journal: Journal,
    files: list[Changed],
    found: list[Finding],
    *,
    fix: bool,
    ask: bool,
) -> list[Finding]:
    """Apply the fixes that are wanted, all in one edit that one `undo` takes back."""
    from keystroke.assist.review import fixed_texts
    from keystroke.clients.cli.changes import plan_edits, preview, read_key

    texts = {file.path: file.text for file in files}
    live = {file.path for file in files if file.live}
    ready = [item for item in found if item.fix is not None and item.path in live]
    if fix:
        wanted = ready
    elif ask and ready and sys.stdin.isatty() and sys.stdout.isatty() and sys.stderr.isatty():
        wanted = []
        for item in ready:
            assert item.fix is not None
            run.console.note(f"\n{_sentence(item)}")
            preview(run, item.path, texts[item.path], item.fix.edits)
            pressed = read_key(f"  {item.fix.title}: a apply, s skip, q quit? ", "aqs")
            if pressed == "q":
                break
            if pressed == "a":
                wanted.append(item)
    else:
        return []
    edits, done = fixed_texts(files, wanted)
    if done:
        plan = plan_edits(workspace, f"fix {len(done)} findings", edits, texts)
        if fix and ask:
            for path, wanted_edits in edits.items():
                preview(run, path, texts[path], wanted_edits)
        plan.apply(journal)
        run.console.note(f"{len(done)} fixed; `keystroke undo` takes it back")
    return done


def _close(run: Invocation, found: list[Finding], files: int, mended: int) -> None:
    grave = [item for item in found if item.severity.rank >= Severity.HIGH.rank]
    if len(found) > 10 and grave:
        run.console.line("\nthe gravest first:")
        for item in found[:10]:
            run.console.line(_sentence(item))
    counts = f"{len(found)} finding{'' if len(found) == 1 else 's'}"
    run.console.line(f"{counts} in {files} changed file{'' if files == 1 else 's'}, {mended} fixed")

"""`keystroke learn`: records the outcomes of suggestions on this machine, shows them and deletes them.

Nothing is recorded until it is turned on, and nothing leaves the machine unless the user exports it to a
file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.console import format_size, format_time
from keystroke.clients.cli.options import Invocation, argument, invocation_of, option
from keystroke.errors import InputError, UsageError

if TYPE_CHECKING:
    from keystroke.gateway.record.outcome_store import OutcomeStore, SuggestionOutcome

app = options.command_group(
    "learn", "Learn from the suggestions you accept, on this machine only. Off by default."
)

Language = Annotated[str | None, option("Only this language, e.g. python.")]
Project = Annotated[str | None, option("Only this project, by its name in `learn status`.")]
_KIND = {"rest": "rest_of_line", "line": "line", "block": "block"}  # the names that training uses


@app.command("on")
def turn_on(ctx: typer.Context, json: options.Json = False) -> None:
    """Record the outcomes of suggestions, and adapt how confident a suggestion must be to be shown."""
    _switch(invocation_of(ctx), True)


@app.command("off")
def turn_off(ctx: typer.Context, json: options.Json = False) -> None:
    """Stop recording at once. Existing records stay; `forget` deletes them."""
    _switch(invocation_of(ctx), False)


@app.command()
def status(ctx: typer.Context, json: options.Json = False) -> None:
    """Show whether recording is on, what is recorded, and the current confidence thresholds."""
    from keystroke.assist.completion.gate import THRESHOLDS
    from keystroke.assist.completion.tuning import tune_threshold

    run = invocation_of(ctx)
    settings = run.settings
    default = THRESHOLDS[settings.assist.eagerness]
    rows: list[dict[str, Any]] = []
    records = _records(run)
    if records is not None:
        with closing(records):
            for group in records.groups():
                threshold = tune_threshold(default, *records.counts(group.language, group.project))
                rows.append({**dataclasses.asdict(group), "threshold": threshold, "default": default})
    file = _file(run)
    total = file.stat().st_size if file.exists() else 0
    if run.json:
        run.console.json(
            {"enabled": settings.learn.enabled, "file": str(file), "bytes": total, "groups": rows}
        )
        return
    run.console.line(f"{'on' if settings.learn.enabled else 'off'}  {file}  {format_size(total)}")
    if rows:
        headings = ("language", "project", "shown", "accepted", "characters", "not shown", "threshold")
        cells = [
            (
                row["language"] or "-",
                row["project"],
                f"{row['shown']:,}",
                f"{row['accepted'] / max(1, row['shown']):.0%}",
                f"{row['characters']:,}",
                f"{row['unseen']:,}",
                f"{row['threshold']:.3f} (default {row['default']:.2f})",
            )
            for row in rows
        ]
        run.console.table(headings, cells)


@app.command()
def show(
    ctx: typer.Context,
    number: Annotated[int | None, argument("Show this suggestion with the code around it.")] = None,
    language: Language = None,
    project: Project = None,
    limit: Annotated[int, option("The number of suggestions to list.", min=1)] = 20,
    json: options.Json = False,
) -> None:
    """List recorded suggestions, newest first; with a number, show all details of one."""
    run = invocation_of(ctx)
    found = _outcomes(run, language=language, project=project, number=number, limit=limit)
    if number is not None and not found:
        raise InputError(f"there is no suggestion {number}; `keystroke learn show` lists them")
    if run.json:
        run.console.json(found)
    elif number is not None:
        _describe(run, found[0])
    elif not found:
        run.console.note("nothing is recorded")
    else:
        cells = [
            (
                str(o.id),
                format_time(o.at),
                o.language or "-",
                o.became,
                f"{o.confidence:.2f}",
                (o.suggestion or f"{o.shown} characters").split("\n")[0][:60],
            )
            for o in found
        ]
        run.console.table(("number", "when", "language", "outcome", "confidence", "suggestion"), cells)


@app.command()
def export(
    ctx: typer.Context,
    file: Annotated[Path, argument("The file to write; must end in .jsonl.xz.", metavar="FILE")],
    language: Language = None,
    project: Project = None,
    json: options.Json = False,
) -> None:
    """Export what you accepted, or wrote instead, as cases for `keystroke train`."""
    from keystroke.text.cases import CompletionCase, write_cases

    run = invocation_of(ctx)
    if not file.name.endswith(".jsonl.xz"):
        raise UsageError(f"{file} must end in .jsonl.xz, the format of training cases")
    if file.exists():
        raise InputError(f"{file} already exists; remove it or choose another name")
    found = _outcomes(run, language=language, project=project)
    cases = [
        CompletionCase(_KIND[o.extent], o.project, "", "private", o.path, o.prefix, o.written, o.suffix)
        for o in reversed(found)
        if o.kind == "completion" and o.written.strip() and o.extent in _KIND
    ]
    if not cases:
        raise InputError("there is nothing to export; see `keystroke learn status`")
    draft = file.with_name(f".{file.name}.part")
    try:
        draft.touch(0o600)
        draft.chmod(0o600)
        write_cases(draft, cases)
        draft.replace(file)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise InputError(f"{file} cannot be written: {error.strerror}; choose another place") from None
    run.report(
        {"file": str(file), "cases": len(cases)},
        f"wrote {len(cases):,} cases to {file}; it contains your code, and only you can read it",
    )


@app.command()
def forget(
    ctx: typer.Context,
    number: Annotated[int | None, argument("Only this suggestion.")] = None,
    language: Language = None,
    project: Project = None,
    days: Annotated[float | None, option("Only suggestions older than this many days.", min=0.0)] = None,
    yes: options.Yes = False,
    json: options.Json = False,
) -> None:
    """Delete recorded suggestions, all or some. Thresholds are recomputed."""
    from keystroke.clients.cli.changes import confirm_deletion

    run = invocation_of(ctx)
    if not yes and not confirm_deletion("Delete recorded suggestions?"):
        raise typer.Exit(1)
    before = None if days is None else time.time() - days * 86_400
    deleted = 0
    if (records := _records(run)) is not None:
        with closing(records):
            deleted = records.delete(language=language, project=project, before=before, number=number)
    run.report({"forgotten": deleted}, f"deleted {deleted:,} suggestions")


def _switch(run: Invocation, on: bool) -> None:
    from keystroke.config.write import write_setting
    from keystroke.gateway.record.outcome_store import open_outcome_store

    if on or _file(run).exists():
        with closing(open_outcome_store(run.settings)) as records:
            records.set_paused(not on)
    file = write_setting("learn.enabled", on, run.environ)
    if on:
        text = (
            f"on: outcomes of suggestions are recorded in {_file(run)}, which only you can read; nothing is "
            "sent anywhere. A running gateway starts recording after its next restart"
        )
    else:
        text = "off: recording stopped; `keystroke learn forget` deletes existing records"
    run.report({"enabled": on, "settings": str(file), "file": str(_file(run))}, text)


def _file(run: Invocation) -> Path:
    from keystroke.gateway.record.outcome_store import outcome_file

    return outcome_file(run.settings)


def _records(run: Invocation) -> OutcomeStore | None:
    """The records; None if there are none, so that looking creates no file."""
    from keystroke.gateway.record.outcome_store import open_outcome_store

    return open_outcome_store(run.settings) if _file(run).exists() else None


def _outcomes(run: Invocation, **filters: Any) -> list[SuggestionOutcome]:
    records = _records(run)
    if records is None:
        return []
    with closing(records):
        return records.outcomes(**filters)


def _describe(run: Invocation, outcome: SuggestionOutcome) -> None:
    for name in ("id", "at", "language", "project", "path", "model", "kind", "extent", "confidence", "became",
                 "shown", "taken", "worth"):  # fmt: skip
        run.console.line(f"{name:<11} {getattr(outcome, name)}")
    for name in ("prefix", "suggestion", "written", "suffix"):
        if text := getattr(outcome, name):
            run.console.line(f"--- {name}")
            run.console.line(text)

"""`keystroke learn`: what became of suggestions, in the hands of the one who took or left them.

Nothing is kept until it is turned on, nothing ever leaves the machine unless its owner exports it to a
file. Everything that is kept can be seen, and deleted, here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.invocation import Invocation, invocation_of
from keystroke.errors import InputError, UsageError

if TYPE_CHECKING:
    from keystroke.gateway.record.outcome_store import OutcomeStore, SuggestionOutcome

app = typer.Typer(
    name="learn",
    help="Learn, on this machine only, from which suggestions you take. Off until turned on.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Language = Annotated[str | None, typer.Option(help="Only this language, e.g. python.")]
Project = Annotated[str | None, typer.Option(help="Only this project, as `learn status` calls it.")]
_KIND = {"rest": "rest_of_line", "line": "line", "block": "block"}  # as training names what is missing


@app.command("on")
def turn_on(ctx: typer.Context, json: options.Json = False) -> None:
    """Keep what becomes of suggestions, and tune how readily they show."""
    _switch(invocation_of(ctx), True, json)


@app.command("off")
def turn_off(ctx: typer.Context, json: options.Json = False) -> None:
    """Keep nothing more, at once. What is there stays; `forget` deletes it."""
    _switch(invocation_of(ctx), False, json)


@app.command()
def status(ctx: typer.Context, json: options.Json = False) -> None:
    """Show whether it is on, what is kept, and how sure suggestions must be by now."""
    from keystroke.assist.completion.gate import THRESHOLDS
    from keystroke.assist.completion.tuning import tune_threshold
    from keystroke.clients.cli.console import format_size

    run = invocation_of(ctx)
    settings = run.settings
    default = THRESHOLDS[settings.assist.eagerness]
    rows: list[dict[str, Any]] = []
    kept = _kept(run)
    if kept is not None:
        with closing(kept):
            for group in kept.groups():
                threshold = tune_threshold(default, *kept.counts(group.language, group.project))
                rows.append({**dataclasses.asdict(group), "threshold": threshold, "default": default})
    file = _file(run)
    total = file.stat().st_size if file.exists() else 0
    if run.wants_json(json):
        run.console.json(
            {"enabled": settings.learn.enabled, "file": str(file), "bytes": total, "groups": rows}
        )
        return
    run.console.line(f"{'on' if settings.learn.enabled else 'off'}  {file}  {format_size(total)}")
    if rows:
        headings = ("language", "project", "shown", "accepted", "characters", "not shown", "shown from")
        cells = [
            (
                row["language"] or "-",
                row["project"],
                f"{row['shown']:,}",
                f"{row['accepted'] / max(1, row['shown']):.0%}",
                f"{row['characters']:,}",
                f"{row['unseen']:,}",
                f"{row['threshold']:.3f} (usually {row['default']:.2f})",
            )
            for row in rows
        ]
        run.console.table(headings, cells)


@app.command()
def show(
    ctx: typer.Context,
    number: Annotated[int | None, typer.Argument(help="One suggestion, with the code around it.")] = None,
    language: Language = None,
    project: Project = None,
    limit: Annotated[int, typer.Option(min=1, help="The newest so many.")] = 20,
    json: options.Json = False,
) -> None:
    """Show what is kept, newest first; with a number, everything about that one."""
    run = invocation_of(ctx)
    found = _outcomes(run, language=language, project=project, number=number, limit=limit)
    if number is not None and not found:
        raise InputError(f"there is no suggestion {number}; `keystroke learn show` lists them")
    if run.wants_json(json):
        run.console.json([dataclasses.asdict(outcome) for outcome in found])
    elif number is not None:
        _describe(run, found[0])
    elif not found:
        run.console.note("nothing is kept")
    else:
        cells = [
            (
                str(o.id),
                time.strftime("%Y-%m-%d %H:%M", time.localtime(o.at)),
                o.language or "-",
                o.became,
                f"{o.confidence:.2f}",
                (o.suggestion or f"{o.shown} characters").split("\n")[0][:60],
            )
            for o in found
        ]
        run.console.table(("number", "when", "language", "became", "sure", "suggestion"), cells)


@app.command()
def export(
    ctx: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Ends in .jsonl.xz; written whole.")],
    language: Language = None,
    project: Project = None,
    json: options.Json = False,
) -> None:
    """Write what you took, or wrote instead, as cases that `keystroke train` reads."""
    from keystroke.text.cases import Case, write_cases

    run = invocation_of(ctx)
    if not file.name.endswith(".jsonl.xz"):
        raise UsageError(f"{file} must end in .jsonl.xz: that is how training cases are kept")
    if file.exists():
        raise InputError(f"{file} is there already; remove it or choose another name")
    found = _outcomes(run, language=language, project=project)
    cases = [
        Case(_KIND[o.extent], o.project, "", "private", o.path, o.prefix, o.written, o.suffix)
        for o in reversed(found)
        if o.kind == "completion" and o.written.strip() and o.extent in _KIND
    ]
    if not cases:
        raise InputError("nothing is kept that could be exported; see `keystroke learn status`")
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
    if run.wants_json(json):
        run.console.json({"file": str(file), "cases": len(cases)})
    else:
        run.console.note(
            f"{len(cases):,} cases are in {file}; it holds your code, and is readable by you alone"
        )


@app.command()
def forget(
    ctx: typer.Context,
    number: Annotated[int | None, typer.Argument(help="Only this one.")] = None,
    language: Language = None,
    project: Project = None,
    days: Annotated[float | None, typer.Option(min=0.0, help="Only what is older than this.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
    json: options.Json = False,
) -> None:
    """Delete what is kept: all of it, or a part. Thresholds follow."""
    run = invocation_of(ctx)
    if not yes and not _agreed():
        raise typer.Exit(1)
    before = None if days is None else time.time() - days * 86_400
    gone = 0
    if (kept := _kept(run)) is not None:
        with closing(kept):
            gone = kept.delete(language=language, project=project, before=before, number=number)
    if run.wants_json(json):
        run.console.json({"forgotten": gone})
    else:
        run.console.note(f"{gone:,} suggestions are forgotten")


def _switch(run: Invocation, on: bool, json: bool) -> None:
    from keystroke.config.write import write_setting
    from keystroke.gateway.record.outcome_store import open_outcome_store

    if on or _file(run).exists():
        with closing(open_outcome_store(run.settings)) as kept:
            kept.set_paused(not on)
    file = write_setting("learn.enabled", on, run.environ)
    if run.wants_json(json):
        run.console.json({"enabled": on, "settings": str(file), "file": str(_file(run))})
        return
    if on:
        run.console.note(
            f"on: what becomes of suggestions is kept in {_file(run)}, for you alone, and sent nowhere; "
            "a gateway that already runs begins when it is next started"
        )
    else:
        run.console.note("off: nothing more is kept; `keystroke learn forget` deletes what is there")


def _file(run: Invocation) -> Path:
    from keystroke.gateway.record.outcome_store import outcome_file

    return outcome_file(run.settings)


def _kept(run: Invocation) -> OutcomeStore | None:
    """What is kept; None where nothing ever was, so that looking makes no file."""
    from keystroke.gateway.record.outcome_store import open_outcome_store

    return open_outcome_store(run.settings) if _file(run).exists() else None


def _outcomes(run: Invocation, **asked: Any) -> list[SuggestionOutcome]:
    kept = _kept(run)
    if kept is None:
        return []
    with closing(kept):
        return kept.outcomes(**asked)


def _describe(run: Invocation, outcome: SuggestionOutcome) -> None:
    for name in ("id", "at", "language", "project", "path", "model", "kind", "extent", "confidence", "became",
                 "shown", "taken", "worth"):  # fmt: skip
        run.console.line(f"{name:<11} {getattr(outcome, name)}")
    for name in ("prefix", "suggestion", "written", "suffix"):
        if text := getattr(outcome, name):
            run.console.line(f"--- {name}")
            run.console.line(text)


def _agreed() -> bool:
    from keystroke.clients.cli.changes import read_key

    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError("there is no terminal to ask on; say --yes to delete")
    return read_key("Delete what became of suggestions? [y/N] ", "yn") == "y"

"""`keystroke cache`: what Keystroke keeps on this machine, how much it is, and away with it.

Without names only what is made again is cleared. What is not (models, undo, history, a server's
database, settings) goes only when it is named, or with --everything, and nothing goes unasked.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.invocation import Invocation, invocation_of
from keystroke.errors import UsageError

if TYPE_CHECKING:
    from keystroke.clients.cli.stored_files import StoredFiles


def cache(
    ctx: typer.Context,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Only these kinds; see the list.")
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Remove them, after asking.")] = False,
    everything: Annotated[
        bool, typer.Option("--everything", help="Also what cannot be made again: models, undo, settings, ...")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
    json: options.Json = False,
) -> None:
    """Show what is kept on this machine and where; with --clear, remove it."""
    from keystroke.clients.cli.console import format_size
    from keystroke.clients.cli.stored_files import remove_empty_folders, stored_files

    run = invocation_of(ctx)
    known = stored_files(run.settings, run.environ)
    if unknown := [name for name in names or () if name not in {kind.name for kind in known}]:
        raise UsageError(f"{unknown[0]} is not kept here; there are {', '.join(k.name for k in known)}")
    chosen = [kind for kind in known if kind.name in names] if names else known
    as_json = run.wants_json(json)
    if not clear:
        _show(run, chosen, as_json)
        return
    going = [kind for kind in chosen if names or everything or kind.regenerable]
    total = sum(kind.measure()[0] for kind in going)
    if not yes and not _agreed(going, format_size(total)):
        raise typer.Exit(1)
    freed = {kind.name: kind.clear() for kind in going}
    if everything:
        remove_empty_folders(run.settings, run.environ)
    if as_json:
        run.console.json({"freed": freed})
    else:
        run.console.note(f"{format_size(sum(freed.values()))} freed")


def _show(run: Invocation, chosen: list[StoredFiles], as_json: bool) -> None:
    from keystroke.clients.cli.console import format_size

    rows: list[dict[str, Any]] = []
    for kind in chosen:
        total, count = kind.measure()
        where = [str(place) for place in kind.where]
        row = {"name": kind.name, "what": kind.what, "where": where, "bytes": total, "files": count}
        rows.append({**row, "made_again": kind.regenerable})
    if as_json:
        run.console.json(rows)
        return
    cells = [
        (
            row["name"],
            format_size(row["bytes"]) if row["files"] else "-",
            "by --clear" if row["made_again"] else "if named",
            row["what"],
            row["where"][0] if row["where"] else "",
        )
        for row in rows
    ]
    run.console.table(("name", "size", "cleared", "what", "where"), cells)
    in_all = format_size(sum(row["bytes"] for row in rows))
    run.console.note(f"{in_all} in all; `keystroke cache --clear` removes what is made again")


def _agreed(going: list[StoredFiles], total: str) -> bool:
    from keystroke.clients.cli.changes import read_key

    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError("there is no terminal to ask on; say --yes to remove")
    return read_key(f"Remove {', '.join(kind.name for kind in going)} ({total})? [y/N] ", "yn") == "y"

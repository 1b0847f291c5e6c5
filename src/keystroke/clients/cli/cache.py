"""`keystroke cache`: lists the files that Keystroke stores on this machine, and deletes them.

Without names only files that can be regenerated are deleted. Others (models, undo, history, a server's
database, settings) are deleted only when named or with --everything, and always after confirmation.
--everything also stops the gateway and takes back what `keystroke setup` wrote for editors.
"""

from __future__ import annotations

from itertools import chain
from typing import Annotated, Any

import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.console import format_size
from keystroke.clients.cli.options import Invocation, argument, invocation_of, option
from keystroke.clients.cli.setup_record import SetupRecord
from keystroke.clients.cli.stored_files import StoredFiles, remove_empty_folders, stored_files
from keystroke.errors import UsageError


def cache(
    ctx: typer.Context,
    names: Annotated[
        list[str] | None, argument("Only these kinds of files. Default: all.", metavar="NAME")
    ] = None,
    clear: Annotated[
        bool, option("--clear", "Delete files that can be regenerated, or the named kinds (asks first).")
    ] = False,
    everything: Annotated[
        bool, option("--everything", "With --clear: also models, undo history, settings and other user data.")
    ] = False,
    yes: options.Yes = False,
    json: options.Json = False,
) -> None:
    from keystroke.clients.cli.changes import confirm_deletion

    run = invocation_of(ctx)
    known = stored_files(run.settings, run.environ)
    if unknown := [name for name in names or () if name not in {kind.name for kind in known}]:
        raise UsageError(f"there is no kind {unknown[0]}; choose from {', '.join(k.name for k in known)}")
    chosen = [kind for kind in known if kind.name in names] if names else known
    if not clear:
        _show(run, chosen)
        return
    doomed = [kind for kind in chosen if names or everything or kind.regenerable]
    total = format_size(sum(kind.measure()[0] for kind in doomed))
    if not yes and not confirm_deletion(f"Delete {', '.join(kind.name for kind in doomed)} ({total})?"):
        raise typer.Exit(1)
    if everything:
        from keystroke.clients.cli.processes import stop_all
        from keystroke.clients.running import running_processes

        # A gateway would write files again. Language servers and terminals belong to whoever started them.
        state = run.settings.paths.state
        stop_all(run, [one for one in running_processes() if one.belongs_to(state)])
        if not names and (record := SetupRecord.load(state)) is not None:
            for sentence in chain(*record.undo_programs()):
                run.console.note(sentence)
        listed = {kind.name for kind in doomed}
        doomed = [kind for kind in stored_files(run.settings, run.environ) if kind.name in listed]
    freed = {kind.name: kind.clear() for kind in doomed}
    if everything:
        remove_empty_folders(run.settings, run.environ)
    run.report({"freed": freed}, f"{format_size(sum(freed.values()))} freed")


def _show(run: Invocation, chosen: list[StoredFiles]) -> None:
    rows: list[dict[str, Any]] = []
    for kind in chosen:
        total, count = kind.measure()
        where = [str(place) for place in kind.where]
        row = {"name": kind.name, "what": kind.what, "where": where, "bytes": total, "files": count}
        rows.append({**row, "made_again": kind.regenerable})
    if run.json:
        run.console.json(rows)
        return
    cells = [
        (
            row["name"],
            format_size(row["bytes"]) if row["files"] else "-",
            "by --clear" if row["made_again"] else "if named",  # models and user data need their name
            row["what"],
            row["where"][0] if row["where"] else "",
        )
        for row in rows
    ]
    run.console.table(("name", "size", "deleted", "what", "where"), cells)
    in_all = format_size(sum(row["bytes"] for row in rows))
    run.console.note(f"{in_all} in all; `keystroke cache --clear` deletes what can be regenerated")

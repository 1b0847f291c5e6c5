"""`keystroke store`: the server's database, copied out and back.

Works on whatever `server.database` names, SQLite or Postgres, while servers run. A backup is one file of
JSON lines that any of the two can take back; what is there already is never overwritten unasked.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.invocation import invocation_of

app = typer.Typer(
    name="store",
    help="Back up and restore what a server keeps: responses, usage, keys.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
def backup(
    ctx: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Written whole or not at all.")],
    json: options.Json = False,
) -> None:
    """Copy everything into one file. It holds what was said: it is readable by you alone."""
    from keystroke.gateway.record.backup import write_backup
    from keystroke.gateway.record.store import open_store

    run = invocation_of(ctx)
    with closing(open_store(run.settings)) as store, run.console.progress() as progress:
        rows = write_backup(store, file, progress)
    if run.wants_json(json):
        run.console.json({"file": str(file), "rows": rows})
    else:
        run.console.note(f"{sum(rows.values()):,} rows are in {file}")


@app.command()
def restore(
    ctx: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that `backup` wrote.")],
    json: options.Json = False,
) -> None:
    """Bring a backup's rows back; rows that are there already stay as they are."""
    from keystroke.gateway.record.backup import read_backup
    from keystroke.gateway.record.store import open_store

    run = invocation_of(ctx)
    with closing(open_store(run.settings)) as store, run.console.progress() as progress:
        rows = read_backup(store, file, progress)
    if run.wants_json(json):
        run.console.json({"file": str(file), "rows": rows})
    else:
        run.console.note(f"{sum(rows.values()):,} rows were brought back from {file}")

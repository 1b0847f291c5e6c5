"""`keystroke store`: backs up and restores the server's database, SQLite or Postgres, while servers run.

A backup is one file of JSON lines that either database can restore. Existing rows are never overwritten.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.options import argument, invocation_of

app = options.command_group("store", "Back up and restore a server's database: responses, usage, keys.")


@app.command()
def backup(
    ctx: typer.Context,
    file: Annotated[Path, argument("The file to write.", metavar="FILE")],
    json: options.Json = False,
) -> None:
    """Copy the database into one file. It contains conversations; only you can read it."""
    from keystroke.gateway.record.backup import write_backup
    from keystroke.gateway.record.store import open_store

    run = invocation_of(ctx)
    with closing(open_store(run.settings)) as store, run.console.progress() as progress:
        rows = write_backup(store, file, progress)
    run.report({"file": str(file), "rows": rows}, f"wrote {sum(rows.values()):,} rows to {file}")


@app.command()
def restore(
    ctx: typer.Context,
    file: Annotated[Path, argument("A file that `backup` wrote.", metavar="FILE")],
    json: options.Json = False,
) -> None:
    """Restore the rows of a backup; existing rows are not changed."""
    from keystroke.gateway.record.backup import read_backup
    from keystroke.gateway.record.store import open_store

    run = invocation_of(ctx)
    with closing(open_store(run.settings)) as store, run.console.progress() as progress:
        rows = read_backup(store, file, progress)
    run.report({"file": str(file), "rows": rows}, f"restored {sum(rows.values()):,} rows from {file}")

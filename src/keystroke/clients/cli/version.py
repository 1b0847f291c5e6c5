"""`keystroke version`."""

from __future__ import annotations

import platform

import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.installed_version import release
from keystroke.clients.cli.options import invocation_of


def version(ctx: typer.Context, json: options.Json = False) -> None:
    run = invocation_of(ctx)
    if run.json:
        run.console.json(
            {"keystroke": release(), "python": platform.python_version(), "system": platform.platform()}
        )
    else:
        run.console.line(f"keystroke {release()}")

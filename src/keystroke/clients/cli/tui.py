"""`keystroke tui`, and `keystroke` alone on a terminal: runs the terminal interface on a gateway."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from keystroke.clients.cli.options import argument, invocation_of, option
from keystroke.errors import InputError, UsageError


def tui(
    ctx: typer.Context,
    folder: Annotated[
        Path | None, argument("The folder for tasks. Default: the current one.", metavar="FOLDER")
    ] = None,
    model: Annotated[
        str, option("--model", "-m", "The model: a name, a role, or auto.", metavar="MODEL")
    ] = "auto",
    url: Annotated[str | None, option("Use this server.", metavar="URL")] = None,
) -> None:
    from keystroke.clients.cli.shared_gateway import locate_gateway
    from keystroke.clients.tui.app import TerminalApp

    run = invocation_of(ctx)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("`keystroke tui` needs a terminal; in a pipe use `keystroke chat` or `keystroke do`")
    workspace = (folder or Path.cwd()).resolve()
    if not workspace.is_dir():
        raise InputError(f"{workspace} is not a folder; name one that exists")
    TerminalApp(locate_gateway(run, url), workspace, run.settings.paths.state, model=model).run()

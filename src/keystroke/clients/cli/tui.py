"""`keystroke tui`, and `keystroke` alone on a terminal: chat and tasks on one screen.

Finds the gateway and hands over; everything on the screen is `clients/tui`'s.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from keystroke.clients.cli.invocation import invocation_of
from keystroke.errors import InputError, UsageError


def tui(
    ctx: typer.Context,
    folder: Annotated[
        Path | None, typer.Argument(metavar="FOLDER", help="What tasks work in. Default: here.")
    ] = None,
    model: Annotated[
        str, typer.Option("--model", "-m", metavar="MODEL", help="Who answers: a name, a role, or auto.")
    ] = "auto",
    url: Annotated[str | None, typer.Option(metavar="URL", help="Use this server.")] = None,
) -> None:
    """Chat and tasks on one screen."""
    from keystroke.clients.cli.shared_gateway import shared_gateway
    from keystroke.clients.gateway_address import GatewayAddress
    from keystroke.clients.tui.app import TerminalApp

    run = invocation_of(ctx)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("this needs a terminal; in a pipe use `keystroke chat` or `keystroke do`")
    workspace = (folder or Path.cwd()).resolve()
    if not workspace.is_dir():
        raise InputError(f"{workspace} is not a folder; name one that exists")
    if url is not None:
        place = GatewayAddress(url.rstrip("/"), os.environ.get(run.settings.server.api_key_env) or None)
    else:
        with run.console.progress() as progress:
            place = shared_gateway(run).locate_blocking(on_progress=progress)
    TerminalApp(place, workspace, run.settings.paths.state, model=model).run()

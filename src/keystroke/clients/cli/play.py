"""`keystroke play`: the playground in a browser.

Finds a server (the one named, or the gateway this machine's commands share) and opens its page. The key
travels in the address's fragment, which browsers never send, through a file that this user alone can read: a
program's arguments can be read by everybody on the machine.
"""

from __future__ import annotations

import html
import os
import webbrowser
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from keystroke.clients.cli.invocation import invocation_of


def play(
    ctx: typer.Context,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", "-m", metavar="MODEL", help="Begin with this model; may be repeated."),
    ] = None,
    url: Annotated[str | None, typer.Option(metavar="URL", help="Open the page of this server.")] = None,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open a browser, or only print the address.")
    ] = True,
) -> None:
    """Open the playground: an editor in the browser on the live channel."""
    from keystroke.clients.cli.shared_gateway import shared_gateway
    from keystroke.clients.gateway_address import GatewayAddress

    run = invocation_of(ctx)
    if url is not None:
        place = GatewayAddress(url.rstrip("/"), os.environ.get(run.settings.server.api_key_env) or None)
    else:
        gateway = shared_gateway(run, model or ())
        with run.console.progress() as progress:
            place = gateway.locate_blocking(on_progress=progress)
    address = f"{place.url}/" + (f"#key={quote(place.token, safe='')}" if place.token else "")
    if run.json:
        run.console.json({"url": f"{place.url}/", "key": place.token})
        return
    if not browser:
        run.console.line(address)
        return
    door = address if place.token is None else _door(run.settings.paths.state, address)
    if webbrowser.open(door):
        run.console.note(f"the playground is open at {place.url}/")
    else:
        run.console.note("no browser could be opened here; open this address:")
        run.console.line(address)


def _door(state: Path, address: str) -> str:
    """A page that leads to `address`, for this user's eyes; its own address holds no key."""
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = state / "play.html"
    file.unlink(missing_ok=True)
    with open(file, "x", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600)) as out:
        out.write(
            '<!doctype html><meta charset="utf-8"><title>Keystroke</title>'
            f'<meta http-equiv="refresh" content="0; url={html.escape(address)}">'
        )
    return file.resolve().as_uri()

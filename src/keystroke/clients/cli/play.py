"""`keystroke play`: opens the playground page of a gateway in the browser.

The key is passed in the URL fragment, which browsers never send, through a file that only this user can read:
other users of the machine could read a program's arguments.
"""

from __future__ import annotations

import html
import webbrowser
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from keystroke.clients.cli.options import invocation_of, option
from keystroke.replacing import replace_file


def play(
    ctx: typer.Context,
    model: Annotated[
        list[str] | None, option("--model", "-m", "Load this model first; may be repeated.", metavar="MODEL")
    ] = None,
    url: Annotated[str | None, option("Open the page of this server.", metavar="URL")] = None,
    browser: Annotated[
        bool, option("--browser/--no-browser", "Open a browser, or only print the address.")
    ] = True,
) -> None:
    from keystroke.clients.cli.shared_gateway import locate_gateway

    run = invocation_of(ctx)
    gateway = locate_gateway(run, url, model or ())
    address = f"{gateway.url}/" + (f"#key={quote(gateway.token, safe='')}" if gateway.token else "")
    if run.json:
        run.console.json({"url": f"{gateway.url}/", "key": gateway.token})
        return
    if not browser:
        run.console.line(address)
        return
    if webbrowser.open(
        address if gateway.token is None else _redirect_page(run.settings.paths.state, address)
    ):
        run.console.note(f"the playground is open at {gateway.url}/")
    else:
        run.console.note("no browser could be opened here; open this address:")
        run.console.line(address)


def _redirect_page(state: Path, address: str) -> str:
    """The URL of a private file that redirects to `address`; that URL contains no key."""
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = state / "play.html"
    page = (
        '<!doctype html><meta charset="utf-8"><title>Keystroke</title>'
        f'<meta http-equiv="refresh" content="0; url={html.escape(address)}">'
    )
    replace_file(file, page.encode())
    return file.resolve().as_uri()

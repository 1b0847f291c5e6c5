"""`keystroke lsp`: the language server for editors.

Puts the server together with a way to a gateway: the one named, or this machine's own, which is
started with the options given here. Standard output belongs to the editor, whose first message is answered
before anything heavy is loaded.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from keystroke.clients.cli.invocation import Invocation, invocation_of
from keystroke.errors import UsageError

if TYPE_CHECKING:
    from keystroke.clients.gateway_address import GatewayAddress
    from keystroke.clients.lsp.server import KeystrokeServer

    Locate = Callable[[], Awaitable[GatewayAddress]]


def lsp(
    ctx: typer.Context,
    gateway: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Use this gateway; without it one is found or started here."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", "-m", metavar="MODEL", help="Start the gateway with this model."),
    ] = None,
    tcp: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Serve one editor over TCP, to debug.")
    ] = None,
    linger: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="How long a gateway started here outlives its editors; sharing.idle_s if left out.",
        ),
    ] = None,
    stdio: Annotated[
        bool, typer.Option("--stdio", help="Use standard input and output (the default).")
    ] = False,
    echo: Annotated[bool, typer.Option("--echo", "--fake", hidden=True)] = False,
) -> None:
    """Serve an editor over the Language Server Protocol."""
    run = invocation_of(ctx)
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )
    logging.getLogger("pygls").setLevel(logging.CRITICAL)  # it logs whole messages, and errors we answer
    raise typer.Exit(asyncio.run(_serve(run, gateway, model or [], tcp, linger, echo)))


async def _serve(
    run: Invocation, gateway: str | None, models: list[str], tcp: str | None, linger: float | None, echo: bool
) -> int:
    from keystroke.clients.cli.release import release

    locate = locate_by(run, gateway, models, linger, echo)
    if tcp is not None:
        from keystroke.clients.lsp.transport import serve_tcp

        address = _address(tcp)
        server = _server(run, locate, release())
        return await _until_over(server, serve_tcp(server.protocol, server.exited, *address))
    from keystroke.clients.lsp.early_initialize import answer_initialize
    from keystroke.clients.lsp.frames import frame, read_body, standard_streams

    reader, target = await standard_streams()
    body = await read_body(reader)
    if body is None:
        return 1
    first = answer_initialize(body, release())
    if first.answered_id is not None:
        # The editor goes on while everything else is loaded, and so does the gateway, which takes longer.
        try:
            target.write(frame(first.reply))
            target.flush()
        except BrokenPipeError:
            return 1
        locate = _ahead(locate)
    server = await asyncio.to_thread(_server, run, locate, release())
    from keystroke.clients.lsp.transport import serve_stdio

    return await _until_over(server, serve_stdio(server.protocol, reader, target, server.exited, first))


def _server(run: Invocation, locate: Locate, version: str) -> KeystrokeServer:
    """Most of the time it takes to start is spent in these imports."""
    from keystroke.clients.lsp.features import register
    from keystroke.clients.lsp.server import KeystrokeServer

    server = KeystrokeServer(run.settings.assist, locate, version)
    register(server)
    return server


async def _until_over(server: KeystrokeServer, serving: Awaitable[None]) -> int:
    try:
        await serving
    except BrokenPipeError:
        pass  # the editor is gone
    finally:
        await server.stop()
    return server.exit_code


def locate_by(
    run: Invocation,
    gateway: str | None,
    models: Sequence[str] = (),
    linger: float | None = None,
    echo: bool = False,
) -> Locate:
    """The way to a gateway: the one named, with the key of the environment, or this machine's own."""
    return _fixed(gateway, run) if gateway is not None else _own(run, list(models), linger, echo)


def _fixed(url: str, run: Invocation) -> Locate:
    from keystroke.clients.gateway_address import GatewayAddress

    async def locate() -> GatewayAddress:
        keys = run.environ.get(run.settings.server.api_key_env, "").split(",")
        return GatewayAddress(url.rstrip("/"), keys[0].strip() or None)

    return locate


def _own(run: Invocation, models: list[str], linger: float | None, echo: bool) -> Locate:
    from keystroke.clients.cli.shared_gateway import shared_gateway

    return shared_gateway(run, models, linger=linger, echo=echo, project=False).locate


def _ahead(locate: Locate) -> Locate:
    """Begin to look now; the first who asks gets what that finds, everybody after that asks anew."""
    begun: list[asyncio.Future[GatewayAddress]] = [asyncio.ensure_future(locate())]
    begun[0].add_done_callback(lambda found: found.cancelled() or found.exception())  # asked for or not

    async def looked() -> GatewayAddress:
        return await (begun.pop() if begun else locate())

    return looked


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit():
        raise UsageError(f"--tcp wants HOST:PORT, for example 127.0.0.1:2087, not {text!r:.60}")
    return host.strip("[]") or "127.0.0.1", int(port)

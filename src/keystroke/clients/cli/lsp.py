"""`keystroke lsp`: runs the language server.

It uses the gateway named by `--gateway`, or the shared one, started with the options given here. Standard
output carries only LSP messages. The editor's first message is answered before heavy modules are imported.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.options import Invocation, invocation_of, option
from keystroke.errors import UsageError

if TYPE_CHECKING:
    from keystroke.clients.gateway_address import GatewayAddress
    from keystroke.clients.lsp.server import KeystrokeServer

    Locate = Callable[[], Awaitable[GatewayAddress]]


def lsp(
    ctx: typer.Context,
    gateway: options.Gateway = None,
    model: Annotated[
        list[str] | None, option("--model", "-m", "Start the gateway with this model.", metavar="MODEL")
    ] = None,
    tcp: Annotated[
        str | None, option("Serve one editor over TCP, for debugging.", metavar="HOST:PORT")
    ] = None,
    linger: Annotated[
        float | None,
        option(
            "How long a gateway started here runs without clients. Default: sharing.idle_s.",
            metavar="SECONDS",
            min=0,
        ),
    ] = None,
    stdio: Annotated[bool, option("--stdio", "Use standard input and output (the default).")] = False,
    echo: Annotated[bool, typer.Option("--echo", "--fake", hidden=True)] = False,
) -> None:
    run = invocation_of(ctx)
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )
    logging.getLogger("pygls").setLevel(logging.CRITICAL)  # it logs whole messages
    raise typer.Exit(asyncio.run(_serve(run, gateway, model or [], tcp, linger, echo)))


async def _serve(
    run: Invocation, gateway: str | None, models: list[str], tcp: str | None, linger: float | None, echo: bool
) -> int:
    from keystroke.clients.cli.installed_version import release

    locate = gateway_locator(run, gateway, models, linger, echo)
    if tcp is not None:
        from keystroke.clients.lsp.transport import serve_tcp

        address = _parse_address(tcp)
        server = _server(run, locate, release())
        return await _until_exit(server, serve_tcp(server.protocol, server.exited, *address))
    from keystroke.clients.lsp.early_initialize import answer_initialize
    from keystroke.clients.lsp.frames import frame, read_body, standard_streams

    reader, target = await standard_streams()
    body = await read_body(reader)
    if body is None:
        return 1
    first = answer_initialize(body, release())
    if first.answered_id is not None:
        # The gateway starts while the server's modules are loaded.
        try:
            target.write(frame(first.reply))
            target.flush()
        except BrokenPipeError:
            return 1
        locate = _prefetch(locate)
    server = await asyncio.to_thread(_server, run, locate, release())
    from keystroke.clients.lsp.transport import serve_stdio

    return await _until_exit(server, serve_stdio(server.protocol, reader, target, server.exited, first))


def _server(run: Invocation, locate: Locate, version: str) -> KeystrokeServer:
    """Build the server; these imports take most of the start-up time."""
    from keystroke.clients.lsp.features import register
    from keystroke.clients.lsp.server import KeystrokeServer

    server = KeystrokeServer(run.settings.assist, locate, version)
    register(server)
    return server


async def _until_exit(server: KeystrokeServer, serving: Awaitable[None]) -> int:
    try:
        await serving
    except BrokenPipeError:
        pass  # the editor is gone
    finally:
        await server.stop()
    return server.exit_code


def gateway_locator(
    run: Invocation,
    gateway: str | None,
    models: Sequence[str] = (),
    linger: float | None = None,
    echo: bool = False,
) -> Locate:
    """A function that locates the gateway: the one at URL `gateway`, or the shared one."""
    from keystroke.clients.cli.shared_gateway import named_gateway, shared_gateway

    if gateway is None:
        return shared_gateway(run, list(models), linger=linger, echo=echo, project=False).locate

    async def locate() -> GatewayAddress:
        return named_gateway(run, gateway)

    return locate


def _prefetch(locate: Locate) -> Locate:
    """Start locating now; the first call returns that result, later calls locate again."""
    started: list[asyncio.Future[GatewayAddress]] = [asyncio.ensure_future(locate())]
    started[0].add_done_callback(lambda done: done.cancelled() or done.exception())  # mark it as retrieved

    async def first_or_again() -> GatewayAddress:
        return await (started.pop() if started else locate())

    return first_or_again


def _parse_address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit():
        raise UsageError(f"--tcp needs HOST:PORT, for example 127.0.0.1:2087, not {text!r:.60}")
    return host.strip("[]") or "127.0.0.1", int(port)

"""`keystroke scale`: serves with many replicas on Ray, on this machine or on a cluster.

On this machine Ray runs only as long as the command; a cluster keeps the application after the command ends.
"""

from __future__ import annotations

import dataclasses
import signal
import socket
import threading
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.invocation import Invocation, invocation_of
from keystroke.clients.cli.options import option
from keystroke.errors import ConfigError

if TYPE_CHECKING:
    from keystroke.config import Settings

app = options.command_group(
    "scale", "Serve with many gateway and engine replicas on Ray, on this machine or a cluster."
)

Address = Annotated[
    str | None, option("--address", "Address of a Ray cluster. Default: a local one.", metavar="ADDRESS")
]


@app.command()
def up(
    ctx: typer.Context,
    address: Address = None,
    gateways: Annotated[int | None, option("Gateway replicas.", min=1)] = None,
    replicas: Annotated[int | None, option("Engine replicas of each model.", min=1)] = None,
    host: options.Host = None,
    port: options.Port = None,
    echo: Annotated[
        bool, option("--echo", "Serve a model that echoes its input, to test without weights.")
    ] = False,
    timeout: Annotated[
        float | None,
        option("Give up waiting for replicas after this long. Default: never.", min=1, metavar="SECONDS"),
    ] = None,
    json: options.Json = False,
) -> None:
    """Start the application; if it already runs on the cluster, replace it replica by replica."""
    run = invocation_of(ctx)
    flags = {
        "scale.address": address,
        "scale.gateways": gateways,
        "scale.replicas": replicas,
        "server.host": host,
        "server.port": port,
    }
    settings = run.settings_with(flags)
    settings, held = _with_port(settings)
    with held, _ray(settings) as serve:
        from keystroke.scale.application import NAME, EchoLoader, application, replica_needs
        from keystroke.scale.rollout import deploy

        made = application(settings, echo=EchoLoader() if echo else None)
        if not run.json:
            run.console.note("starting replicas; this takes a few seconds")
        deploy(
            serve,
            made,
            NAME,
            needs=replica_needs(settings, echo=echo),
            patience=timeout,
            final=settings.scale.address is None,
            say=run.console.note,
        )
        _print_address(run, settings)
        if settings.scale.address is None:
            _wait_for_signal()
            run.console.note("waiting for running answers to finish")


@app.command()
def status(ctx: typer.Context, address: Address = None, json: options.Json = False) -> None:
    """Show the replicas of the application on a cluster."""
    run = invocation_of(ctx)
    with _connect(run, address) as serve:
        from keystroke.scale.application import NAME

        found = serve.status().applications.get(NAME)
        if found is None:
            raise ConfigError("Keystroke does not run on this cluster; start it with `keystroke scale up`")
        rows: dict[str, dict[str, Any]] = {
            name: {
                "status": str(d.status.value),
                "replicas": {str(k): v for k, v in d.replica_states.items()},
            }
            for name, d in found.deployments.items()
        }
    if run.json:
        run.console.json({"status": str(found.status.value), "deployments": rows})
        return
    run.console.line(f"{found.status.value}")
    for name, row in rows.items():
        states = ", ".join(f"{count} {state.lower()}" for state, count in row["replicas"].items())
        run.console.line(f"  {name}: {states}")


@app.command()
def down(ctx: typer.Context, address: Address = None) -> None:
    """Remove the application from a cluster; running answers finish first."""
    run = invocation_of(ctx)
    with _connect(run, address) as serve:
        from keystroke.scale.application import NAME

        if NAME not in serve.status().applications:
            raise ConfigError("Keystroke does not run on this cluster, so there is nothing to remove")
        serve.delete(NAME)
    run.console.note("the application was removed")


@app.command()
def manifest(
    ctx: typer.Context,
    image: Annotated[str, option("Container image of this release.")] = "keystroke:latest",
    output: Annotated[
        Path | None, option("--output", "-o", "Write here, not to the screen.", metavar="FILE")
    ] = None,
) -> None:
    """Print the KubeRay manifest of these settings."""
    from keystroke.scale.kuberay import render_manifest

    text = render_manifest(invocation_of(ctx).settings, image)
    if output is None:
        invocation_of(ctx).console.line(text.rstrip("\n"))
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}") from None


def _ray(settings: Settings) -> Any:
    """Start or join Ray, after checking the store and the keys."""
    from keystroke.gateway.app import check_exposure
    from keystroke.gateway.record.store import open_store
    from keystroke.scale.cluster import connect_ray

    with closing(open_store(settings)) as store:  # creates the tables once, before the gateways start
        check_exposure(settings.server, store.keys())
    if settings.scale.address is not None and settings.server.database is None:
        raise ConfigError(
            "gateways on several machines need a shared database; set server.database to a Postgres URL"
        )
    return connect_ray(settings)


def _connect(run: Invocation, address: str | None) -> Any:
    from keystroke.scale.cluster import connect_ray

    settings = run.settings_with({"scale.address": address})
    if settings.scale.address is None:
        raise ConfigError("name the cluster with --address; a local one ends with its `keystroke scale up`")
    return connect_ray(settings, deploys=False)


def _with_port(settings: Settings) -> tuple[Settings, socket.socket]:
    """Settings with a concrete port, and a socket that reserves it until gateways listen on it."""
    from keystroke.gateway.app import listen

    if settings.scale.address is not None:
        return settings, socket.socket()
    held = listen(settings.server, shared=True)  # bound but not listening, so it gets no connections
    port = held.getsockname()[1]
    return dataclasses.replace(settings, server=dataclasses.replace(settings.server, port=port)), held


def _wait_for_signal() -> None:
    """Wait for SIGINT or SIGTERM."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    stop.wait()


def _print_address(run: Invocation, settings: Settings) -> None:
    server = settings.server
    url = f"{'https' if server.tls_certificate else 'http'}://{server.host}:{server.port}"
    if run.json:
        run.console.json({"url": url, "gateways": settings.scale.gateways, "address": settings.scale.address})
    elif settings.scale.address is None:
        run.console.note(f"serving at {url} (OpenAI base URL: {url}/v1); Ctrl-C stops")
    else:
        run.console.note(f"running on {settings.scale.address}; each gateway listens on port {server.port}")

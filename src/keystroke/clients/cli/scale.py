"""`keystroke scale`: serves with many replicas on Ray, on this machine or on a cluster.

On this machine Ray runs only as long as the command, which starts it again when it is lost; a cluster keeps
the application after the command ends. Mistakes are reported before any Ray is started.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.options import Invocation, invocation_of, option
from keystroke.errors import ConfigError

if TYPE_CHECKING:
    from keystroke.config import Settings
    from keystroke.scale.supervisor import LocalState

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
    if settings.scale.address is not None:
        _up_on_cluster(run, settings, echo, timeout)
        return
    from keystroke.scale.capacity import check_fits, check_models
    from keystroke.scale.local_ray import ServeOrder
    from keystroke.scale.supervisor import Supervisor, read_state

    if (other := read_state(settings)) is not None:
        raise ConfigError(
            f"`keystroke scale up` already runs here as process {other.pid} ({other.url}); stop it with "
            "`keystroke scale down`, or give this one another paths.state"
        )
    files = {}
    if not echo:
        with run.console.progress() as progress:
            files = check_models(settings, progress)
    check_fits(settings, echo=echo, files=files)
    _check_store(settings)
    settings, reserved = _with_port(settings)
    if not run.json:
        run.console.note("starting replicas; this takes a few seconds")
    with reserved:
        Supervisor(
            ServeOrder(settings, echo, timeout),
            _url(settings),
            say=run.console.note,
            ready=lambda: _print_address(run, settings),
        ).serve()


def _up_on_cluster(run: Invocation, settings: Settings, echo: bool, timeout: float | None) -> None:
    from keystroke.scale.cluster import connect_ray, ray_output_to

    _check_store(settings)
    if settings.server.database is None:
        raise ConfigError(
            "gateways on several machines need a shared database; set server.database to a Postgres URL"
        )
    with ray_output_to(settings.paths.state / "scale.log"), connect_ray(settings) as serve:
        from keystroke.scale.application import deploy_settings

        if not run.json:
            run.console.note("starting replicas; this takes a few seconds")
        deploy_settings(serve, settings, echo, timeout, run.console.note)
        _print_address(run, settings)


Timeout = Annotated[
    float, option("Give up on a cluster that does not answer after this long.", min=0.5, metavar="SECONDS")
]


@app.command()
def status(
    ctx: typer.Context, address: Address = None, timeout: Timeout = 10.0, json: options.Json = False
) -> None:
    """Show the replicas of the application on a cluster, or of `keystroke scale up` on this machine."""
    run = invocation_of(ctx)
    settings = run.settings_with({"scale.address": address})
    if settings.scale.address is None:
        found = _local_state(settings)
        more = {name: getattr(found, name) for name in ("url", "pid", "restarts", "metrics", "log")}
        state: dict[str, Any] | None = {"status": found.status, "deployments": found.deployments, **more}
    else:
        from keystroke.scale.cluster_query import ClusterQuery, ask_cluster

        state = ask_cluster(ClusterQuery(settings), timeout)
    if state is None:
        raise ConfigError("Keystroke does not run on this cluster; start it with `keystroke scale up`")
    if run.json:
        run.console.json(state)
        return
    restarts = f", Ray restarted {state['restarts']} times" if state.get("restarts") else ""
    run.console.line(f"{state['status']}{' at ' + state['url'] if 'url' in state else ''}{restarts}")
    for name, row in state["deployments"].items():
        states = ", ".join(f"{count} {kind.lower()}" for kind, count in row["replicas"].items())
        run.console.line(f"  {name}: {states}")


@app.command()
def down(ctx: typer.Context, address: Address = None, timeout: Timeout = 10.0) -> None:
    """Remove the application from a cluster, or stop the local one; running answers finish first."""
    run = invocation_of(ctx)
    settings = run.settings_with({"scale.address": address})
    if settings.scale.address is None:
        from keystroke.scale.supervisor import read_state

        found = _local_state(settings)
        os.kill(found.pid, signal.SIGTERM)
        # Its state file goes last. The process itself may stay as a zombie that its parent does not collect.
        while (state := read_state(settings)) is not None and state.pid == found.pid:
            time.sleep(0.1)
        run.console.note("stopped")
        return
    from keystroke.scale.cluster_query import ClusterQuery, ask_cluster

    ask_cluster(ClusterQuery(settings, removes=True), timeout)
    run.console.note("the application was removed")


@app.command()
def manifest(
    ctx: typer.Context,
    image: Annotated[
        str | None, option("Container image; default: keystroke of this version.", metavar="IMAGE")
    ] = None,
    host: Annotated[
        str, option("--ingress-host", "Name that clients use, for the Ingress.", metavar="NAME")
    ] = "keystroke.example.com",
    output: Annotated[
        Path | None, option("--output", "-o", "Write here, not to the screen.", metavar="FILE")
    ] = None,
) -> None:
    """Print the KubeRay manifest of these settings."""
    from keystroke.scale.kuberay import default_image, render_manifest

    text = render_manifest(invocation_of(ctx).settings, image or default_image(), host)
    if output is None:
        invocation_of(ctx).console.line(text.rstrip("\n"))
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}") from None


def _check_store(settings: Settings) -> None:
    """Create the tables once, before gateways start, and require a key beyond loopback."""
    from keystroke.gateway.app import check_exposure
    from keystroke.gateway.record.store import open_store

    with closing(open_store(settings)) as store:
        check_exposure(settings.server, store.keys())


def _local_state(settings: Settings) -> LocalState:
    from keystroke.scale.supervisor import read_state

    found = read_state(settings)
    if found is None:
        raise ConfigError("no `keystroke scale up` runs on this machine; name a cluster with --address")
    return found


def _with_port(settings: Settings) -> tuple[Settings, socket.socket]:
    """Settings with a concrete port, and a socket that reserves it until gateways listen on it."""
    from keystroke.gateway.app import listen

    reserved = listen(settings.server, shared=True)  # bound but not listening, so it gets no connections
    port = reserved.getsockname()[1]
    return dataclasses.replace(settings, server=dataclasses.replace(settings.server, port=port)), reserved


def _url(settings: Settings) -> str:
    server = settings.server
    return f"{'https' if server.tls_certificate else 'http'}://{server.host}:{server.port}"


def _print_address(run: Invocation, settings: Settings) -> None:
    server, url = settings.server, _url(settings)
    text = f"running on {settings.scale.address}; each gateway listens on port {server.port}"
    if settings.scale.address is None:
        text = f"serving at {url} (OpenAI base URL: {url}/v1); Ctrl-C stops"
    run.report({"url": url, "gateways": settings.scale.gateways, "address": settings.scale.address}, text)

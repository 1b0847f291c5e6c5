"""`keystroke ps` and `keystroke stop`: shows the Keystroke processes of this user, and ends them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.console import format_count, format_size
from keystroke.clients.cli.options import Invocation, argument, invocation_of, option
from keystroke.clients.gateway_address import GatewayAddress
from keystroke.clients.gateway_http import GatewayHttp
from keystroke.clients.local_gateway import running_gateways
from keystroke.clients.running import RunningProcess, running_processes, stop_process
from keystroke.errors import KeystrokeError, NotFound

if TYPE_CHECKING:
    from keystroke.protocol.status import GatewayStatus


def ps(ctx: typer.Context, json: options.Json = False) -> None:
    run = invocation_of(ctx)
    rows = [_row(one, run) for one in running_processes()]
    if run.json:
        run.console.json(rows)
        return
    if not rows:
        run.console.note("nothing runs; the first command that uses a model starts the gateway")
        return
    cells = [
        (
            str(row["pid"]),
            row["name"],
            format_size(row["memory_bytes"]),
            _age(time.time() - row["started"]),
            ", ".join(row["models"]) or "-",
            row["used_by"],
        )
        for row in rows
    ]
    run.console.table(("pid", "name", "memory", "for", "models", "used by"), cells)
    run.console.note(
        "`keystroke stop` ends the gateway and frees its memory; `keystroke stop --all` ends all"
    )


def _row(one: RunningProcess, run: Invocation) -> dict[str, Any]:
    row: dict[str, Any] = {
        "pid": one.pid,
        "name": one.name,
        "memory_bytes": one.memory_bytes,
        "started": round(one.started, 1),
        "models": [],
        "used_by": one.parent if one.announcement is None else "",
        "url": None,
    }
    if one.announcement is not None:
        row |= _gateway_facts(one.pid, run)
    elif one.command == "serve":
        row |= _server_facts(one, run)
    return row


def _server_facts(one: RunningProcess, run: Invocation) -> dict[str, Any]:
    """Where a server listens by its command line or the settings, and the models it has loaded, if it says
    so: it may listen elsewhere, or require a key."""
    server = run.settings.server
    host, port = one.option("--host") or server.host, one.option("--port") or str(server.port)
    url = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}"
    try:
        status = GatewayHttp(GatewayAddress(url)).status()
    except KeystrokeError:
        return {}
    return {"url": url, "models": _loaded_models(status), "used_by": _describe_users(status) or one.parent}


def _gateway_facts(pid: int, run: Invocation) -> dict[str, Any]:
    """What the gateway says about itself; nothing if it does not answer."""
    known = next((one for one in running_gateways(run.settings.paths.state) if one.pid == pid), None)
    if known is None:
        return {"used_by": "another state folder, or still starting"}
    try:
        status = GatewayHttp(GatewayAddress(known.url, known.token)).status()
    except KeystrokeError as error:
        return {"url": known.url, "used_by": str(error)}
    idle = f"nobody; ends when unused for {_age(run.settings.sharing.idle_s)}"
    return {"url": known.url, "models": _loaded_models(status), "used_by": _describe_users(status) or idle}


def _loaded_models(status: GatewayStatus) -> list[str]:
    return [model.name for model in status.models if model.state == "loaded"]


def _describe_users(status: GatewayStatus) -> str:
    busy = sum(model.running + model.waiting for model in status.models)
    parts = []
    if status.sockets:
        parts.append(f"{format_count(status.sockets, 'open connection')} (editors, pages)")
    if busy:
        parts.append(format_count(busy, "request"))
    return ", ".join(parts)


def stop(
    ctx: typer.Context,
    names: Annotated[
        list[str] | None,
        argument(
            "Process ids, or names as `keystroke ps` shows them. Default: shared gateways.", metavar="NAME"
        ),
    ] = None,
    everything: Annotated[bool, option("--all", "All Keystroke processes of this user.")] = False,
    json: options.Json = False,
) -> None:
    """Stop the shared gateway, or the named processes, and free their memory. Running answers end; an editor
    that is open starts the gateway again when you type."""
    run = invocation_of(ctx)
    found = running_processes()
    chosen = [
        one
        for one in found
        if everything
        or ({str(one.pid), one.name} & set(names) if names else one.belongs_to(run.settings.paths.state))
    ]
    if names:
        known = {str(one.pid) for one in found} | {one.name for one in found}
        if unknown := [name for name in names if name not in known]:
            raise NotFound(f"there is no process {unknown[0]:.40}; `keystroke ps` lists them")
    stopped = stop_all(run, chosen)
    if run.json:
        run.console.json({"stopped": stopped})
    elif not chosen:
        run.console.note(
            "nothing to stop" + ("" if everything or not found else "; --all stops the rest too")
        )
    if len(stopped) < len(chosen):
        left = ", ".join(str(one.pid) for one in chosen if one.pid not in stopped)
        raise KeystrokeError(f"the system did not let process {left} be stopped; check who owns it")


def stop_all(run: Invocation, processes: list[RunningProcess]) -> list[int]:
    """Stop processes, and say so. Returns the ids of those that ended."""
    stopped: list[int] = []
    for one in processes:
        if not stop_process(one.pid):
            continue
        stopped.append(one.pid)
        if not run.json:
            name = one.name if one.announcement is not None else f"keystroke {one.command}"
            run.console.note(f"stopped {name} (process {one.pid}, {format_size(one.memory_bytes)})")
    return stopped


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"

"""Locates the gateway for one run of the command line: a named server, or the one this machine shares.

The shared gateway is identified by the version and fingerprint of this program, the settings it would read,
and the models it starts with. The idle timeout is not part of its identity.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from keystroke.clients.gateway_address import GatewayAddress
from keystroke.clients.local_gateway import LocalGateway, ServeCommand

if TYPE_CHECKING:
    from keystroke.clients.cli.options import Invocation

# Project settings that shape an engine; all others are sent with each request.
_ENGINE_SETTINGS = ("engine.", "speculation.", "generation.", "model.precision")


def named_gateway(run: Invocation, url: str) -> GatewayAddress:
    """The server at `url`, with the first key in the configured environment variable."""
    keys = run.environ.get(run.settings.server.api_key_env, "").split(",")
    return GatewayAddress(url.rstrip("/"), keys[0].strip() or None)


def locate_gateway(run: Invocation, url: str | None, models: Sequence[str] = ()) -> GatewayAddress:
    """The address of the server at `url`, or of the shared gateway, which is started if necessary."""
    if url is not None:
        return named_gateway(run, url)
    with run.console.progress() as progress:
        return shared_gateway(run, models).locate_blocking(on_progress=progress)


def shared_gateway(
    run: Invocation,
    models: Sequence[str] = (),
    *,
    linger: float | None = None,
    echo: bool = False,
    project: bool = True,
) -> LocalGateway:
    """The gateway for this run's settings. `project`: include the project's engine settings."""
    return LocalGateway(
        serve_command(run, models, linger=linger, echo=echo, project=project), run.settings.paths.state
    )


def serve_command(
    run: Invocation, models: Sequence[str], *, linger: float | None, echo: bool, project: bool
) -> ServeCommand:
    from keystroke.clients.cli.fingerprint import checkout, fingerprint
    from keystroke.clients.cli.installed_version import release
    from keystroke.config import load_settings

    flags = {**(_project_flags(run) if project else {}), **run.flags}
    shared = ["--config", str(run.config.resolve())] if run.config is not None else []
    for key, value in flags.items():
        shared += ["--set", f"{key}={value}"]
    chosen = [part for name in models for part in ("--model", name)] + (["--echo"] if echo else [])
    start = "from keystroke.clients.cli import main; main()"
    if (source := checkout()) is not None:
        # It starts in another folder, where Python might find another checkout first.
        start = f"import sys; sys.path.insert(0, {str(source / 'src')!r}); {start}"
    idle = run.settings.sharing.idle_s if linger is None else linger
    options = ["--host", "127.0.0.1", "--port", "0", "--idle-exit", f"{idle:g}"]
    # The settings as the gateway will read them, without any project's file.
    seen = load_settings(flags, cwd=Path(Path.cwd().anchor or "/"), environ=run.environ)
    seen = dataclasses.replace(seen, origins={}, sharing=type(seen.sharing)())
    identity = (release(), sys.executable, repr(seen), *models, *(["echo"] if echo else []))
    return ServeCommand(
        [sys.executable, "-c", start, *shared, "serve", *options, *chosen],
        run.environ,
        run.settings.server.api_key_env,
        identity,
        fingerprint,
    )


def _project_flags(run: Invocation) -> dict[str, str]:
    """The project's engine settings as flags, because the gateway reads no project file."""
    from keystroke.config import SettingSource

    settings = run.settings
    return {
        key: ",".join(value) if isinstance(value := settings.get(key), tuple) else str(value)
        for key, origin in settings.origins.items()
        if origin.source is SettingSource.PROJECT and key.startswith(_ENGINE_SETTINGS)
    }

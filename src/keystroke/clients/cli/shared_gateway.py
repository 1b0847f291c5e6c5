"""The gateway that this machine's commands and editors share, as one run of the command line sees it.

Puts together how it is started and what makes it the same: the version and the state of this program,
the settings a gateway would see, and the models it is to begin with. How long it lingers does not make it
another. What is started is the program that starts it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from keystroke.clients.local_gateway import LocalGateway, ServeCommand

if TYPE_CHECKING:
    from keystroke.clients.cli.invocation import Invocation

# What a project may set that an engine is made of; the rest goes with each request.
_OF_ENGINES = ("engine.", "speculation.", "generation.", "model.precision")


def shared_gateway(
    run: Invocation,
    models: Sequence[str] = (),
    *,
    linger: float | None = None,
    echo: bool = False,
    project: bool = True,
) -> LocalGateway:
    """The gateway for this run's settings. `project`: what the project says about engines counts, too."""
    return LocalGateway(
        serve_command(run, models, linger=linger, echo=echo, project=project), run.settings.paths.state
    )


def serve_command(
    run: Invocation, models: Sequence[str], *, linger: float | None, echo: bool, project: bool
) -> ServeCommand:
    from keystroke.clients.cli.fingerprint import checkout, fingerprint
    from keystroke.clients.cli.release import release
    from keystroke.config import load_settings

    flags = {**(_project_flags(run) if project else {}), **run.flags}
    shared = ["--config", str(run.config.resolve())] if run.config is not None else []
    for key, value in flags.items():
        shared += ["--set", f"{key}={value}"]
    wanted = [part for name in models for part in ("--model", name)]
    start = "from keystroke.clients.cli import main; main()"
    if (source := checkout()) is not None:
        # It starts in another folder, from where another checkout's code may be the first to be found.
        start = f"import sys; sys.path.insert(0, {str(source / 'src')!r}); {start}"
    patience = run.settings.sharing.idle_s if linger is None else linger
    options = ["--host", "127.0.0.1", "--port", "0", "--idle-exit", f"{patience:g}"]
    # As the gateway will read them: without any project's file.
    seen = load_settings(flags, cwd=Path(Path.cwd().anchor or "/"), environ=run.environ)
    seen = dataclasses.replace(seen, origins={}, sharing=type(seen.sharing)())
    identity = (release(), sys.executable, repr(seen), *models, *(["echo"] if echo else []))
    return ServeCommand(
        [sys.executable, "-c", start, *shared, "serve", *options, *wanted, *(["--echo"] if echo else [])],
        run.environ,
        run.settings.server.api_key_env,
        identity,
        fingerprint,
    )


def _project_flags(run: Invocation) -> dict[str, str]:
    """What the project's file says about engines, as flags: the gateway itself reads no project."""
    from keystroke.config import SettingSource

    settings = run.settings
    return {
        key: ",".join(value) if isinstance(value := settings.get(key), tuple) else str(value)
        for key, origin in settings.origins.items()
        if origin.source is SettingSource.PROJECT and key.startswith(_OF_ENGINES)
    }

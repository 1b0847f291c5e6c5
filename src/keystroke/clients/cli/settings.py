"""`keystroke config`: shows settings and their origins, and opens the configuration file in an editor.

It never rewrites a file itself. A broken file can still be located and edited.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.options import Invocation, argument, invocation_of
from keystroke.config import project_file, user_file
from keystroke.errors import ConfigError, InputError

app = options.command_group("config", "Show where settings come from, and edit them.")

_NEW = """# Settings of Keystroke. `keystroke config show` lists every key, its value and where it comes from.
#
# [model]
# default = "embedded"
#
# [models.deep]              # a model behind an OpenAI-compatible server
# engine = "remote"
# base_url = "http://localhost:8000/v1"
# model = "qwen2.5-coder-7b-instruct"
# api_key_env = "MY_KEY"     # the variable that holds the key, not the key
# role = "deep"
"""


@app.command()
def show(
    ctx: typer.Context,
    keys: Annotated[list[str] | None, argument("Keys or sections. Default: all.")] = None,
    json: options.Json = False,
) -> None:
    """Print every setting with its value and origin."""
    run = invocation_of(ctx)
    rows = [r for r in run.settings.describe() if not keys or any(_under(r.key, k) for k in keys)]
    if not rows:
        raise ConfigError(f"{', '.join(keys or ())} is not a setting; see `keystroke config show`")
    if run.json:
        run.console.json({r.key: {"value": r.value, "origin": str(r.origin), "help": r.help} for r in rows})
    else:
        run.console.table(("key", "value", "from"), [(r.key, r.value, str(r.origin)) for r in rows])


@app.command()
def path(ctx: typer.Context, json: options.Json = False) -> None:
    """Print where the configuration files are."""
    run = invocation_of(ctx)
    own, project = user_file(run.environ), project_file(Path.cwd())
    if run.json:
        run.console.json(
            {"user": str(own), "exists": own.exists(), "project": str(project) if project else None}
        )
    else:
        run.console.line(str(own))
        if project is not None:
            run.console.note(f"this project also has: {project}")


@app.command()
def edit(ctx: typer.Context) -> None:
    """Open your configuration in $VISUAL or $EDITOR, and check it afterwards."""
    run = invocation_of(ctx)
    file = user_file(run.environ)
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    try:
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(_NEW, encoding="utf-8")
        done = subprocess.run([*shlex.split(editor), str(file)], check=False)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{editor} cannot be started ({error}); set EDITOR, or edit {file} yourself"
        ) from None
    if done.returncode != 0:
        raise InputError(f"{editor} ended with status {done.returncode}; {file} may be unchanged")
    assert Invocation(config=run.config, flags=run.flags).settings is not None  # raises if it is invalid
    run.console.note(f"{file} is valid")


def _under(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")

"""`keystroke version`."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed

import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.invocation import of


def version(ctx: typer.Context, json: options.Json = False) -> None:
    run = of(ctx)
    if run.wants_json(json):
        run.console.json(
            {"keystroke": release(), "python": platform.python_version(), "system": platform.platform()}
        )
    else:
        run.console.line(f"keystroke {release()}")


def release() -> str:
    try:
        return installed("keystroke")
    except PackageNotFoundError:
        return "0 (not installed)"

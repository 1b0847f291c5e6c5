"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer


def command_group(name: str, summary: str) -> typer.Typer:
    """A group of subcommands, which prints its help when called without one."""
    return typer.Typer(name=name, help=summary, no_args_is_help=True, rich_markup_mode=None)


def _known_models(incomplete: str) -> list[str]:
    """Model names for shell completion; none if the settings cannot be read."""
    from keystroke.config import load_settings
    from keystroke.engine.builtin import BUILT_IN
    from keystroke.engine.library import EMBEDDED, ModelLibrary
    from keystroke.errors import KeystrokeError

    try:
        settings = load_settings()
        names = [EMBEDDED, *settings.models, *BUILT_IN, *ModelLibrary(settings.paths.models).names()]
    except KeystrokeError:
        return []
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]


Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="A model name, a path, or URL#NAME of a model on a server.",
        autocompletion=_known_models,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Temperature = Annotated[
    float | None, typer.Option(min=0.0, max=5.0, help="0 is deterministic; higher is more varied.")
]
Seed = Annotated[int | None, typer.Option(min=0, help="Seed for sampling.")]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Maximum length of the answer in tokens.")]
Stop = Annotated[list[str] | None, typer.Option(help="Stop the answer before this text; may be repeated.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the diff; write nothing.")]
ExitZero = Annotated[bool, typer.Option("--exit-zero", help="Exit 0 even if there are findings.")]
Host = Annotated[
    str | None, typer.Option("--host", help="Address to listen on; a key is required beyond loopback.")
]
Port = Annotated[int | None, typer.Option("--port", help="Port to listen on; 0 picks a free one.")]
Gateway = Annotated[
    str | None,
    typer.Option(
        "--gateway",
        metavar="URL",
        help="Use this gateway; by default one is found or started on this machine.",
    ),
]

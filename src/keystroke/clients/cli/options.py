"""The options that commands share, and the invocation of the command line that they belong to.

Settings are loaded once, when first needed, so that a broken configuration does not prevent `--help` or the
commands that repair it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keystroke.errors import ConfigError

if TYPE_CHECKING:
    from keystroke.clients.cli.console import Console
    from keystroke.config import Settings


@dataclass
class Invocation:
    json: bool = False  # `--json` was given, before or after the command's name
    quiet: bool = False
    config: Path | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    local: bool = False  # load models in this process

    @cached_property
    def environ(self) -> dict[str, str]:
        """The environment that settings are read from; `--config` overrides its variable."""
        environ = dict(os.environ)
        if self.config is not None:
            if not self.config.exists():
                raise ConfigError(f"the configuration file {self.config} does not exist; check --config")
            environ["KEYSTROKE_CONFIG"] = str(self.config)
        return environ

    @cached_property
    def settings(self) -> Settings:
        return self.settings_with({})

    def settings_with(self, flags: Mapping[str, Any]) -> Settings:
        """The settings with a command's own options; None means that an option was not given."""
        from keystroke.config import load_settings

        given = {key: value for key, value in flags.items() if value is not None}
        return load_settings({**self.flags, **given}, environ=self.environ)

    @cached_property
    def console(self) -> Console:
        from keystroke.clients.cli.console import Console

        return Console(quiet=self.quiet)

    @property
    def uses_shared_gateway(self) -> bool:
        """Whether local models run in the gateway that all commands share."""
        return self.settings.sharing.enabled and not self.local

    def report(self, value: Any, text: str) -> None:
        """Print a result: `value` as JSON if wanted, else `text` as a note."""
        if self.json:
            self.console.json(value)
        else:
            self.console.note(text)


def invocation_of(ctx: Any) -> Invocation:
    """The invocation in a command's context."""
    found: Invocation = ctx.ensure_object(Invocation)
    return found


def option(*names_and_help: str, **more: Any) -> Any:
    """An option: its names, where they are not the parameter's own, then its help."""
    *names, text = names_and_help
    return typer.Option(*names, help=text, **more)


def argument(text: str, **more: Any) -> Any:
    return typer.Argument(help=text, **more)


def command_group(name: str, summary: str) -> typer.Typer:
    """A group of subcommands, which prints its help when called without one."""
    return typer.Typer(name=name, help=summary, no_args_is_help=True, rich_markup_mode=None)


def _print_json(ctx: typer.Context, wanted: bool) -> bool:
    invocation_of(ctx).json |= wanted
    return wanted


def _use_local(ctx: typer.Context, wanted: bool) -> bool:
    invocation_of(ctx).local |= wanted
    return wanted


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
    option(
        "--model",
        "-m",
        "A model name, a path, or URL#NAME of a model on a server.",
        metavar="MODEL",
        autocompletion=_known_models,
    ),
]
# Both are accepted before and after the name of a command.
Json = Annotated[bool, option("--json", "Print JSON for programs.", callback=_print_json)]
Local = Annotated[
    bool,
    option("--local", "Load the model in this process, not in the shared gateway.", callback=_use_local),
]
Temperature = Annotated[float | None, option("0 is deterministic; higher is more varied.", min=0.0, max=5.0)]
Seed = Annotated[int | None, option("Seed for sampling.", min=0)]
MaxTokens = Annotated[int | None, option("Maximum length of the answer in tokens.", min=1)]
Stop = Annotated[list[str] | None, option("Stop the answer before this text; may be repeated.")]
Yes = Annotated[bool, option("--yes", "-y", "Do not ask for confirmation.")]
DryRun = Annotated[bool, option("--dry-run", "Show the diff; write nothing.")]
ExitZero = Annotated[bool, option("--exit-zero", "Exit 0 even if there are findings.")]
Host = Annotated[str | None, option("--host", "Address to listen on; a key is required beyond loopback.")]
Port = Annotated[int | None, option("--port", "Port to listen on; 0 picks a free one.")]
Gateway = Annotated[
    str | None,
    option(
        "--gateway", "Use this gateway; by default one is found or started on this machine.", metavar="URL"
    ),
]

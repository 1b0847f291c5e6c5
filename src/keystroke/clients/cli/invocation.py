"""The shared options of one run of the command line, and its settings.

Settings are loaded once, when first needed, so that a broken configuration does not prevent `--help` or the
commands that repair it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

"""What one run of the command line was asked for, and the settings it runs with.

A command reads its shared options here and nowhere else. Settings are read once, when first needed,
so a broken configuration never stands in the way of `--help` or of the command that mends it.
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
    json: bool = False
    quiet: bool = False
    config: Path | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    local: bool = False  # models are loaded in this process

    @cached_property
    def environ(self) -> dict[str, str]:
        """The environment that settings are read from: `--config` stands above its variable."""
        environ = dict(os.environ)
        if self.config is not None:
            if not self.config.exists():
                raise ConfigError(f"the configuration file {self.config} does not exist; check --config")
            environ["KEYSTROKE_CONFIG"] = str(self.config)
        return environ

    @cached_property
    def settings(self) -> Settings:
        from keystroke.config import load_settings

        return load_settings(self.flags, environ=self.environ)

    @cached_property
    def console(self) -> Console:
        from keystroke.clients.cli.console import Console

        return Console(quiet=self.quiet)

    @property
    def uses_shared_gateway(self) -> bool:
        """Whether models of this machine are asked through the gateway that all commands share."""
        return self.settings.sharing.enabled and not self.local

    def wants_json(self, flag: bool) -> bool:
        """Whether a command's own `--json`, or the shared one, was given."""
        return self.json or flag


def invocation_of(ctx: Any) -> Invocation:
    """The invocation that a command's context carries."""
    found = ctx.find_object(Invocation)
    return found if found is not None else Invocation()

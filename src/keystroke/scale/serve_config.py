"""The application for Serve's own configuration files, which KubeRay's RayService uses.

`import_path: keystroke.scale.serve_config:build` with the settings file's text in `args`, so that a changed
file is a changed application and is rolled out.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from keystroke.config import Settings, load_settings
from keystroke.errors import ConfigError


def build(args: dict[str, str]) -> Any:
    """The Serve application of the settings in `args["configuration"]`; the environment completes them."""
    from keystroke.scale.application import application

    settings = read_settings(args.get("configuration", ""))
    if settings.server.database is None:
        raise ConfigError("several gateways need a shared database; set KEYSTROKE_SERVER_DATABASE")
    return application(settings)


def read_settings(text: str) -> Settings:
    """The settings of a file's text, with this process's environment above it."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "keystroke.toml").write_text(text, encoding="utf-8")
        return load_settings(cwd=Path(folder), environ={**os.environ, "KEYSTROKE_CONFIG": folder})

"""Puts the VS Code extension that `make editors` has built into the wheel; without it the wheel has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ExtensionHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        extension = Path(self.root) / "dist" / "keystroke.vsix"
        if version == "standard" and extension.exists():
            build_data["force_include"][str(extension)] = "keystroke/editors/keystroke.vsix"

"""Settings from files, the environment and flags: `load_settings(flags, cwd)` returns a frozen `Settings`."""

from keystroke.config.layers import load_settings, project_file, user_file
from keystroke.config.sections import (
    BACKENDS,
    AssistSettings,
    EngineSettings,
    GenerationSettings,
    LearnSettings,
    ModelSettings,
    NamedModel,
    PathSettings,
    ServerSettings,
    SpeculationSettings,
)
from keystroke.config.settings import Origin, Settings, SettingSource

__all__ = [
    "BACKENDS",
    "AssistSettings",
    "EngineSettings",
    "GenerationSettings",
    "LearnSettings",
    "ModelSettings",
    "NamedModel",
    "Origin",
    "PathSettings",
    "ServerSettings",
    "SettingSource",
    "Settings",
    "SpeculationSettings",
    "load_settings",
    "project_file",
    "user_file",
]

"""Options (file, environment, flags) become one frozen `Settings`: `load_settings(flags, cwd)`."""

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
    RemoteSettings,
    ScaleSettings,
    ServerSettings,
    SharingSettings,
    SpeculationSettings,
)
from keystroke.config.settings import Origin, SettingRow, Settings, SettingSource

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
    "RemoteSettings",
    "ScaleSettings",
    "ServerSettings",
    "SettingRow",
    "SettingSource",
    "Settings",
    "SharingSettings",
    "SpeculationSettings",
    "load_settings",
    "project_file",
    "user_file",
]

"""Options (file, environment, flags) become one frozen `Settings`: `load_settings(flags, cwd)`."""

from keystroke.config.layers import load_settings, project_file, user_file
from keystroke.config.sections import (
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
from keystroke.config.settings import Origin, Row, Settings, Source

__all__ = [
    "AssistSettings",
    "EngineSettings",
    "GenerationSettings",
    "LearnSettings",
    "ModelSettings",
    "NamedModel",
    "Origin",
    "PathSettings",
    "RemoteSettings",
    "Row",
    "ScaleSettings",
    "ServerSettings",
    "Settings",
    "SharingSettings",
    "Source",
    "SpeculationSettings",
    "load_settings",
    "project_file",
    "user_file",
]

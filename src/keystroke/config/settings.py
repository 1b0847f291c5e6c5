"""Resolved settings: frozen values, each with its origin.

Looks up values, origins and help by dotted key; an unknown key raises ConfigError with the nearest known one.
This module reads neither files nor the environment.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

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
from keystroke.errors import ConfigError


class SettingSource(StrEnum):
    DEFAULT = "default"
    USER = "user file"
    PROJECT = "project file"
    ENVIRONMENT = "environment"
    FLAG = "flag"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from; `str(origin)` is `default`, a variable, or file and line."""

    source: SettingSource
    place: str = ""
    line: int | None = None

    def __str__(self) -> str:
        if not self.place:
            return str(self.source)
        return f"{self.place}, line {self.line}" if self.line else self.place


DEFAULT = Origin(SettingSource.DEFAULT)


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One line of `keystroke config show`. Passwords inside URLs are masked in `value`."""

    key: str
    value: str
    origin: Origin
    help: str


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings, resolved. `Settings()` has the defaults."""

    model: ModelSettings = field(default_factory=ModelSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    generation: GenerationSettings = field(default_factory=GenerationSettings)
    speculation: SpeculationSettings = field(default_factory=SpeculationSettings)
    paths: PathSettings = field(default_factory=PathSettings)
    remote: RemoteSettings = field(default_factory=RemoteSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    assist: AssistSettings = field(default_factory=AssistSettings)
    learn: LearnSettings = field(default_factory=LearnSettings)
    sharing: SharingSettings = field(default_factory=SharingSettings)
    scale: ScaleSettings = field(default_factory=ScaleSettings)
    models: Mapping[str, NamedModel] = field(default_factory=dict)
    origins: Mapping[str, Origin] = field(default_factory=dict, repr=False, compare=False)

    def get(self, key: str) -> Any:
        """The value of a dotted key."""
        known = find_setting(key, self.models)
        section: Any = getattr(self, key.split(".", 1)[0])
        if known.model is not None:
            section = section[known.model]
        return getattr(section, known.name)

    def origin(self, key: str) -> Origin:
        """Where the value of a dotted key came from."""
        return self.origins.get(find_setting(key, self.models).key, DEFAULT)

    def describe(self) -> tuple[SettingRow, ...]:
        """Every key with its value, origin and help, in the order declared."""
        return tuple(
            SettingRow(known.key, format_value(self.get(known.key)), self.origin(known.key), known.help)
            for known in all_settings(self.models)
        )


def format_value(value: Any) -> str:
    """A value as `config show` prints it; the password inside a URL is masked."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ", ".join(value)
    return re.sub(r"(://[^/@:]*:)[^@]*@", r"\1***@", str(value))


@dataclass(frozen=True, slots=True)
class SettingSpec:
    """The declaration of one setting under its full key."""

    key: str
    name: str
    type: Any
    help: str
    least: float | None
    most: float | None
    choices: tuple[str, ...]
    guarded: bool
    model: str | None = None


def _declared_settings(prefix: str, section: type, model: str | None = None) -> Iterator[SettingSpec]:
    hints = typing.get_type_hints(section)
    for item in dataclasses.fields(section):
        yield SettingSpec(f"{prefix}.{item.name}", item.name, hints[item.name], model=model, **item.metadata)


SECTIONS: dict[str, Any] = {
    item.name: item.default_factory
    for item in dataclasses.fields(Settings)
    if item.name not in ("models", "origins")
}
FIXED_SETTINGS: dict[str, SettingSpec] = {
    k.key: k for name, section in SECTIONS.items() for k in _declared_settings(name, section)
}
# Settings of earlier releases: still accepted, without effect.
RETIRED = (
    "speculation.draft_worker",
    "speculation.draft_engine",
    "speculation.draft_threads",
    "speculation.max_draft",
)
_OF_MODEL: dict[str, SettingSpec] = {k.name: k for k in _declared_settings("models.NAME", NamedModel)}


def all_settings(models: Mapping[str, Any]) -> Iterator[SettingSpec]:
    yield from FIXED_SETTINGS.values()
    for name in models:
        yield from _declared_settings(f"models.{name}", NamedModel, name)


def find_setting(key: str, models: Mapping[str, Any] | None = None, where: str = "") -> SettingSpec:
    """The setting called `key`. Raises ConfigError with the nearest known key. `models`: the named models
    that exist."""
    if known := FIXED_SETTINGS.get(key):
        return known
    head, _, rest = key.partition(".")
    name, _, last = rest.rpartition(".")  # a model's name may hold dots itself
    if head == "models" and name and last in _OF_MODEL and (models is None or name in models):
        return dataclasses.replace(_OF_MODEL[last], key=key, model=name)
    if len(key) > 100:  # comparing long keys is slow
        key = f"{key[:97]}..."
    names = list(models) if models is not None else [name[:60] or "NAME"]
    candidates = [*FIXED_SETTINGS, *(f"models.{n}.{field_name}" for n in names for field_name in _OF_MODEL)]
    near = difflib.get_close_matches(key, candidates, n=1, cutoff=0.5) or [
        k for k in candidates if k.rpartition(".")[2] == key.rpartition(".")[2]
    ]
    hint = f"did you mean {near[0]}?" if near else f"known sections are {', '.join([*SECTIONS, 'models'])}"
    raise ConfigError(f"{where}{key} is not a setting; {hint}", param=key)

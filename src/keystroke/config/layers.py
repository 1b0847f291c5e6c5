"""Loads settings from layers, of which later ones win: defaults, user file, project file, environment, flags.

Secrets are never read here: settings name the environment variable that holds a key. A project's file is
untrusted, so guarded settings are refused there. Every error names the place, the key and what to do.
"""

from __future__ import annotations

import difflib
import functools
import logging
import math
import os
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import platformdirs

from keystroke.config.sections import NamedModel
from keystroke.config.settings import (
    FIXED_SETTINGS,
    RETIRED,
    SECTIONS,
    Origin,
    Settings,
    SettingSource,
    SettingSpec,
    all_settings,
    find_setting,
)
from keystroke.errors import ConfigError

log = logging.getLogger("keystroke.config")

FILE_NAME = "keystroke.toml"
PREFIX = "KEYSTROKE_"
CONFIG_VARIABLE = "KEYSTROKE_CONFIG"
OTHER_VARIABLES = (CONFIG_VARIABLE, "KEYSTROKE_DEBUG", "KEYSTROKE_SANDBOX")  # no settings
MAX_FILE_BYTES = 1 << 20
MAX_DEPTH = 40  # dots in one key
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
NAMING = ("model.default", "model.deep", "model.chat")  # settings that name a model


_COMMAND_LINE = "the command line: "
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_KINDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}


def _value(known: SettingSpec, raw: Any, where: str, base: Path, *, parse: bool) -> Any:
    """`raw` as the setting's type, validated. `parse`: a string may represent a number or a boolean. Relative
    paths start at `base`."""

    def refuse(wanted: str) -> ConfigError:
        shown_raw = raw if isinstance(raw, str) else repr(raw)
        return ConfigError(f"{where}{known.key} must be {wanted}, not {shown_raw!s:.80}", param=known.key)

    kind = known.type
    if typing.get_origin(kind) is types.UnionType:
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    if typing.get_origin(kind) is tuple:
        items = [part.strip() for part in raw.split(",")] if parse and isinstance(raw, str) else raw
        if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) for item in items):
            raise refuse("a list of texts")
        return tuple(item for item in items if item)
    value: Any = raw
    if parse and isinstance(raw, str) and kind is not str:
        value = _parse(kind, raw.strip())
    if kind is float and type(value) is int:
        value = float(value)
    if kind is Path and isinstance(value, str) and value:
        value = base / Path(value).expanduser()
    if type(value) is not kind and not (kind is Path and isinstance(value, Path)):
        raise refuse(_KINDS[kind])
    if known.choices and value not in known.choices:
        near = difflib.get_close_matches(str(value)[:40], known.choices, n=1)
        raise refuse(f"one of {', '.join(known.choices)}" + (f" (did you mean {near[0]}?)" if near else ""))
    if isinstance(value, float) and not math.isfinite(value):
        raise refuse("a finite number")
    low, high = known.least, known.most
    if isinstance(value, (int, float)) and (
        (low is not None and not value >= low) or (high is not None and not value <= high)
    ):
        raise refuse(
            f"between {_number(low)} and {_number(high)}" if high is not None else f"{_number(low)} or more"
        )
    return value


def _number(value: float | None) -> str:
    return f"{value:.0f}" if value is not None and value == int(value) else f"{value:g}"


def _parse(kind: type, text: str) -> Any:
    """A string from the environment or a flag as `kind`; the string itself if it is invalid."""
    if kind is bool:
        return True if text.lower() in _TRUE else False if text.lower() in _FALSE else text
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            return text
    return text


def user_file(environ: Mapping[str, str] | None = None) -> Path:
    """The user's file, which need not exist; KEYSTROKE_CONFIG names another file or folder."""
    location = (os.environ if environ is None else environ).get(CONFIG_VARIABLE)
    if not location:
        return platformdirs.user_config_path("keystroke", appauthor=False) / FILE_NAME
    path = Path(location).expanduser()
    if path.is_dir():
        return path / FILE_NAME
    if not path.exists():
        raise ConfigError(
            f"{CONFIG_VARIABLE} names {path}, which does not exist; create it or unset the variable"
        )
    return path


def project_file(cwd: Path) -> Path | None:
    """The nearest keystroke.toml at or above `cwd`."""
    folder = cwd.resolve()
    return next((p for p in (f / FILE_NAME for f in (folder, *folder.parents)) if p.is_file()), None)


def load_settings(
    flags: Mapping[str, Any] | None = None,
    cwd: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Load the settings of all layers. `flags` maps dotted keys to values (text or typed); None means not
    given. Raises ConfigError with the place, the key and what to do."""
    environ = os.environ if environ is None else environ
    cwd = Path.cwd() if cwd is None else cwd
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}

    own = user_file(environ)
    for key, value, origin in _from_file(own, SettingSource.USER):
        values[key], origins[key] = value, origin
    project = project_file(cwd)
    if project is not None and not (own.exists() and own.samefile(project)):
        for key, value, origin in _from_file(project, SettingSource.PROJECT, own):
            values[key], origins[key] = value, origin
    unknown: dict[str, str] = {}
    for variable, key, value in _from_environment(environ, cwd, unknown):
        values[key], origins[key] = value, Origin(SettingSource.ENVIRONMENT, variable)
    for key, raw in (flags or {}).items():
        if key in RETIRED:
            _warn_retired(key, _COMMAND_LINE)
        elif raw is not None:
            values[key] = _value(find_setting(key, where=_COMMAND_LINE), raw, _COMMAND_LINE, cwd, parse=True)
            origins[key] = Origin(SettingSource.FLAG)

    settings = _build(values, origins)
    secrets = {settings.get(k.key) for k in all_settings(settings.models) if k.name == "api_key_env"}
    for variable, nearest in unknown.items():
        if variable not in secrets:
            raise ConfigError(
                f"the environment variable {variable} is not a setting; {nearest}", param=variable
            )
    return settings


def _from_file(
    path: Path, source: SettingSource, own: Path | None = None
) -> Iterator[tuple[str, Any, Origin]]:
    text = _read(path)
    try:
        # The parser takes quadratic time in a key's depth, and a project's file is untrusted.
        if any(line.partition("=")[0].count(".") > MAX_DEPTH for line in text.split("\n")):
            raise RecursionError
        given = list(_flatten(tomllib.loads(text)))
    except RecursionError:
        raise ConfigError(f"{path}: tables are nested too deeply; this is no configuration") from None
    except ValueError as error:  # not TOML, or a number with thousands of digits
        match = re.search(r"^(.*?) \(at (?:line (\d+)|end of document)", str(error))
        rows = text.rstrip("\n").split("\n")
        number = min(int(match[2] or len(rows)), len(rows)) if match else 0
        line = f", line {number}" if match else ""
        shown = f" in {rows[number - 1].strip()!r:.80}" if match else ""
        why = match[1] if match else str(error)
        raise ConfigError(f"{path}{line}: not valid TOML: {why}{shown}; correct that line") from None
    lines = _lines_of(text)
    for key, raw in given:
        line_number = lines.get(key)
        where = f"{path}, line {line_number}: " if line_number else f"{path}: "
        if key in RETIRED:
            _warn_retired(key, where)
            continue
        known = find_setting(key, where=where)
        if known.model is not None and not MODEL_NAME.fullmatch(known.model):
            raise ConfigError(
                f"{where}a model's name holds letters, digits and . _ : - only, not {known.model!r}"
            )
        if source is SettingSource.PROJECT and known.guarded:
            raise ConfigError(
                f"{where}a project may not set {key}, because it could redirect your code or your keys; "
                f"put it in {own}",
                param=key,
            )
        if source is SettingSource.PROJECT and key in NAMING and not MODEL_NAME.fullmatch(str(raw)):
            raise ConfigError(
                f"{where}a project may name a model, not a path; add the model on this machine first"
            )
        origin = Origin(source, str(path), line_number)
        yield key, _value(known, raw, where, path.parent, parse=False), origin


@functools.cache  # once per process
def _warn_retired(key: str, where: str) -> None:
    log.warning("%s%s has no effect any more; remove it", where, key)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; check its permissions") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than 1 MB; this does not look like a configuration file")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}, line {line}: not UTF-8 text; save the file as UTF-8") from None


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in FIXED_SETTINGS:
            yield from _flatten(value, f"{key}.")
        else:
            yield key, value


def _lines_of(text: str) -> dict[str, int]:
    """The line of each key, except of those in inline tables."""
    lines: dict[str, int] = {}
    header = ""
    for number, line in enumerate(text.split("\n"), 1):
        name, _, rest = line.strip().partition("]")
        if name.startswith("[") and rest.strip()[:1] in ("", "#"):
            header = _unquote(name[1:]) + "."
        elif "=" in line:
            lines.setdefault(header + _unquote(line.partition("=")[0]), number)
    return lines


def _unquote(key: str) -> str:
    return re.sub(r"[\"'\s]", "", key)


def _from_environment(
    environ: Mapping[str, str], cwd: Path, unknown: dict[str, str]
) -> Iterator[tuple[str, str, Any]]:
    """KEYSTROKE_ENGINE_THREADS is engine.threads; an empty variable counts as unset. Named models come from
    files only. Unknown variables go to `unknown`, because one may hold a key."""
    names = {PREFIX + key.upper().replace(".", "_"): key for key in (*FIXED_SETTINGS, *RETIRED)}
    for variable, raw in environ.items():
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES or not raw.strip():
            continue
        if variable in names:
            key = names[variable]
            if key in RETIRED:
                _warn_retired(key, f"{variable}: ")
                continue
            yield variable, key, _value(FIXED_SETTINGS[key], raw, f"{variable}: ", cwd, parse=True)
        elif not variable.endswith("_KEY"):  # may hold a key for another program
            near = difflib.get_close_matches(variable[:100], names, n=1, cutoff=0.5)
            unknown[variable] = f"did you mean {near[0]}?" if near else "unset it"


def _build(values: Mapping[str, Any], origins: Mapping[str, Origin]) -> Settings:
    sections: dict[str, dict[str, Any]] = {}
    models: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        known = find_setting(key)
        target = sections if known.model is None else models
        target.setdefault(known.model or key.partition(".")[0], {})[known.name] = value
    named = {name: NamedModel(**given) for name, given in models.items()}
    for name, model in named.items():
        if model.engine == "remote" and (
            missing := [k for k in ("base_url", "model") if not getattr(model, k)]
        ):
            where = origins[f"models.{name}.engine"]
            raise ConfigError(f"{where}: a remote model needs models.{name}.{missing[0]}; add it")
    built = {name: section(**sections.get(name, {})) for name, section in SECTIONS.items()}
    return Settings(**built, models=named, origins=dict(origins))

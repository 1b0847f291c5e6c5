"""Replaces files atomically, and writes one setting to the user's file.

A setting is written without a change of comments, order and blank lines; an invalid file is not touched.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from keystroke.config.layers import user_file
from keystroke.config.settings import find_setting
from keystroke.errors import ConfigError


def write_setting(key: str, value: str | bool | None, environ: Mapping[str, str] | None = None) -> Path:
    """Set `section.name` to a value, or remove it (None). Returns the file. Raises ConfigError if the key is
    unknown or the file cannot be parsed or written."""
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    find_setting(key)
    file = user_file(environ)
    section, _, name = key.partition(".")
    try:
        text = file.read_text(encoding="utf-8-sig") if file.exists() else ""
        document: Any = tomlkit.parse(text)
        if value is None:
            if name in document.get(section, {}):
                del document[section][name]
        else:
            if section not in document:
                document[section] = tomlkit.table()
            document[section][name] = value
        written = tomlkit.dumps(document)
    except (TOMLKitError, UnicodeDecodeError, TypeError) as error:
        raise ConfigError(f"{file} cannot be changed by this program ({error}); set {key} by hand") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; check its permissions") from None
    try:
        if written != text:
            file.resolve().parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, written.encode(), keep=True)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}; set it by hand") from None
    return file


def replace_file(file: Path, data: bytes, mode: int = 0o600, *, keep: bool = False) -> None:
    """Replace a file at once by one with this content and mode. `keep`: a symbolic link stays one, and a file
    that is there already keeps its mode."""
    target = file.resolve() if keep else file
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(draft, "xb", opener=lambda path, flags: os.open(path, flags, mode)) as out:
            out.write(data)
        if keep and target.exists():
            draft.chmod(stat.S_IMODE(target.stat().st_mode))
        draft.replace(target)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise

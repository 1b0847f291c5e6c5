"""Writes one setting to the user's file, without a change of comments, order and blank lines.

An invalid file is not touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keystroke.config.layers import user_file
from keystroke.config.settings import find_setting
from keystroke.errors import ConfigError
from keystroke.replacing import replace_file


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

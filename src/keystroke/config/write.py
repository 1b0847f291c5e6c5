"""Writes one setting to the user's file.

Comments, order and blank lines are kept. The file is replaced atomically; an invalid file is not touched.
"""

from __future__ import annotations

import os
import tempfile
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
    if written != text:
        _replace(file, written)
    return file


def _replace(file: Path, text: str) -> None:
    target = file.resolve()  # a symbolic link stays one
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8", newline="") as out:
                out.write(text)
            if target.exists():
                os.chmod(draft, target.stat().st_mode & 0o7777)
            os.replace(draft, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(draft)
            raise
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}; set it by hand") from None

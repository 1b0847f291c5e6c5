"""Replaces files atomically: a reader sees the old content or the new, also after a crash of the program."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path


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

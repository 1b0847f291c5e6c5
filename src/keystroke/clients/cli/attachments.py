"""Attaches files to chat messages: `@path`, `@path:10-20` for some lines, or `/file PATH`.

A mention that is not a file stays as text. A file that may contain secrets or is too large raises InputError,
and then the message is not sent.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from keystroke.assist.edit.blocks import fence_text
from keystroke.clients.cli.text_file import TextFile
from keystroke.errors import InputError

MAX_CHARACTERS = 200_000  # of one file: about what the longest contexts hold
_MENTION = re.compile(r"(?<![\w@/.])@(?P<path>\"[^\"]+\"|[^\s\"'`]+)")
_LINES = re.compile(r"^(?P<path>.+?):(?P<first>\d{1,7})(?:-(?P<last>\d{1,7}))?$")


def attach_mentions(line: str, exclude: Sequence[str] = ()) -> tuple[str, list[str]]:
    """The message with the files that a line mentions, and their names. Raises InputError and NotFound for a
    file that cannot be sent."""
    parts: list[str] = []
    names: list[str] = []
    for found in _MENTION.finditer(line):
        name = found["path"].strip('"').rstrip(",;!?)")
        if (part := _part(name, exclude)) is None and name.endswith((".", ":")):
            name = name.rstrip(".:")
            part = _part(name, exclude)
        if part is not None and name not in names:
            parts.append(part)
            names.append(name)
    return "\n\n".join([*parts, line]) if parts else line, names


def attach_file(name: str, exclude: Sequence[str] = ()) -> str:
    """A file as a message of its own. Raises NotFound if there is none."""
    part = _part(name, exclude)
    if part is None:
        TextFile.read(Path(name).expanduser())  # raises with the reason
        raise InputError(f"{name} is not a text file")
    return part


def _part(name: str, exclude: Sequence[str]) -> str | None:
    """The file's text under its name; None if there is no such file."""
    path, first, last = Path(name).expanduser(), None, None
    if not path.is_file() and (lines := _LINES.match(name)) is not None:
        path = Path(lines["path"]).expanduser()
        first = int(lines["first"])
        last = int(lines["last"] or first)
    if not path.is_file():
        return None
    if any(fnmatch(path.name, pattern) for pattern in exclude):
        raise InputError(f"{path} may contain secrets (assist.exclude), so it is not sent")
    text = TextFile.read(path).text
    if first is not None and last is not None:
        chosen = text.split("\n")[first - 1 : last]
        if not chosen or first < 1:
            raise InputError(f"{path} has no lines {first} to {last}")
        text = "\n".join(chosen) + "\n"
    if len(text) > MAX_CHARACTERS:
        raise InputError(
            f"{path} has {len(text):,} characters (limit {MAX_CHARACTERS:,}); name some lines: {path}:1-200"
        )
    return f"{name}\n{fence_text(text)}"

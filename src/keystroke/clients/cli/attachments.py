"""Files in a conversation: `@path` in a line, `@path:10-20` for some of its lines, or `/file PATH`.

Reads text files and nothing else; what is no file stays as it was written. A file that may hold
secrets or is too large is refused with a sentence, and then nothing of the line is sent.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from keystroke.assist.edit.blocks import fenced
from keystroke.clients.cli.text_file import TextFile
from keystroke.errors import InputError

MOST = 200_000  # characters of one file: about what the longest contexts hold
_MENTION = re.compile(r"(?<![\w@/.])@(?P<path>\"[^\"]+\"|[^\s\"'`]+)")
_LINES = re.compile(r"^(?P<path>.+?):(?P<first>\d{1,7})(?:-(?P<last>\d{1,7}))?$")


def attach_mentions(line: str, exclude: Sequence[str] = ()) -> tuple[str, list[str]]:
    """The message for a line that may mention files, and the names of those it holds. Raises InputError and
    NotFound for a file that cannot be sent."""
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
    """A file as a message of its own. Raises NotFound where there is none."""
    part = _part(name, exclude)
    if part is None:
        TextFile.read(Path(name).expanduser())  # says why not
        raise InputError(f"{name} is not a file that can be shown")
    return part


def _part(name: str, exclude: Sequence[str]) -> str | None:
    """The file, headed by its name; None where there is no such file."""
    path, first, last = Path(name).expanduser(), None, None
    if not path.is_file() and (lines := _LINES.match(name)) is not None:
        path = Path(lines["path"]).expanduser()
        first = int(lines["first"])
        last = int(lines["last"] or first)
    if not path.is_file():
        return None
    if any(fnmatch(path.name, pattern) for pattern in exclude):
        raise InputError(f"{path} may hold secrets (assist.exclude), so it is not sent")
    text = TextFile.read(path).text
    if first is not None and last is not None:
        kept = text.split("\n")[first - 1 : last]
        if not kept or first < 1:
            raise InputError(f"{path} has no lines {first} to {last}")
        text = "\n".join(kept) + "\n"
    if len(text) > MOST:
        raise InputError(
            f"{path} has {len(text):,} characters; at most {MOST:,} are sent: name some lines, {path}:1-200"
        )
    return f"{name}\n{fenced(text)}"

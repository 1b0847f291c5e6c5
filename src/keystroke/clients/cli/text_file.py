"""A file and a cursor, as named on a command line.

Reads bytes, refuses what is not text, and writes back only what changed: line ends, byte order mark and
permissions stay. Lines and columns count from 1, columns in characters, as editors show them.
"""

from __future__ import annotations

import os
import re
import stat
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from keystroke.errors import InputError, NotFound

MAX_BYTES = 64 * 1024 * 1024
_PLACE = re.compile(r"^(?P<path>.+?):(?P<line>\d+)(?::(?P<column>\d+))?$", re.DOTALL)
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class FilePosition:
    """A position as it was written; `column` None means the end of the line, `line` None of the file."""

    path: Path
    line: int | None
    column: int | None

    @classmethod
    def parse(cls, text: str) -> FilePosition:
        match = _PLACE.match(text)
        if match is None or Path(text).is_file():  # a file may have colons in its name
            return cls(Path(text), None, None)
        column = match["column"]
        return cls(Path(match["path"]), int(match["line"]), int(column) if column else None)


@dataclass(frozen=True, slots=True)
class TextFile:
    """A text file as it was read. In `text` every line ends in LF."""

    path: Path
    text: str
    raw: bytes
    newline: str

    @classmethod
    def read(cls, path: Path) -> TextFile:
        try:
            if path.is_dir():
                raise InputError(f"{path} is a folder; name a file")
            with path.open("rb") as file:
                raw = file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            raise NotFound(f"there is no file {path}; check the path") from None
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        if len(raw) > MAX_BYTES:
            raise InputError(f"{path} is larger than {MAX_BYTES >> 20} MB; name a source file")
        text = decode(raw.removeprefix(_BOM), str(path))
        newline = "\r\n" if text.count("\r\n") * 2 > text.count("\n") else "\n"
        return cls(path, text.replace("\r\n", "\n"), raw, newline)

    def offset(self, place: FilePosition) -> int:
        """Where `place` lies in `text`. InputError if it is past the end."""
        if place.line is None:
            return len(self.text)
        lines = self.text.split("\n")
        if not 1 <= place.line <= len(lines):
            raise InputError(f"line {place.line} does not exist; {self.path} has lines 1 to {len(lines)}")
        length = len(lines[place.line - 1])
        column = place.column if place.column is not None else length + 1
        if not 1 <= column <= length + 1:
            raise InputError(
                f"column {column} does not exist; line {place.line} of {self.path} has columns 1 to "
                f"{length + 1}"
            )
        return sum(len(line) + 1 for line in lines[: place.line - 1]) + column - 1

    def insert(self, offset: int, text: str) -> None:
        """Write the file with `text` put in at `offset`, or not at all. InputError if it has changed."""
        head = self._bytes_before(offset)
        data = self.raw[:head] + text.replace("\n", self.newline).encode() + self.raw[head:]
        target = self.path.resolve()  # a link stays a link
        temporary = None
        try:
            if target.read_bytes() != self.raw:
                raise InputError(f"{self.path} changed while the completion was made; nothing was written")
            handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(temporary, stat.S_IMODE(target.stat().st_mode))
            os.replace(temporary, target)
        except OSError as error:
            if temporary is not None and os.path.exists(temporary):
                os.unlink(temporary)
            raise InputError(f"{self.path} cannot be written: {error.strerror}") from None

    def _bytes_before(self, offset: int) -> int:
        """How many bytes of the file lie before `offset`, whatever mixture of line ends it has."""
        at = len(_BOM) if self.raw.startswith(_BOM) else 0
        lines = self.text[:offset].split("\n")
        for line in lines[:-1]:
            at = self.raw.index(b"\n", at + len(line.encode())) + 1
        return at + len(lines[-1].encode())


def read_input() -> str:
    """All of standard input as text."""
    raw = sys.stdin.buffer.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise InputError(f"standard input is larger than {MAX_BYTES >> 20} MB; send less")
    return decode(raw, "standard input")


def decode(raw: bytes, name: str) -> str:
    """Bytes as text. InputError names the place that is not."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InputError(f"{name} is not UTF-8 text (line {line}); convert it first") from None
    if (nul := text.find("\0")) >= 0:
        line = text.count("\n", 0, nul) + 1
        raise InputError(f"{name} holds a NUL byte (line {line}); it is not a text file")
    return text

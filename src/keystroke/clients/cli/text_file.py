"""A text file and a position in it, as named on a command line.

Refuses files that are not UTF-8 text. Writing preserves line endings, byte order mark and permissions. Lines
and columns count from 1, columns in characters, as editors show them.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from keystroke.errors import InputError, NotFound
from keystroke.replacing import replace_file

MAX_BYTES = 64 * 1024 * 1024
_POSITION = re.compile(r"^(?P<path>.+?):(?P<line>\d+)(?::(?P<column>\d+))?$", re.DOTALL)
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class FilePosition:
    """`column` None means the end of the line, `line` None the end of the file."""

    path: Path
    line: int | None
    column: int | None

    @classmethod
    def parse(cls, text: str) -> FilePosition:
        match = _POSITION.match(text)
        if match is None or Path(text).is_file():  # a file may have colons in its name
            return cls(Path(text), None, None)
        column = match["column"]
        return cls(Path(match["path"]), int(match["line"]), int(column) if column else None)


@dataclass(frozen=True, slots=True)
class TextFile:
    """The content of a text file. In `text` every line ends in LF."""

    path: Path
    text: str
    raw: bytes
    newline: str

    @classmethod
    def read(cls, path: Path) -> TextFile:
        try:
            if path.is_dir():
                raise InputError(f"{path} is a folder; give a file")
            with path.open("rb") as file:
                raw = file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            raise NotFound(f"there is no file {path}; check the path") from None
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        if len(raw) > MAX_BYTES:
            raise InputError(f"{path} is larger than {MAX_BYTES >> 20} MB; give a source file")
        text = decode(raw.removeprefix(_BOM), str(path))
        newline = "\r\n" if text.count("\r\n") * 2 > text.count("\n") else "\n"
        return cls(path, text.replace("\r\n", "\n"), raw, newline)

    def offset(self, position: FilePosition) -> int:
        """The offset of a position in `text`. InputError if it is past the end."""
        if position.line is None:
            return len(self.text)
        lines = self.text.split("\n")
        if not 1 <= position.line <= len(lines):
            raise InputError(f"line {position.line} does not exist; {self.path} has lines 1 to {len(lines)}")
        length = len(lines[position.line - 1])
        column = position.column if position.column is not None else length + 1
        if not 1 <= column <= length + 1:
            raise InputError(
                f"column {column} does not exist; line {position.line} of {self.path} has columns 1 to "
                f"{length + 1}"
            )
        return sum(len(line) + 1 for line in lines[: position.line - 1]) + column - 1

    def insert(self, offset: int, text: str) -> None:
        """Insert `text` at `offset` and write the file atomically. InputError if the file has changed."""
        head = self._bytes_before(offset)
        data = self.raw[:head] + text.replace("\n", self.newline).encode() + self.raw[head:]
        try:
            if self.path.read_bytes() != self.raw:
                raise InputError(f"{self.path} changed while the completion was made; nothing was written")
            replace_file(self.path, data, keep=True)
        except OSError as error:
            raise InputError(f"{self.path} cannot be written: {error.strerror}") from None

    def _bytes_before(self, offset: int) -> int:
        """The number of bytes before `offset`, for any mixture of line endings."""
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
    """Decode UTF-8 text. InputError names the first invalid line."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InputError(f"{name} is not UTF-8 text (line {line}); convert it first") from None
    if (nul := text.find("\0")) >= 0:
        line = text.count("\n", 0, nul) + 1
        raise InputError(f"{name} holds a NUL byte (line {line}); it is not a text file")
    return text

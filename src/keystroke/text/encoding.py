"""Lossless conversion of files to text and back.

`encode(decode(data)) == data` holds for every accepted file; other files are refused. Line ends, tabs and a
missing final newline are never changed.
"""

from __future__ import annotations

import codecs
import hashlib
import re
from dataclasses import dataclass

from keystroke.errors import InputError

_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # before UTF-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
# The declaration that Python, Ruby, Emacs and Vim read in a file's first two lines.
_DECLARED = re.compile(rb"^[^\n]{0,200}?coding[:=][ \t]*([-\w.]+)")
# Single-byte encodings only: an edit cannot change how the other bytes decode.
_DECLARABLE = frozenset(
    {"latin-1", "iso8859-1", "iso8859-2", "iso8859-15", "cp1250", "cp1251", "cp1252", "koi8-r"}
)


@dataclass(frozen=True, slots=True)
class Decoded:
    """A file's text with its encoding and byte order mark."""

    text: str
    encoding: str = "utf-8"
    mark: bytes = b""

    def encode(self, text: str, name: str = "the file") -> bytes:
        """`text` in this file's encoding, with its byte order mark."""
        try:
            return self.mark + text.encode(self.encoding)
        except UnicodeEncodeError as error:
            raise InputError(
                f"{name} is stored as {self.encoding}, which has no {text[error.start]!r}; "
                "leave that character out or convert the file to UTF-8"
            ) from None


def decode(data: bytes, name: str = "the file") -> Decoded:
    """The text of a file: a byte order mark decides, then UTF-8, then a declared single-byte encoding."""
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            return _decode_exactly(data, len(mark), encoding, name)
    if b"\0" in data:
        raise InputError(f"{name} is a binary file; only text can be edited")
    try:
        return Decoded(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        declared = declared_encoding(data)
        if declared in _DECLARABLE:
            return _decode_exactly(data, 0, declared, name)
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{name} is not UTF-8 (line {line}) and declares no other supported encoding; convert it to UTF-8"
        ) from None


def declared_encoding(data: bytes) -> str | None:
    """Python's name of the encoding that a coding line among the first two lines declares."""
    for line in data.split(b"\n", 2)[:2]:
        if found := _DECLARED.match(line):
            try:
                return codecs.lookup(found[1].decode("ascii", "replace")).name
            except LookupError:
                return None
    return None


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _decode_exactly(data: bytes, start: int, encoding: str, name: str) -> Decoded:
    try:
        result = Decoded(data[start:].decode(encoding), encoding, data[:start])
        if result.encode(result.text) == data:
            return result
    except UnicodeDecodeError:
        pass
    raise InputError(f"{name} is damaged: its bytes are not valid {encoding}; repair or convert it first")

"""What a terminal shows where its cursor is, as far as the bytes sent to it tell.

Hears output and answers one question: may somebody else say a line now, and what has to be shown again
afterwards? Never inside a program that fills the screen, and never inside a line that is being drawn over.
"""

from __future__ import annotations

import re

_FULL = re.compile(rb"\x1b\[\?(?:1049|1047|47)([hl])")
_HARMLESS = re.compile(
    rb"\x1b\[[0-9;]*[mK]|\x1b\[\?(?:25|2004|1)[hl]|\x1b[=>]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"
)
_LONGEST = 500  # bytes of an unfinished line that are shown again


class TerminalLine:
    def __init__(self) -> None:
        self._line = bytearray()
        self._full = False

    def feed(self, data: bytes) -> None:
        if b"\x1b[?" in data:
            for change in _FULL.finditer(data):
                self._full = change[1] == b"h"
        before, newline, rest = data.rpartition(b"\n")
        if newline:
            self._line.clear()
        self._line += (rest if newline else before + rest)[-2 * _LONGEST :]
        del self._line[: -2 * _LONGEST]

    def unfinished(self) -> bytes | None:
        """The unfinished line, empty between two lines. None where nobody else may write now."""
        if self._full or len(self._line) > _LONGEST:
            return None
        line = bytes(self._line)
        bare = _HARMLESS.sub(b"", line)
        if bare in (b"", b"\r"):
            return b""
        # What moves the cursor (a progress bar, an edited line) cannot be shown again as it is.
        return line if not re.search(rb"[\x00-\x08\x0b-\x1f\x7f]", bare) else None

"""Scans text while it is written: finds marks and the end of a JSON value, decodes one of its strings so far.

Nothing is validated.
"""

from __future__ import annotations

import json


def mark_overlap(text: str, mark: str) -> int:
    """The number of characters at the end of `text` that could be the beginning of `mark`."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


class ValueScanner:
    """Finds the end of one JSON object or list."""

    def __init__(self) -> None:
        self.started = self.ended = False
        self._depth = 0
        self._in_string = self._escaped = False

    def feed(self, text: str) -> int:
        """Returns the number of characters of `text` that belong to the value."""
        self.started = self.started or bool(text)
        for at, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.ended = True
                    return at + 1
        return len(text)


class StringReader:
    """Decodes the string member `key` of an object with one member, as far as it is written."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._pending = ""
        self._inside = self._ended = False

    def feed(self, text: str) -> str:
        self._pending += text
        if not self._inside:
            begins = json.dumps(self._key) + ":"
            _, found, rest = self._pending.partition(begins)
            if not found or not rest.lstrip().startswith('"'):
                return ""
            self._inside, self._pending = True, rest.lstrip()[1:]
        if self._ended:
            return ""
        at = 0
        while at < len(self._pending):
            if self._pending[at] == '"':
                self._ended = True
                break
            size = 1
            if self._pending[at] == "\\":
                size = 6 if self._pending[at + 1 : at + 2] == "u" else 2
                pair = self._pending[at : at + 12]
                if size == 6 and "\\ud8" <= pair[:4].lower() <= "\\udb":
                    size = 12  # a surrogate pair
            if at + size > len(self._pending):
                break
            at += size
        ready, self._pending = self._pending[:at], self._pending[at:]
        return str(json.loads(f'"{ready}"'))

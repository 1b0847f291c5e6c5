"""Adds a key to a JSON file with comments, as VS Code and Zed use it. The rest of the text stays."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

_SKIP = re.compile(r"(?:\s+|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_SCALAR = re.compile(r"[^\s,\]}/]+")


class JsoncConflict(ValueError):
    """The key is there already with another value, or the text is not an object."""


def add_key(text: str, path: Sequence[str], value: Any) -> str:
    """`text` with `value` at `path`. Unchanged if it is there already. Raises JsoncConflict if something else
    is there, or the text cannot be read."""
    if not text[_end(text, 0) :].strip():
        text += "{}\n"
    at = _end(text, 0)
    keys = list(path)
    while keys:
        if text[at : at + 1] != "{":
            raise JsoncConflict(f"{'.'.join(path)} cannot be added: its parent is no object")
        inside = _find(text, at, keys[0])
        if inside is None:
            return _insert(text, at, keys, value)
        at = inside
        keys.pop(0)
    if _read(text, at) != value:
        raise JsoncConflict(f"{'.'.join(path)} is set already")
    return text


def _insert(text: str, at: int, keys: Sequence[str], value: Any) -> str:
    """Insert the first of `keys` as the first member of the object that begins at `at`."""
    for key in reversed(keys[1:]):
        value = {key: value}
    line = text[text.rfind("\n", 0, at) + 1 : at]
    indent = line[: len(line) - len(line.lstrip())]
    body = json.dumps(value, indent=2, ensure_ascii=False).replace("\n", f"\n{indent}  ")
    first = _end(text, at + 1)
    member = f"\n{indent}  {json.dumps(keys[0])}: {body}"
    if text[first : first + 1] == "}":
        return text[: at + 1] + text[at + 1 : first].rstrip() + member + f"\n{indent}" + text[first:]
    rest = text[at + 1 :]
    # The next member keeps its own line.
    return text[: at + 1] + member + "," + ("" if rest.lstrip(" \t").startswith("\n") else " ") + rest


def _find(text: str, at: int, wanted: str) -> int | None:
    """Where the value of a key of the object at `at` begins; None if there is no such key."""
    at = _end(text, at + 1)
    while at < len(text) and text[at] != "}":
        match = _STRING.match(text, at)
        if match is None:
            raise JsoncConflict("the file is not valid JSON")
        colon = _end(text, match.end())
        if text[colon : colon + 1] != ":":
            raise JsoncConflict("the file is not valid JSON")
        value = _end(text, colon + 1)
        if json.loads(match.group()) == wanted:
            return value
        at = _end(text, _skip_value(text, value))
        if text[at : at + 1] == ",":
            at = _end(text, at + 1)
    if at >= len(text):
        raise JsoncConflict("the file is not valid JSON")
    return None


def _skip_value(text: str, at: int) -> int:
    """The end of the value that begins at `at`."""
    if text[at : at + 1] not in ("{", "["):
        match = _STRING.match(text, at) or _SCALAR.match(text, at)
        if match is None:
            raise JsoncConflict("the file is not valid JSON")
        return match.end()
    depth = 0
    while at < len(text):
        if text[at] in "{[":
            depth += 1
        elif text[at] in "}]":
            depth -= 1
            if not depth:
                return at + 1
        match = _STRING.match(text, at)
        at = _end(text, match.end() if match is not None else at + 1)
    raise JsoncConflict("the file is not valid JSON")


def _read(text: str, at: int) -> Any:
    """The value that begins at `at`, comments and trailing commas ignored."""
    raw = text[at : _skip_value(text, at)]
    pieces: list[str] = []
    place = 0
    while place < len(raw):
        skipped = _end(raw, place)
        if skipped > place:
            place = skipped
            continue
        match = _STRING.match(raw, place)
        piece = match.group() if match is not None else raw[place]
        if piece in "}]" and pieces and pieces[-1] == ",":
            pieces.pop()
        pieces.append(piece)
        place += len(piece)
    try:
        return json.loads("".join(pieces))
    except ValueError:
        raise JsoncConflict("the file is not valid JSON") from None


def _end(text: str, at: int) -> int:
    """The next position that is neither white space nor comment."""
    match = _SKIP.match(text, at)
    return match.end() if match is not None else at

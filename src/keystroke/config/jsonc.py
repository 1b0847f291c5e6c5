"""Adds a key to a JSON file with comments, as VS Code and Zed use it. The rest of the text stays."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

_STRING = r'"(?:[^"\\]|\\.)*"'
_COMMENT = re.compile(rf"({_STRING})|//[^\n]*|/\*.*?\*/", re.DOTALL)
# The end of a member, and the comma behind it if it is the last one.
_MEMBER = re.compile(rf'({_STRING}|[^\s,:"{{\[])(?:\s*,(?=\s*[}}\]]))?', re.DOTALL)
_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder(strict=False)


class JsoncConflict(ValueError):
    """The key is there already with another value, or the text is not an object."""


def add_key(text: str, path: Sequence[str], value: Any) -> str:
    """`text` with `value` at `path`. Unchanged if it is there already. Raises JsoncConflict if something else
    is there, or the text cannot be read."""
    if not _as_json(text).strip():
        text += "{}\n"
    plain = _as_json(text)
    at = _next(plain, 0)
    for depth, key in enumerate(path):
        if plain[at : at + 1] != "{":
            raise JsoncConflict(f"{'.'.join(path)} cannot be added: its parent is no object")
        inside = _find(plain, at, key)
        if inside is None:
            return _insert(text, at, _next(plain, at + 1), path[depth:], value)
        at = inside
    if _decode(plain, at)[0] != value:
        raise JsoncConflict(f"{'.'.join(path)} is set already")
    return text


def _as_json(text: str) -> str:
    """The text with blanks in place of comments and of commas behind last members, so that every other
    character keeps its place."""
    text = _COMMENT.sub(lambda found: found[1] or " " * len(found[0]), text)
    return _MEMBER.sub(lambda found: found[1].ljust(len(found[0])), text)


def _insert(text: str, at: int, first: int, keys: Sequence[str], value: Any) -> str:
    """Insert the first of `keys` as the first member of the object that begins at `at`; what is in it now
    begins at `first`."""
    for key in reversed(keys[1:]):
        value = {key: value}
    line = text[text.rfind("\n", 0, at) + 1 : at]
    indent = line[: len(line) - len(line.lstrip())]
    body = json.dumps(value, indent=2, ensure_ascii=False).replace("\n", f"\n{indent}  ")
    member = f"\n{indent}  {json.dumps(keys[0])}: {body}"
    if text[first : first + 1] == "}":
        return text[: at + 1] + text[at + 1 : first].rstrip() + member + f"\n{indent}" + text[first:]
    rest = text[at + 1 :]
    # The next member keeps its own line.
    return text[: at + 1] + member + "," + ("" if rest.lstrip(" \t").startswith("\n") else " ") + rest


def _find(plain: str, at: int, wanted: str) -> int | None:
    """Where the value of a key of the object at `at` begins; None if there is no such key."""
    at = _next(plain, at + 1)
    while plain[at : at + 1] != "}":
        key, end = _decode(plain, at)
        colon = _next(plain, end)
        if not isinstance(key, str) or plain[colon : colon + 1] != ":":
            raise JsoncConflict("the file is not valid JSON")
        value = _next(plain, colon + 1)
        if key == wanted:
            return value
        at = _next(plain, _decode(plain, value)[1])
        if plain[at : at + 1] == ",":
            at = _next(plain, at + 1)
    return None


def _decode(plain: str, at: int) -> tuple[Any, int]:
    """The value that begins at `at`, and its end."""
    try:
        return _DECODER.raw_decode(plain, at)
    except (ValueError, RecursionError):
        raise JsoncConflict("the file is not valid JSON") from None


def _next(plain: str, at: int) -> int:
    """The next position that is not white space."""
    found = _SPACE.match(plain, at)
    return found.end() if found is not None else at

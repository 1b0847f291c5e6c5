"""Decides how much to complete: the rest of a line, a line, or a block.

The text around the cursor and its syntax tree decide, before anything is generated. A block is completed only
where one was opened and has no body yet; a docstring alone is not a body. Everywhere else one line is
completed.
"""

from __future__ import annotations

import re
from enum import StrEnum

from keystroke.analysis.syntax import opens_block
from keystroke.assist.completion.ending import Ending, indent_width

_CLOSERS = re.compile(r"[\s)\]}>\"'`;,:]*")


class Extent(StrEnum):
    REST = "rest"
    LINE = "line"
    BLOCK = "block"


def line_at(text: str, cursor: int) -> tuple[int, int]:
    """The offsets at which the cursor's line begins and ends."""
    end = text.find("\n", cursor)
    return text.rfind("\n", 0, cursor) + 1, len(text) if end < 0 else end


def line_before(text: str, cursor: int) -> str:
    """The cursor's line, left of the cursor."""
    return text[text.rfind("\n", 0, cursor) + 1 : cursor]


def only_closers(rest: str) -> bool:
    """Whether only closing brackets and quotes, which editors add automatically, are right of the cursor."""
    return _CLOSERS.fullmatch(rest) is not None


def extent_at(text: str, cursor: int, language: str | None) -> Extent:
    start, end = line_at(text, cursor)
    before, rest = text[start:cursor], text[cursor:end]
    if rest.strip():
        return Extent.REST
    if body_floor(text, cursor, language) is not None:
        return Extent.BLOCK
    return Extent.REST if before.strip() else Extent.LINE


def body_floor(text: str, cursor: int, language: str | None) -> int | None:
    """The indentation of the line that opens a block whose missing body begins at the cursor, or None."""
    start, end = line_at(text, cursor)
    before = text[start:cursor]
    headers = [cursor] if before.strip() else []
    if (above := _line_above(text, start)) is not None:
        headers.append(above)
        if (further := _above_docstring(text, above)) is not None:
            headers.append(further)
    for header in headers:
        if not opens_block(text, header, language) or _has_body(text, header, end):
            continue
        floor = indent_width(line_before(text, header))
        if header == cursor or not before.strip() or indent_width(before) > floor:
            return floor
    return None


def ending_for(text: str, cursor: int, extent: Extent, language: str | None = None) -> Ending:
    if extent is not Extent.BLOCK:
        return Ending.at_cursor(text, cursor, 1)
    return Ending.at_cursor(text, cursor, 0, floor=body_floor(text, cursor, language))


def _line_above(text: str, start: int) -> int | None:
    """The end of the nearest line above that is not blank."""
    while start and text[start - 1].isspace():
        start -= 1
    return start or None


def _above_docstring(text: str, end: int) -> int | None:
    """The end of the line above a docstring that ends at `end`; None where none does."""
    line = line_before(text, end).strip()
    for quotes in ('"""', "'''"):
        if not line.endswith(quotes):
            continue
        if line.startswith(quotes) and len(line) > len(quotes) + 2:
            opened = end - len(line)
        else:
            opened = text.rfind(quotes, max(0, end - 4000), end - len(quotes))
        if opened < 0:
            return None
        start = text.rfind("\n", 0, opened) + 1
        return None if text[start:opened].strip() else _line_above(text, start)
    return None


def _has_body(text: str, header: int, after: int) -> bool:
    """Whether the first line after `after` that is not blank is indented deeper than the header."""
    depth = indent_width(line_before(text, header))
    for below in text[after : after + 2000].split("\n")[1:]:
        if below.strip():
            return indent_width(below) > depth
    return False

"""How much to complete: the rest of a line, a line, or a block.

Law: decided by the text around the cursor and its syntax tree, before a token is made. A block is offered
only where one was opened and has no body; everywhere else a line is what a glance can judge.
"""

from __future__ import annotations

import re
from enum import StrEnum

from keystroke.analysis.syntax import opens_block
from keystroke.assist.completion.ending import Ending

_CLOSERS = re.compile(r"[\s)\]}>\"'`;,:]*")
_INDENT = re.compile(r"[ \t]*")


class Extent(StrEnum):
    REST = "rest"
    LINE = "line"
    BLOCK = "block"


def line_at(text: str, cursor: int) -> tuple[int, int]:
    """Where the cursor's line begins and ends."""
    end = text.find("\n", cursor)
    return text.rfind("\n", 0, cursor) + 1, len(text) if end < 0 else end


def only_closers(rest: str) -> bool:
    """Whether what is right of the cursor is what editors put there by themselves."""
    return _CLOSERS.fullmatch(rest) is not None


def extent_at(text: str, cursor: int, language: str | None) -> Extent:
    start, end = line_at(text, cursor)
    before, rest = text[start:cursor], text[cursor:end]
    if rest.strip():
        return Extent.REST
    header = cursor if before.strip() else _line_above(text, start)
    if header is not None and opens_block(text, header, language) and not _has_body(text, header, end):
        return Extent.BLOCK
    return Extent.REST if before.strip() else Extent.LINE


def ending_for(text: str, cursor: int, extent: Extent) -> Ending:
    return Ending.at(text[:cursor], text[cursor:], 0 if extent is Extent.BLOCK else 1)


def _line_above(text: str, start: int) -> int | None:
    """The end of the nearest line above that is not blank."""
    body = text[:start].rstrip()
    return len(body) if body else None


def _has_body(text: str, header: int, after: int) -> bool:
    """Whether lines below the cursor are indented deeper than the header: then the block is written
    already."""
    line = text[text.rfind("\n", 0, header) + 1 : header]
    depth = _depth(line)
    for below in text[after : after + 2000].split("\n")[1:]:
        if below.strip():
            return _depth(below) > depth
    return False


def _depth(line: str) -> int:
    indent = _INDENT.match(line)
    assert indent is not None
    return len(indent[0].expandtabs(4))

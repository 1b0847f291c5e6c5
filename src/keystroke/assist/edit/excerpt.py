"""Shortens a file that is too long for a prompt.

It keeps the imports, the first line of every part, the region to rewrite and the parts that the region or the
instruction names, in the file's order; what is left out is marked.
"""

from __future__ import annotations

import re

from keystroke.analysis.outline import OutlineUnit, UnitKind, outline, walk_units
from keystroke.analysis.syntax import language_of
from keystroke.assist.edit.rewrite import Region

LINES = 160  # shorter files are shown whole
_NAME = re.compile(r"[A-Za-z_]\w*")


def excerpt(text: str, path: str, region: Region | None, instruction: str) -> str:
    """The file, or the relevant part of it in about LINES lines."""
    lines = text.splitlines(keepends=True)
    if len(lines) <= LINES:
        return text
    units = outline(text, language_of(path))
    kept: set[int] = set()
    for unit in walk_units(units):
        if unit.kind is UnitKind.IMPORTS:
            kept.update(range(unit.start, min(unit.end, unit.start + 30)))
        elif unit.kind is not UnitKind.STATEMENT or unit.name:
            kept.add(_header_row(unit, lines))
    if region is not None and region.path == path:
        end = len(lines) if region.end is None else region.end
        kept.update(range(max(0, region.start - 2), min(len(lines), end + 2)))
        named = set(_NAME.findall("".join(lines[region.start : end])))
    else:
        named = set()
    named |= set(_NAME.findall(instruction))
    parts = [unit for unit in walk_units(units) if not unit.members and unit.short in named]
    for unit in sorted(parts, key=lambda unit: unit.size):
        if len(kept) + unit.size > LINES:
            break
        kept.update(range(unit.start, unit.end))
    mark = "# ..." if path.endswith((".py", ".pyi", ".rb", ".sh")) else "// ..."
    return "".join(_join_with_marks(lines, sorted(kept), mark))


def _header_row(unit: OutlineUnit, lines: list[str]) -> int:
    rows = range(unit.start, unit.end)
    return next((row for row in rows if lines[row].strip() == unit.header), unit.start)


def _join_with_marks(lines: list[str], kept: list[int], mark: str) -> list[str]:
    out: list[str] = []
    at = 0
    for number in kept:
        if any(line.strip() for line in lines[at:number]):
            indent = lines[number][: len(lines[number]) - len(lines[number].lstrip())]
            out.append(f"{indent}{mark}\n")
        out.append(lines[number])
        at = number + 1
    if any(line.strip() for line in lines[at:]):
        out.append(f"{mark}\n")
    return out

"""Repairs the edges of a rewritten region.

A model that is shown a file and asked for one part of it often repeats lines of its neighbours, or writes the
part without its indentation. Only lines that the file already has are removed, and only at the edges.
"""

from __future__ import annotations

import os.path

_MOST = 40  # lines of a neighbour that are compared


def fix_borders(written: str, before: str, inside: str, after: str) -> str:
    """The written part without lines of its neighbours, and indented as the region is. Lines that the region
    itself begins or ends with stay."""
    lines = _indent_like(written.split("\n"), inside.split("\n"))
    head, own, tail = _nonblank_lines(before), _nonblank_lines(inside), _nonblank_lines(after)
    start = _repeated_head(lines, head, own)
    end = len(lines) - _repeated_head(lines[::-1], tail[::-1], own[::-1])
    return "\n".join(lines[start:end] if start < end else lines)


def _repeated_head(lines: list[str], neighbour: list[str], own: list[str]) -> int:
    """The number of lines at the start that repeat the end of the neighbour, blank lines included."""
    shown = [(number, line.rstrip()) for number, line in enumerate(lines) if line.strip()]
    texts = [line for _, line in shown]
    if texts[:2] == own[:2] or not neighbour:
        return 0
    # All of the neighbour, or as much of its end as the answer begins with.
    for size in range(min(len(neighbour), len(texts) - 1), 0, -1):
        if size > _MOST and size != len(neighbour):
            continue
        if texts[:size] == neighbour[-size:] and (
            size > 1 or own[:1] == texts[1:2] or _is_distinctive(texts[0])
        ):
            return shown[size][0]
    return 0


def _is_distinctive(line: str) -> bool:
    """Whether a single line is long enough to be a repetition and not a coincidence such as a brace."""
    return len(line.strip()) > 12


def _nonblank_lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.split("\n") if line.strip()]


def _indent_like(lines: list[str], inside: list[str]) -> list[str]:
    """The lines indented as the region is."""
    wanted, have = _common_indent(inside), _common_indent(lines)
    first = next((line for line in lines if line.strip()), "")
    if wanted is None or have is None or wanted == have or _common_indent([first]) != have:
        return lines
    if wanted.startswith(have) and not have:
        return [wanted + line if line.strip() else line for line in lines]
    if have.startswith(wanted):
        return [wanted + line[len(have) :] if line.strip() else line for line in lines]
    return lines


def _common_indent(lines: list[str]) -> str | None:
    """The white space that all lines begin with; None where there is no line."""
    indents = [line[: len(line) - len(line.lstrip())] for line in lines if line.strip()]
    return os.path.commonprefix(indents) if indents else None  # noqa: RUF071 - text, no paths

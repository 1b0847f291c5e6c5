"""Writes lines into a file with the file's own line ends, indentation and final newline.

Lines that stay are not touched.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from keystroke.assist.edit.operations import SearchReplace
from keystroke.text.compare import compare

_LINE = re.compile(r"([^\r\n]*)(\r\n|\r|\n|$)")


def split_lines(text: str) -> list[str]:
    """Lines with their ends. Only LF, CRLF and CR end a line."""
    return [found[0] for found in _LINE.finditer(text) if found[0]]


def strip_line_end(line: str) -> str:
    return line.rstrip("\r\n")


def _end_of(line: str) -> str:
    return line[len(strip_line_end(line)) :]


def replace_lines(text: str, start: int, end: int, new: str) -> str:
    """Replace lines `start` to `end`. Lines that stay keep their line ends; the file keeps its final newline
    or the lack of one."""
    lines = split_lines(text)
    old = [strip_line_end(line) for line in lines[start:end]]
    split = SearchReplace(
        tuple(old), tuple(_restore_blanks(old, [strip_line_end(line) for line in split_lines(new)]))
    )
    return "".join(_replace_block(lines, start, split, lambda line: line, None))


def _restore_blanks(old: list[str], new: list[str]) -> list[str]:
    """The new lines without changes of blank lines and trailing spaces, unless nothing else changes."""
    before, tail = _group_blank_lines(old)
    after, _ = _group_blank_lines(new)
    spans = compare([line.rstrip() for _, line in before], [line.rstrip() for _, line in after])
    if not spans:
        return new
    result: list[str] = []
    i = j = 0
    inserted = False
    for a0, a1, b0, b1 in [*spans, (len(before), len(before), len(after), len(after))]:
        for k in range(i, a0):
            # After an insertion, keep the model's blank lines.
            blanks = after[j][0] if inserted and k == i else before[k][0]
            result += [*blanks, before[k][1]]
        for k in range(b0, b1):
            blanks = before[a0][0] if k == b0 and a0 < a1 else after[k][0]
            result += [*blanks, after[k][1]]
        i, j, inserted = a1, b1, a0 == a1
    return result + tail


def _group_blank_lines(lines: list[str]) -> tuple[list[tuple[list[str], str]], list[str]]:
    """Each non-blank line with the blank lines above it, and the blank lines at the end."""
    result: list[tuple[list[str], str]] = []
    blanks: list[str] = []
    for line in lines:
        if line.strip():
            result.append((blanks, line))
            blanks = []
        else:
            blanks.append(line)
    return result, blanks


def splice_block(
    lines: list[str], at: int, split: SearchReplace, final_newline: bool | None = None
) -> list[str] | None:
    """The file's lines with the block at line `at` replaced and its indentation repaired; None where the
    block's indentation follows no rule. `final_newline` overrides the file's."""
    old = lines[at : at + len(split.search)]
    indents = _Indents.learn([strip_line_end(line) for line in old], split.search, lines)
    return None if indents is None else _replace_block(lines, at, split, indents.repair, final_newline)


def _replace_block(
    lines: list[str], at: int, split: SearchReplace, repair: Callable[[str], str], final_newline: bool | None
) -> list[str]:
    """The file's lines with the block replaced. Lines common to both sides of the block stay untouched."""
    old = lines[at : at + len(split.search)]
    end = line_end(lines, at)
    new: list[str] = []
    reached = 0
    for a0, a1, b0, b1 in compare(split.search, split.replace):
        new += old[reached:a0]
        # A line that replaces another takes its line end; further lines take the last one's.
        ends = [_end_of(line) or end for line in old[a0:a1]] or [end]
        new += [repair(line) + ends[min(i, len(ends) - 1)] for i, line in enumerate(split.replace[b0:b1])]
        reached = a1
    new += old[reached:]
    head, tail = lines[:at], lines[at + len(split.search) :]
    _settle_final_line(lines, head, new, tail, end, final_newline)
    return head + new + tail


def _settle_final_line(
    lines: list[str], head: list[str], new: list[str], tail: list[str], end: str, final_newline: bool | None
) -> None:
    """Only the last line may lack a line end, exactly if it did before."""
    wanted = final_newline
    if wanted is None or tail:
        wanted = not lines or lines[-1] != strip_line_end(lines[-1])
    for part in (head, new, tail):
        for index, line in enumerate(part):
            if line == strip_line_end(line):
                part[index] = line + end
    last = tail or new or head
    if last and not wanted:
        last[-1] = strip_line_end(last[-1])


def line_end(lines: list[str], at: int) -> str:
    """The line end used around `at`."""
    for line in lines[at : at + 3] + lines[max(0, at - 3) : at][::-1] + lines[:1]:
        if end := _end_of(line):
            return end
    return "\n"


@dataclass(frozen=True, slots=True)
class _Indents:
    """Maps the block's indentation to the file's: known depths exactly, others in proportion."""

    known: dict[str, str]
    tabs: bool  # the file indents with tabs
    strange: str  # a character the file never indents with, though it does indent
    unit: int  # columns a tab stands for, on whichever side has tabs

    @staticmethod
    def learn(old: Sequence[str], search: Sequence[str], lines: Sequence[str]) -> _Indents | None:
        known: dict[str, str] = {}
        for file_line, block_line in zip(old, search, strict=True):
            there = _indent_of(file_line)
            if block_line.strip() and known.setdefault(_indent_of(block_line), there) != there:
                return None
        used = "".join({_indent_of(line) for line in lines if line.strip()})
        tabs = "\t" in ("".join(known.values()) or used)
        strange = "" if not used else "\t" if "\t" not in used else " " if " " not in used else ""
        return _Indents(known, tabs, strange, _indent_unit(search if tabs else lines))

    def repair(self, line: str) -> str:
        indent = _indent_of(line)
        familiar = not self.strange or self.strange not in indent
        if not line.strip() or (familiar and all(key == value for key, value in self.known.items())):
            return line
        return self._map_indent(indent) + line[len(indent) :]

    def _map_indent(self, indent: str) -> str:
        if indent in self.known or not self.known:
            return self.known.get(indent, indent)
        width = self._width(indent)
        base = max(self.known, key=lambda key: (self._width(key) <= width, -abs(self._width(key) - width)))
        there = self._width(self.known[base])
        wanted = max(0, round(there + self._scale() * (width - self._width(base))))
        if wanted >= there:
            return self.known[base] + self._make_indent(wanted - there)
        return self._make_indent(wanted)

    def _width(self, indent: str) -> int:
        return len(indent.expandtabs(self.unit))

    def _scale(self) -> float:
        """Columns of the file for one of the block, where lines of different depth show it."""
        pairs = sorted((self._width(key), self._width(value)) for key, value in self.known.items())
        (low, low_there), (high, high_there) = pairs[0], pairs[-1]
        return (high_there - low_there) / (high - low) if high > low and high_there > low_there else 1.0

    def _make_indent(self, width: int) -> str:
        return "\t" * (width // self.unit) + " " * (width % self.unit) if self.tabs else " " * width


def _indent_of(line: str) -> str:
    return line[: len(line) - len(line.lstrip(" \t"))]


def _indent_unit(lines: Sequence[str]) -> int:
    """The number of spaces per level: the most frequent increase from one line to the next."""
    depths = [len(_indent_of(line)) for line in lines if line.strip() and "\t" not in _indent_of(line)]
    steps = Counter(after - before for before, after in pairwise(depths) if 2 <= after - before <= 8)
    return steps.most_common(1)[0][0] if steps else 4

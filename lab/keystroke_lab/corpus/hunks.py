"""What changed in a file between two versions, as hunks a person could have made one after another.

A file without useful edits ends in a named reason. Changes that teach nothing (formatting, sorted imports,
version numbers, long rewrites) are applied to the text the hunks start from, so the hunks always lead exactly
to the new version.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import StrEnum

LONGEST_HUNK = 20  # lines on either side
MOST_HUNKS = 24  # a file that changed in more places was rewritten
LARGEST_FILE = 40_000  # characters; comparing larger files costs more than it is worth
_NEAR = 2  # hunks with at most so many lines between them are one
_LONGEST_LINE = 200
_REWRITTEN = 0.5  # share of the lines


class NoEdit(StrEnum):
    """Why a changed file gives no trajectory."""

    SAME = "same"
    TOO_LARGE = "too_large"
    REWRITTEN = "rewritten"
    REORDERED = "reordered"
    TRIVIAL = "trivial"  # nothing left besides formatting, versions, data and long rewrites


@dataclass(frozen=True, slots=True)
class EditHunk:
    """Lines [start_line, start_line + len(old)) of the text before the first hunk became `new`."""

    start_line: int
    old: list[str]
    new: list[str]


@dataclass(frozen=True, slots=True)
class Trajectory:
    before: str
    hunks: list[EditHunk]

    def after(self) -> str:
        """`before` with every hunk applied."""
        lines = self.before.split("\n")
        for hunk in reversed(self.hunks):
            lines[hunk.start_line : hunk.start_line + len(hunk.old)] = hunk.new
        return "\n".join(lines)


def trajectory(old: str, new: str) -> Trajectory | NoEdit:
    """The hunks that lead from nearly `old` to `new`, in the order of their lines; or why there are none."""
    if old == new:
        return NoEdit.SAME
    if max(len(old), len(new)) > LARGEST_FILE:
        return NoEdit.TOO_LARGE
    a, b = old.split("\n"), new.split("\n")
    if sorted(filter(None, map(str.strip, a))) == sorted(filter(None, map(str.strip, b))):
        return NoEdit.REORDERED
    parts = list(_parts(a, b))
    if sum(max(len(p.old), len(p.new)) for p in parts if p.changed) > _REWRITTEN * max(len(a), len(b)):
        return NoEdit.REWRITTEN
    # What is not worth a hunk counts as done before the first one.
    parts = [p if p.changed and is_worthwhile(p.old, p.new) else _Part(p.new, p.new, False) for p in parts]
    before: list[str] = []
    hunks: list[EditHunk] = []
    for part in _joined(parts):
        if part.changed:
            hunks.append(EditHunk(len(before), part.old, part.new))
        before.extend(part.old)
    if not hunks:
        return NoEdit.TRIVIAL
    return Trajectory("\n".join(before), hunks) if len(hunks) <= MOST_HUNKS else NoEdit.REWRITTEN


@dataclass(frozen=True, slots=True)
class _Part:
    old: list[str]
    new: list[str]
    changed: bool


def _parts(a: list[str], b: list[str]) -> Iterator[_Part]:
    """The two versions side by side. What both begin and end with is set aside first: most of a file."""
    head = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    most = min(len(a), len(b)) - head
    tail = next((i for i in range(most) if a[-1 - i] != b[-1 - i]), most)
    yield _Part(a[:head], a[:head], False)
    inner_a, inner_b = a[head : len(a) - tail], b[head : len(b) - tail]
    # Empty lines match everywhere and mean nothing: they must not be what two versions are aligned by.
    matcher = SequenceMatcher(lambda line: not line.strip(), inner_a, inner_b, autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        yield _Part(inner_a[i1:i2], inner_b[j1:j2], tag != "equal")
    yield _Part(a[len(a) - tail :], b[len(b) - tail :], False)


def _joined(parts: list[_Part]) -> list[_Part]:
    """Changes with at most a line or two between them made one, as long as it stays short."""
    found: list[_Part] = []
    for part in parts:
        if found and not found[-1].changed and not part.changed:
            found[-1] = _Part(found[-1].old + part.old, found[-1].new + part.new, False)
        elif found and found[-1].changed and part.changed:
            found[-1] = _Part(found[-1].old + part.old, found[-1].new + part.new, True)
        elif part.old or part.new:
            found.append(part)
        if len(found) >= 3 and part.changed and found[-3].changed and len(found[-2].old) <= _NEAR:
            one = _Part(
                found[-3].old + found[-2].old + found[-1].old,
                found[-3].new + found[-2].new + found[-1].new,
                True,
            )
            if max(len(one.old), len(one.new)) <= LONGEST_HUNK:
                found[-3:] = [one]
    return found


_IMPORT = re.compile(r"^\s*(import|from)\s|^\s*[\w, ]+(\s+as\s+\w+)?,?\)?$|^\s*[()]$")
_NUMBERS = re.compile(r"[\d.,\- ]*\d[\d.]*((a|b|rc|dev|post|\.dev|\.post)\d+)?")
_RELEASE_WORDS = re.compile(
    r"version|copyright|\(c\)|©|release|\bdate\b|\byear\b|revision|[\"']v?\d+\.\d+(\.\d+)*", re.I
)
_NOTICE = re.compile(r"copyright|licen[sc]e|spdx-", re.I)
_DATA_LINE = re.compile(r"^\s*[\[({]*\s*(-?\d|0x|[bur]?['\"]|\\x|[\])}])")


def is_worthwhile(old: list[str], new: list[str]) -> bool:
    """Whether a change of these lines is worth predicting."""
    if max(len(old), len(new)) > LONGEST_HUNK or any(len(line) > _LONGEST_LINE for line in (*old, *new)):
        return False
    return not (is_formatting(old, new) or is_sorting(old, new) or is_release(old, new) or is_data(old, new))


def squeezed(lines: list[str], *, brackets: bool = True) -> str:
    """The lines without what a formatter may change: space, quotes, trailing commas, brackets if it wraps."""
    text = re.sub(r"[\s\\]" if brackets else r"[\s()\\]", "", "".join(lines)).replace("'", '"')
    return re.sub(r',(?=[\])}]|$)|\bu(?=")', "", text)


def is_formatting(old: list[str], new: list[str]) -> bool:
    """Whether only the layout changed. Brackets may come and go where lines were wrapped or joined; on one
    line `name` and `name()` differ."""
    keep = len(old) == len(new) and not any(line.endswith("\\") for line in old)
    return squeezed(old, brackets=keep) == squeezed(new, brackets=keep)


def is_sorting(old: list[str], new: list[str]) -> bool:
    """Imports in another order or grouping."""
    lines = [line for line in (*old, *new) if line.strip()]
    if not all(_IMPORT.match(line) for line in lines):
        return False
    words = [sorted(set(re.findall(r"[\w.]+", " ".join(side)))) for side in (old, new)]
    return words[0] == words[1]


def is_release(old: list[str], new: list[str]) -> bool:
    """Version numbers, dates, years and licence notices."""
    lines = [line for line in (*old, *new) if line.strip()]
    if lines and all(_NOTICE.search(line) for line in lines):
        return True
    plain = [_NUMBERS.sub("0", "\n".join(side)) for side in (old, new)]
    return plain[0] == plain[1] and any(_RELEASE_WORDS.search(line) for line in lines)


def is_data(old: list[str], new: list[str]) -> bool:
    """Rows of a table: numbers and strings alone."""
    lines = [line for line in (*old, *new) if line.strip()]
    return len(lines) > 6 and sum(1 for line in lines if _DATA_LINE.match(line)) > 0.7 * len(lines)

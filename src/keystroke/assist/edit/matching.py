"""Where a search block is in a file, and the file with the block replaced.

Law: exact lines first, then lines that differ in white space only, then part of one line, then the one place
that is nearly the same; each step counts only if exactly one place fits. Lines the block merely repeats keep
the file's own characters: only lines the block changes are written, with the file's line ends and indents.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from math import gcd

from keystroke.assist.edit.operations import Reason, Replacement, Split
from keystroke.text.diff import compare

_LINE = re.compile(r"([^\r\n]*)(\r\n|\r|\n|$)")
_ALIKE = 0.85  # mean likeness that a nearly equal place needs
_MARGIN = 0.05  # and how much better than any other place it must be
_MAX_FUZZY_LINES = 400
_MAX_FUZZY_WIDTH = 1_000  # comparing two lines costs the product of their lengths
_MAX_CANDIDATES = 12


@dataclass(frozen=True, slots=True)
class Unmatched:
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Replaced:
    """The whole new text, and the line after the replaced ones, counted in it."""

    text: str
    resume: int


def replace(text: str, change: Replacement, start: int = 0) -> Replaced | Unmatched:
    """Make one replacement. Lines before `start` are looked at only if nothing fits after it."""
    lines = split_lines(text)
    bare = [_bare(line) for line in lines]
    inside = _narrowed(bare, change.within, start)
    if isinstance(inside, Unmatched):
        return inside
    problem: Unmatched | None = None
    for reading in change.readings:
        found = _find(bare, reading, change, inside)
        if isinstance(found, Unmatched) and found.reason is Reason.NOT_FOUND and len(change.readings) == 1:
            if (inline := _inline(text, reading)) is not None:
                return Replaced(inline, start)
            found = _nearly(bare, reading)
        if isinstance(found, Unmatched):
            problem = problem or found
            continue
        at, split = found
        written = _spliced(lines, at, split, change)
        if isinstance(written, Unmatched):
            problem = problem or written
            continue
        return Replaced("".join(written), at + len(split.replace))
    return problem or Unmatched(Reason.NOT_FOUND, "the block holds no lines to look for")


def rewritten(text: str, start: int, end: int, new: str) -> str:
    """The text with lines `start` to `end` written anew. Lines that stay keep their own line ends, and the
    file its final newline or the lack of one."""
    lines = split_lines(text)
    old = [_bare(line) for line in lines[start:end]]
    split = Split(tuple(old), tuple(_quietened(old, [_bare(line) for line in split_lines(new)])))
    return "".join(_written(lines, start, split, lambda line: line, None))


def _quietened(old: list[str], new: list[str]) -> list[str]:
    """The new lines without changes of blank lines and trailing blanks, which come of writing a text anew and
    were not asked for; unless nothing else changes: then they were."""
    before, tail = _spaced(old)
    after, _ = _spaced(new)
    spans = compare([line.rstrip() for _, line in before], [line.rstrip() for _, line in after])
    if not spans:
        return new
    result: list[str] = []
    i = j = 0
    inserted = False
    for a0, a1, b0, b1 in [*spans, (len(before), len(before), len(after), len(after))]:
        for k in range(i, a0):
            # What follows an insertion stands as far from it as the model put it.
            blanks = after[j][0] if inserted and k == i else before[k][0]
            result += [*blanks, before[k][1]]
        for k in range(b0, b1):
            blanks = before[a0][0] if k == b0 and a0 < a1 else after[k][0]
            result += [*blanks, after[k][1]]
        i, j, inserted = a1, b1, a0 == a1
    return result + tail


def _spaced(lines: list[str]) -> tuple[list[tuple[list[str], str]], list[str]]:
    """Each line that shows something, with the blank lines above it; and the blank lines at the end."""
    result: list[tuple[list[str], str]] = []
    blanks: list[str] = []
    for line in lines:
        if line.strip():
            result.append((blanks, line))
            blanks = []
        else:
            blanks.append(line)
    return result, blanks


def split_lines(text: str) -> list[str]:
    """Lines with their ends. Only LF, CRLF and CR end a line."""
    return [found[0] for found in _LINE.finditer(text) if found[0]]


def _bare(line: str) -> str:
    return line.rstrip("\r\n")


def _end(line: str) -> str:
    return line[len(_bare(line)) :]


# ── finding ───────────────────────────────────────────────────────────────────────────────────


def _narrowed(bare: list[str], headers: Sequence[str], start: int) -> int | Unmatched:
    """The line after the last header, each looked for below the one before."""
    for header in headers:
        inside = _header(bare, header, start)
        if inside is None:
            return Unmatched(Reason.NOT_FOUND, f"the header line {header.strip()!r} is not in the file")
        start = inside + 1
    return start


def _find(bare: list[str], split: Split, change: Replacement, start: int) -> tuple[int, Split] | Unmatched:
    """The line where the block begins, and the block without blank lines around it if those do not fit."""
    placed = change.near is not None or change.within or change.at_end
    if not split.search or not (placed or any(line.strip() for line in split.search)):
        insertion = Split((), split.replace)
        if not bare or change.near is not None:
            return min(change.near or 0, len(bare)), insertion
        if change.within:
            return start, insertion
        if change.at_end:
            return len(bare), insertion
        return Unmatched(Reason.EMPTY_SEARCH, "the block does not say what to replace; repeat those lines")
    ambiguous: list[int] = []
    for trial in _trials(split):
        if not trial.search:
            continue
        for key in (str, str.rstrip, _spaceless):
            places = _places([key(line) for line in bare], [key(line) for line in trial.search])
            chosen = _chosen(places, change, start, len(bare) - len(trial.search))
            if chosen is not None:
                return chosen, trial
            ambiguous = ambiguous or places
            if places:
                break
    if ambiguous:
        where = ", ".join(str(place + 1) for place in ambiguous[:8])
        return Unmatched(
            Reason.AMBIGUOUS,
            f"the lines to replace occur {len(ambiguous)} times (at {where}); repeat more lines around them",
        )
    return Unmatched(Reason.NOT_FOUND, "the lines to replace are not in the file; copy them from it exactly")


def _inline(text: str, split: Split) -> str | None:
    """The text with part of one line replaced, where the block is that part and stands there only once."""
    if len(split.search) != 1 or not split.search[0].strip() or text.count(split.search[0]) != 1:
        return None
    return text.replace(split.search[0], _line_end(split_lines(text), 0).join(split.replace))


def _trials(split: Split) -> Sequence[Split]:
    """The block as written, then without the blank lines that both its sides begin or end with."""
    search, replace = list(split.search), list(split.replace)
    while search and replace and not search[0].strip() and not replace[0].strip():
        search, replace = search[1:], replace[1:]
    while search and replace and not search[-1].strip() and not replace[-1].strip():
        search, replace = search[:-1], replace[:-1]
    trimmed = Split(tuple(search), tuple(replace))
    return (split,) if trimmed == split else (split, trimmed)


def _header(bare: list[str], header: str, start: int) -> int | None:
    for key in (str, _spaceless):
        wanted = key(header)
        for index in range(start, len(bare)):
            if key(bare[index]) == wanted:
                return index
    return None


def _spaceless(line: str) -> str:
    return " ".join(line.split())


def _places(lines: list[str], block: list[str]) -> list[int]:
    first = block[0]
    size = len(block)
    return [i for i in range(len(lines) - size + 1) if lines[i] == first and lines[i : i + size] == block]


def _chosen(places: list[int], change: Replacement, start: int, last: int) -> int | None:
    """The one place that is meant, if that is certain."""
    if change.at_end and last in places:
        return last
    later = [place for place in places if place >= start] or places
    if len(later) == 1:
        return later[0]
    if later and change.within:
        return later[0]  # the first after the header is what the header is for
    if later and change.near is not None:
        ranked = sorted(later, key=lambda place: abs(place - (change.near or 0)))
        if abs(ranked[0] - change.near) < abs(ranked[1] - change.near):
            return ranked[0]
    return None


def _nearly(bare: list[str], split: Split) -> tuple[int, Split] | Unmatched:
    """The one place that is almost the block. Lines found elsewhere vote for where the block would begin."""
    missing = Unmatched(
        Reason.NOT_FOUND, "the lines to replace are not in the file; copy them from it exactly"
    )
    block = [_spaceless(line) for line in split.search]
    size = len(block)
    if size > _MAX_FUZZY_LINES or size > len(bare) or not any(block):
        return missing
    flat = [_spaceless(line) for line in bare]
    wanted: dict[str, list[int]] = {}
    for offset, line in enumerate(block):
        if line:
            wanted.setdefault(line, []).append(offset)
    votes: Counter[int] = Counter()
    for index, line in enumerate(flat):
        for offset in wanted.get(line, ()):
            if 0 <= index - offset <= len(flat) - size:
                votes[index - offset] += 1
    starts = [place for place, _ in votes.most_common(_MAX_CANDIDATES)]
    if size <= 3 and len(flat) <= 5_000:
        starts = list(range(len(flat) - size + 1))
    scored = sorted(((_likeness(flat, place, block), place) for place in starts), reverse=True)
    scored = [entry for entry in scored if entry[0] >= _ALIKE]
    if not scored:
        return missing
    if len(scored) > 1 and scored[0][0] - scored[1][0] < _MARGIN:
        where = " and ".join(str(place + 1) for _, place in scored[:2])
        return Unmatched(
            Reason.AMBIGUOUS, f"lines {where} both resemble the lines to replace; copy them exactly"
        )
    return scored[0][1], split


def _likeness(flat: list[str], start: int, block: list[str]) -> float:
    """0 to 1; lines count by their length, so that braces and blanks decide nothing."""
    total = weight = 0.0
    for line, wanted in zip(flat[start : start + len(block)], block, strict=True):
        size = max(len(line), len(wanted), 1)
        weight += size
        if line == wanted:
            total += size
            continue
        if size > _MAX_FUZZY_WIDTH:
            continue
        matcher = SequenceMatcher(None, line, wanted, autojunk=False)
        if matcher.real_quick_ratio() < 0.5 or matcher.quick_ratio() < 0.5:
            continue
        total += size * matcher.ratio()
    return total / weight


# ── writing ───────────────────────────────────────────────────────────────────────────────────


def _spliced(lines: list[str], at: int, split: Split, change: Replacement) -> list[str] | Unmatched:
    """The file's lines with the block replaced and its indentation repaired."""
    old = lines[at : at + len(split.search)]
    indents = _Indents.learned([_bare(line) for line in old], split.search, lines)
    if indents is None:
        return Unmatched(
            Reason.INDENTATION,
            "the block's indentation does not follow the file's; copy the lines with theirs",
        )
    return _written(lines, at, split, indents.repaired, change.final_newline)


def _written(
    lines: list[str], at: int, split: Split, repaired: Callable[[str], str], final_newline: bool | None
) -> list[str]:
    """The file's lines with the block replaced. Lines common to both sides of the block stay untouched."""
    old = lines[at : at + len(split.search)]
    end = _line_end(lines, at)
    new: list[str] = []
    reached = 0
    for a0, a1, b0, b1 in compare(split.search, split.replace):
        new += old[reached:a0]
        # A line that takes another's place takes its line end too; further lines follow the last of them.
        ends = [_end(line) or end for line in old[a0:a1]] or [end]
        new += [repaired(line) + ends[min(i, len(ends) - 1)] for i, line in enumerate(split.replace[b0:b1])]
        reached = a1
    new += old[reached:]
    head, tail = lines[:at], lines[at + len(split.search) :]
    _settle_final_line(lines, head, new, tail, end, final_newline)
    return head + new + tail


def _settle_final_line(
    lines: list[str], head: list[str], new: list[str], tail: list[str], end: str, final_newline: bool | None
) -> None:
    """Only the last line of a file may lack a line end, and it does exactly if it did before."""
    wanted = final_newline
    if wanted is None or tail:
        wanted = not lines or lines[-1] != _bare(lines[-1])
    for part in (head, new, tail):
        for index, line in enumerate(part):
            if line == _bare(line):
                part[index] = line + end
    last = tail or new or head
    if last and not wanted:
        last[-1] = _bare(last[-1])


def _line_end(lines: list[str], at: int) -> str:
    """How lines end around `at`; a file that mixes ends keeps its local habit."""
    for line in lines[at : at + 3] + lines[max(0, at - 3) : at][::-1] + lines[:1]:
        if end := _end(line):
            return end
    return "\n"


@dataclass(frozen=True, slots=True)
class _Indents:
    """Maps the block's indentation to the file's."""

    known: dict[str, str]
    unit_of_block: int
    unit_of_file: int
    tabs: bool

    @staticmethod
    def learned(old: Sequence[str], search: Sequence[str], lines: Sequence[str]) -> _Indents | None:
        known: dict[str, str] = {}
        for file_line, block_line in zip(old, search, strict=True):
            if block_line.strip() and known.setdefault(_indent(block_line), _indent(file_line)) != _indent(
                file_line
            ):
                return None
        file_indents = [_indent(line) for line in lines if line[:1] in (" ", "\t") and line.strip()]
        tabs = any("\t" in indent for indent in known.values()) or (
            not any(known.values()) and bool(file_indents) and file_indents[0].startswith("\t")
        )
        return _Indents(known, _unit(known), _unit(file_indents), tabs)

    def repaired(self, line: str) -> str:
        if not line.strip() or all(key == value for key, value in self.known.items()):
            return line
        indent = _indent(line)
        return self._mapped(indent) + line[len(indent) :]

    def _mapped(self, indent: str) -> str:
        if indent in self.known:
            return self.known[indent]
        shorter = [key for key in self.known if indent.startswith(key)]
        if shorter:
            base = max(shorter, key=len)
            return self.known[base] + self._translated(indent[len(base) :])
        longer = [key for key in self.known if key.startswith(indent)]
        if longer:
            base = min(longer, key=len)
            mapped, extra = self.known[base], self._translated(base[len(indent) :])
            return mapped[: len(mapped) - len(extra)] if mapped.endswith(extra) else mapped
        return indent

    def _translated(self, extra: str) -> str:
        """Further indentation in the file's own unit."""
        if self.tabs and extra.strip("\t"):
            return "\t" * round(len(extra.expandtabs(self.unit_of_block)) / self.unit_of_block)
        return extra if self.tabs else extra.replace("\t", " " * self.unit_of_file)


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip(" \t"))]


def _unit(indents: Sequence[str] | dict[str, str]) -> int:
    """The number of spaces one level takes, as far as these indentations show it."""
    sizes = [len(indent) for indent in indents if indent and "\t" not in indent]
    unit = gcd(*sizes) if sizes else 4  # four is the commonest habit
    return unit if unit > 1 else 4

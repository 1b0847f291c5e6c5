"""Finds a search block in a file.

Exact lines are tried first, then lines that differ in white space only, then part of one line, then a unique
similar place. Each step counts only if exactly one place fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from keystroke.assist.edit.operations import EditFailure, Replacement, SearchReplace
from keystroke.assist.edit.operations import EditFailureReason as Reason
from keystroke.assist.edit.splice import line_end, splice_block, split_lines, strip_line_end

_ALIKE = 0.85  # mean similarity that a similar place needs
_MARGIN = 0.05  # by which it must exceed every other place
_MAX_FUZZY_LINES = 400
_MAX_FUZZY_WIDTH = 1_000  # comparing two lines costs the product of their lengths
_MAX_CANDIDATES = 12
_MISSING = "the lines to replace are not in the file; copy them from it exactly"


@dataclass(frozen=True, slots=True)
class MatchResult:
    """The whole new text, and the line after the replaced ones, counted in it."""

    text: str
    resume: int


def apply_replacement(text: str, change: Replacement, start: int = 0) -> MatchResult | EditFailure:
    """Make one replacement. Lines before `start` are looked at only if nothing fits after it."""
    lines = split_lines(text)
    plain = [strip_line_end(line) for line in lines]
    inside = _find_start(plain, change, start)
    if isinstance(inside, EditFailure):
        return inside
    problem: EditFailure | None = None
    for reading in change.readings:
        found = _find_block(plain, reading, change, inside)
        missing = isinstance(found, EditFailure) and found.reason is Reason.NOT_FOUND
        if missing and len(change.readings) == 1:
            # The lines of a patch are whole lines; a block may quote part of one.
            if not change.in_order and (inline := _replace_inline(text, reading)) is not None:
                return MatchResult(inline, start)
            found = _find_similar(plain, reading, change.path)
        if isinstance(found, EditFailure):
            problem = problem or found
            continue
        at, split = found
        written = splice_block(lines, at, split, change.final_newline)
        if written is None:
            message = "the block's indentation does not follow the file's; copy the lines with theirs"
            problem = problem or EditFailure(Reason.INDENTATION, change.path, message)
            continue
        return MatchResult("".join(written), at + len(split.replace))
    return problem or EditFailure(Reason.NOT_FOUND, change.path, "the block holds no lines to look for")


def _find_start(lines: list[str], change: Replacement, start: int) -> int | EditFailure:
    """The line after the last header, each looked for below the one before."""
    for header in change.within:
        inside = _find_header(lines, header, start)
        if inside is None:
            message = f"the header line {header.strip()!r} is not in the file"
            return EditFailure(Reason.NOT_FOUND, change.path, message)
        start = inside + 1
    return start


def _find_block(
    lines: list[str], split: SearchReplace, change: Replacement, start: int
) -> tuple[int, SearchReplace] | EditFailure:
    """The line where the block begins, and the block, without outer blank lines if those do not match."""
    placed = change.near is not None or change.within or change.at_end
    if not split.search or not (placed or any(line.strip() for line in split.search)):
        insertion = SearchReplace((), split.replace)
        if not lines or change.near is not None:
            return min(change.near or 0, len(lines)), insertion
        if change.within:
            return start, insertion
        if change.at_end:
            return len(lines), insertion
        message = "the block does not say what to replace; repeat those lines"
        return EditFailure(Reason.EMPTY_SEARCH, change.path, message)
    for trial in _trim_variants(split):
        if not trial.search:
            continue
        for key in (str, str.rstrip, _collapse_spaces):
            places = _find_places([key(line) for line in lines], [key(line) for line in trial.search])
            chosen = _choose_place(places, change, start, len(lines) - len(trial.search))
            if chosen is not None:
                return chosen, trial
            if places:  # a less strict comparison would pick one by chance
                where = ", ".join(str(place + 1) for place in places[:8])
                message = (
                    f"the lines to replace occur {len(places)} times (at {where}); repeat more around them"
                )
                return EditFailure(Reason.AMBIGUOUS, change.path, message)
    return EditFailure(Reason.NOT_FOUND, change.path, _MISSING)


def _replace_inline(text: str, split: SearchReplace) -> str | None:
    """The text with part of one line replaced, where the block occurs exactly once."""
    wanted = split.search[0]
    if len(split.search) != 1 or not wanted.strip() or text.count(wanted) != 1:
        return None
    start = text.index(wanted)
    end = start + len(wanted)
    if _is_inside_word(text, start) or _is_inside_word(text, end):
        return None
    return text[:start] + line_end(split_lines(text), 0).join(split.replace) + text[end:]


def _is_inside_word(text: str, at: int) -> bool:
    """Whether `at` is inside a word: "foo" does not match in "foobar"."""
    return all(c.isalnum() or c == "_" for c in text[at - 1 : at + 1]) and 0 < at < len(text)


def _trim_variants(split: SearchReplace) -> Sequence[SearchReplace]:
    """The block as written, then without the blank lines that both its sides begin or end with."""
    search, replace = list(split.search), list(split.replace)
    while search and replace and not search[0].strip() and not replace[0].strip():
        search, replace = search[1:], replace[1:]
    while search and replace and not search[-1].strip() and not replace[-1].strip():
        search, replace = search[:-1], replace[:-1]
    trimmed = SearchReplace(tuple(search), tuple(replace))
    return (split,) if trimmed == split else (split, trimmed)


def _find_header(lines: list[str], header: str, start: int) -> int | None:
    for key in (str, _collapse_spaces):
        wanted = key(header)
        for index in range(start, len(lines)):
            if key(lines[index]) == wanted:
                return index
    return None


def _collapse_spaces(line: str) -> str:
    return " ".join(line.split())


def _find_places(lines: list[str], block: list[str]) -> list[int]:
    first = block[0]
    size = len(block)
    return [i for i in range(len(lines) - size + 1) if lines[i] == first and lines[i : i + size] == block]


def _choose_place(places: list[int], change: Replacement, start: int, last: int) -> int | None:
    """The one matching place, or None where several fit."""
    if change.at_end and last in places:
        return last
    later = [place for place in places if place >= start] or places
    if len(later) == 1:
        return later[0]
    if later and change.within:
        return later[0]  # the first one after the header
    if later and change.near is not None:
        ranked = sorted(later, key=lambda place: abs(place - (change.near or 0)))
        if abs(ranked[0] - change.near) < abs(ranked[1] - change.near):
            return ranked[0]
    return None


def _find_similar(
    lines: list[str], split: SearchReplace, path: str
) -> tuple[int, SearchReplace] | EditFailure:
    """The only place that is similar to the block. Equal lines vote for where the block would begin."""
    missing = EditFailure(Reason.NOT_FOUND, path, _MISSING)
    block = [_collapse_spaces(line) for line in split.search]
    size = len(block)
    if size > _MAX_FUZZY_LINES or size > len(lines) or not any(block):
        return missing
    flat = [_collapse_spaces(line) for line in lines]
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
    scored = sorted(((_similarity(flat, place, block), place) for place in starts), reverse=True)
    scored = [entry for entry in scored if entry[0] >= _ALIKE]
    if not scored:
        return missing
    if len(scored) > 1 and scored[0][0] - scored[1][0] < _MARGIN:
        where = " and ".join(str(place + 1) for _, place in scored[:2])
        message = f"lines {where} both resemble the lines to replace; copy them exactly"
        return EditFailure(Reason.AMBIGUOUS, path, message)
    return scored[0][1], split


def _similarity(flat: list[str], start: int, block: list[str]) -> float:
    """Similarity from 0 to 1, weighted by the length of the lines."""
    total = weight = 0.0
    for line, wanted in zip(flat[start : start + len(block)], block, strict=True):
        size = max(len(line), len(wanted), 1)
        weight += size
        if line == wanted:
            total += size
        elif size <= _MAX_FUZZY_WIDTH:
            matcher = SequenceMatcher(None, line, wanted, autojunk=False)
            if matcher.real_quick_ratio() >= 0.5 and matcher.quick_ratio() >= 0.5:
                total += size * matcher.ratio()
    return total / weight

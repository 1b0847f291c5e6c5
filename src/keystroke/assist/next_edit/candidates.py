"""Lines where a change may require another one, best guess first, for the model to judge.

Candidates are the lines around the change, lines with a name that the change added or removed, lines similar
to the changed ones, and lines with a diagnostic. Two candidates are far enough apart not to share one
question.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from keystroke.assist.next_edit.burst import IDENTIFIER, Burst

MOST = 6  # candidates for one change
_FAR = 1500  # lines searched on either side of the change
_NAMES = 8
_PER_NAME = 4  # lines of one name; a frequent name says little
_ALIKE = 0.5  # share of common words from which two lines are similar
_WORD = re.compile(r"\w+|[^\w\s]")
_COMMON = frozenset({
    "and", "assert", "async", "await", "bool", "break", "case", "catch", "class", "const", "continue", "def",
    "del", "elif", "else", "except", "false", "finally", "float", "for", "from", "func", "function", "import",
    "int", "lambda", "let", "new", "nil", "none", "not", "null", "pass", "print", "public", "raise", "return",
    "self", "static", "str", "string", "struct", "super", "switch", "this", "throw", "true", "try", "type",
    "var", "void", "while", "with", "yield",
})  # fmt: skip


def find_candidates(
    change: Burst, problems: Sequence[int] = (), *, apart: int = 6, most: int = MOST
) -> list[int]:
    """Lines of `change.after`, the best guesses first, at least `apart` lines from each other. `problems`:
    offsets that diagnostics point at."""
    text = change.after
    rows = text.split("\n")
    changed = (text.count("\n", 0, change.start), text.count("\n", 0, change.new_end) + 1)
    found = sorted(_guess_lines(change, rows, changed, problems), key=lambda guess: (-guess[1], guess[0]))
    spots: list[int] = []
    for row, _ in found:
        if all(abs(spot - row) >= apart for spot in spots):
            spots.append(row)
            if len(spots) == most:
                break
    return spots


def _guess_lines(
    change: Burst, rows: Sequence[str], changed: tuple[int, int], problems: Sequence[int]
) -> Iterator[tuple[int, float]]:
    first, last = max(0, changed[0] - _FAR), min(len(rows), changed[1] + _FAR)
    outside = [row for row in range(first, last) if not changed[0] <= row < changed[1] and rows[row].strip()]
    yield from _nearest_lines(outside, changed)
    yield from _lines_with_names(change, rows, outside, changed)
    yield from _similar_lines(change, rows, outside)
    for offset in problems:
        row = change.after.count("\n", 0, offset)
        if row in outside:
            yield row, 0.95


def _nearest_lines(outside: Sequence[int], changed: tuple[int, int]) -> Iterator[tuple[int, float]]:
    below = next((row for row in outside if row >= changed[1]), None)
    above = next((row for row in reversed(outside) if row < changed[0]), None)
    if below is not None:
        yield below, 0.8
    if above is not None:
        yield above, 0.55


def _lines_with_names(
    change: Burst, rows: Sequence[str], outside: Sequence[int], changed: tuple[int, int]
) -> Iterator[tuple[int, float]]:
    """Lines with a removed name weigh most, then those with an added name, then those with a name that
    stayed."""
    removed, added, kept = changed_names(change)
    for names, weight in ((removed, 1.0), (added, 0.7), (kept, 0.5)):
        for name in names[:_NAMES]:
            word = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)")
            matching = [row for row in outside if name in rows[row] and word.search(rows[row])]
            matching.sort(key=lambda row: _distance(row, changed))
            for index, row in enumerate(matching[:_PER_NAME]):
                yield row, weight - 0.03 * index


def _similar_lines(change: Burst, rows: Sequence[str], outside: Sequence[int]) -> Iterator[tuple[int, float]]:
    """Lines like those that were changed, as they were before."""
    old = [
        words
        for line in _touched_lines(change.before, change.start, change.old_end)
        if len(words := _words(line)) > 2
    ]
    if not old:
        return
    for row in outside:
        words = _words(rows[row])
        if len(words) < 3:
            continue
        share = max(len(words & model) / len(words | model) for model in old)
        if share >= _ALIKE:
            yield row, 0.3 + 0.6 * share


def changed_names(change: Burst) -> tuple[list[str], list[str], list[str]]:
    """Names removed from the changed lines, added to them, and kept, in their order."""
    old = dict.fromkeys(_find_names(_touched_lines(change.before, change.start, change.old_end)))
    new = dict.fromkeys(_find_names(_touched_lines(change.after, change.start, change.new_end)))
    removed = [name for name in old if name not in new]
    added = [name for name in new if name not in old]
    return removed, added, [name for name in new if name in old]


def _touched_lines(text: str, start: int, end: int) -> list[str]:
    """The whole lines that [start, end] touches."""
    first = text.rfind("\n", 0, start) + 1
    last = text.find("\n", end)
    return text[first : last if last >= 0 else len(text)].split("\n")


def _find_names(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        for name in IDENTIFIER.findall(line):
            if len(name) > 2 and name.lower() not in _COMMON:
                yield name


def _words(line: str) -> frozenset[str]:
    return frozenset(_WORD.findall(line)) - frozenset("()[]{}:,.;=")


def _distance(row: int, changed: tuple[int, int]) -> int:
    """Lines below count as nearer."""
    return row - changed[1] if row >= changed[1] else 2 * (changed[0] - row)

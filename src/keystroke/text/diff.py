"""Minimal edits that turn one text into another, and unified diffs.

Compares lines, then the words of changed lines, then trims common ends. The work is bounded: texts that
differ too much give larger hunks, never wrong ones. A hunk never splits a CRLF, a surrogate pair or a
character with combining marks.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from keystroke.text.compare import Budget, compare
from keystroke.text.edit import Edit

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_WORD = re.compile(r"\r\n|\w+|[ \t]+|.", re.DOTALL)
_WORD_WORK = 300_000  # comparisons allowed over the words of all changed lines
_MAX_REGION = 100_000  # a changed region with more characters than this keeps its line hunks
_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class Hunk:
    """`old[old_start:old_end]` becomes `new[new_start:new_end]`; the text between hunks is equal."""

    old_start: int
    old_end: int
    new_start: int
    new_end: int


def minimal_diff(old: str, new: str, budget: Budget | None = None) -> tuple[Edit, ...]:
    """Edits with `apply_edits(old, edits) == new`, as small as the words of the texts allow. `budget` is
    shared by several texts; once it is spent, hunks consist of whole lines."""
    if old == new:
        return ()
    budget = budget or Budget(_WORD_WORK)
    hunks: list[Hunk] = []
    for block in _line_hunks(old, new):
        hunks += _word_hunks(old, new, block, budget)
    widened = _whole_characters(old, new, hunks)
    return tuple(Edit(h.old_start, h.old_end, new[h.new_start : h.new_end]) for h in widened)


def unified_diff(old: str, new: str, old_name: str = "a", new_name: str = "b", context: int = 3) -> str:
    """The change as `diff -u` and `git` write it; empty if there is none."""
    before, after = _plain_lines(old), _plain_lines(new)
    hunks = [Hunk(*span) for span in compare(before, after)]
    out: list[str] = []
    for group in _group(hunks, context):
        first, last = group[0], group[-1]
        old_start, old_end = max(0, first.old_start - context), min(len(before), last.old_end + context)
        new_start, new_end = max(0, first.new_start - context), min(len(after), last.new_end + context)
        out.append(f"@@ -{_range(old_start, old_end)} +{_range(new_start, new_end)} @@\n")
        reached = old_start
        for hunk in group:
            out += _mark_lines(" ", before[reached : hunk.old_start])
            out += _mark_lines("-", before[hunk.old_start : hunk.old_end])
            out += _mark_lines("+", after[hunk.new_start : hunk.new_end])
            reached = hunk.old_end
        out += _mark_lines(" ", before[reached:old_end])
    return "".join([f"--- {old_name}\n", f"+++ {new_name}\n", *out]) if out else ""


def _plain_lines(text: str) -> list[str]:
    """Lines as `diff` sees them: ended by LF alone."""
    lines = text.split("\n")
    last = lines.pop()
    return [f"{line}\n" for line in lines] + ([last] if last else [])


def _group(hunks: Sequence[Hunk], context: int) -> Iterator[list[Hunk]]:
    group: list[Hunk] = []
    for hunk in hunks:
        if group and hunk.old_start - group[-1].old_end > 2 * context:
            yield group
            group = []
        group.append(hunk)
    if group:
        yield group


def _range(start: int, end: int) -> str:
    length = end - start
    if length == 1:
        return str(start + 1)
    return f"{start + 1 if length else start},{length}"


def _mark_lines(mark: str, lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        yield f"{mark}{line}" if line.endswith("\n") else f"{mark}{line}\n\\ No newline at end of file\n"


def _line_hunks(old: str, new: str) -> list[Hunk]:
    """Hunks of whole lines. The equal head and tail of a large file are skipped without being split."""
    head = _line_start(old, common_prefix(old, new))
    tail = common_suffix(old[head:], new[head:])
    # The tail begins after a line end that both texts share, or at the end of both.
    cut = _LINE.match(old, len(old) - tail) if tail else None
    tail = len(old) - cut.end() if cut else 0
    before = _LINE.findall(old, head, len(old) - tail)
    after = _LINE.findall(new, head, len(new) - tail)
    spans = compare(before, after)
    return _to_hunks(before, after, spans, head, head)


def _word_hunks(old: str, new: str, block: Hunk, budget: Budget) -> list[Hunk]:
    """The hunks of words inside a hunk of lines."""
    old_size, new_size = block.old_end - block.old_start, block.new_end - block.new_start
    if not old_size or not new_size or old_size + new_size > _MAX_REGION or budget.left <= 0:
        return [_trim(old, new, block)]
    budget.left -= (old_size + new_size) // 8  # splitting is work too
    before = _WORD.findall(old, block.old_start, block.old_end)
    after = _WORD.findall(new, block.new_start, block.new_end)
    spans = compare(before, after, budget)
    hunks = _to_hunks(before, after, spans, block.old_start, block.new_start)
    return [_trim(old, new, hunk) for hunk in hunks]


def _to_hunks(
    before: Sequence[str],
    after: Sequence[str],
    spans: Sequence[tuple[int, int, int, int]],
    old_at: int,
    new_at: int,
) -> list[Hunk]:
    """Convert spans of pieces to hunks of characters."""
    hunks: list[Hunk] = []
    i = j = 0
    for a0, a1, b0, b1 in spans:
        old_at += sum(map(len, before[i:a0]))
        new_at += sum(map(len, after[j:b0]))
        old_end = old_at + sum(map(len, before[a0:a1]))
        new_end = new_at + sum(map(len, after[b0:b1]))
        hunks.append(Hunk(old_at, old_end, new_at, new_end))
        i, j, old_at, new_at = a1, b1, old_end, new_end
    return hunks


def _trim(old: str, new: str, hunk: Hunk) -> Hunk:
    """The hunk without the characters that both sides begin and end with."""
    before, after = old[hunk.old_start : hunk.old_end], new[hunk.new_start : hunk.new_end]
    head = common_prefix(before, after)
    tail = common_suffix(before[head:], after[head:])
    return Hunk(hunk.old_start + head, hunk.old_end - tail, hunk.new_start + head, hunk.new_end - tail)


def _whole_characters(old: str, new: str, hunks: Sequence[Hunk]) -> list[Hunk]:
    """Widen the hunks until none splits a character; hunks that then touch are merged."""
    result: list[Hunk] = []
    todo = list(reversed(hunks))
    while todo:
        hunk = todo.pop()
        a0, a1, b0, b1 = hunk.old_start, hunk.old_end, hunk.new_start, hunk.new_end
        floor = result[-1].old_end if result else 0
        ceiling = todo[-1].old_start if todo else len(old)
        # Between hunks both texts are equal, so both boundaries move together, but not past a neighbour.
        while a0 > floor and (_is_one_character(old, a0) or _is_one_character(new, b0)):
            a0, b0 = a0 - 1, b0 - 1
        while a1 < ceiling and (_is_one_character(old, a1) or _is_one_character(new, b1)):
            a1, b1 = a1 + 1, b1 + 1
        if todo and a1 == ceiling:
            after = todo.pop()
            todo.append(Hunk(a0, after.old_end, b0, after.new_end))
        elif result and a0 == floor:
            before = result.pop()
            todo.append(Hunk(before.old_start, a1, before.new_start, b1))
        else:
            result.append(Hunk(a0, a1, b0, b1))
    return result


def _is_one_character(text: str, at: int) -> bool:
    """Whether the characters on both sides of `at` form one character."""
    if not 0 < at < len(text):
        return False
    right = text[at]
    if right < "\u0300":
        return right == "\n" and text[at - 1] == "\r"
    left = text[at - 1]
    return (
        ("\udc00" <= right <= "\udfff" and "\ud800" <= left <= "\udbff")
        or left == "\u200d"
        or right in "\u200d\ufe0e\ufe0f"
        or "\U0001f3fb" <= right <= "\U0001f3ff"  # skin tones
        or ("\U0001f1e6" <= right <= "\U0001f1ff" and "\U0001f1e6" <= left <= "\U0001f1ff")  # flags
        or unicodedata.category(right) in ("Mn", "Me", "Mc")
    )


def _line_start(text: str, at: int) -> int:
    """The nearest line start at or before `at`."""
    return max(text.rfind("\n", 0, at), text.rfind("\r", 0, max(0, at - 1))) + 1


def common_prefix(a: str, b: str) -> int:
    """How many characters both texts begin with."""
    return _longest_equal(min(len(a), len(b)), lambda near, far: a[near:far] == b[near:far])


def common_suffix(a: str, b: str) -> int:
    """How many characters both texts end with."""
    return _longest_equal(min(len(a), len(b)), lambda near, far: _tail(a, near, far) == _tail(b, near, far))


def _longest_equal(limit: int, equal: Callable[[int, int], bool]) -> int:
    """The largest length up to `limit` at which all is `equal`; compares blocks, not characters."""
    low = 0
    while low + _BLOCK <= limit and equal(low, low + _BLOCK):
        low += _BLOCK
    high = min(limit, low + _BLOCK)
    while low < high:
        middle = (low + high + 1) // 2
        if equal(low, middle):
            low = middle
        else:
            high = middle - 1
    return low


def _tail(text: str, near: int, far: int) -> str:
    return text[len(text) - far : len(text) - near]

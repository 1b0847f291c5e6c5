"""Differences of two sequences: the shortest edit script (Myers), within a budget of work.

When the budget ends before the shortest script is found, items that occur once on each side split the
problem, and the rest is reported as one difference: larger than necessary, never wrong.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from math import isqrt

LINE_WORK = 2_000_000  # comparisons allowed over all lines: well under a second


class Budget:
    """The work left for one diff, shared by all its parts."""

    __slots__ = ("left",)

    def __init__(self, work: int) -> None:
        self.left = work


Span = tuple[int, int, int, int]


def compare(before: Sequence[str], after: Sequence[str], budget: Budget | None = None) -> list[Span]:
    """Spans (a0, a1, b0, b1) in which two sequences of lines or words differ, in order."""
    budget = budget or Budget(LINE_WORK)
    numbers: dict[str, int] = {}
    a = [numbers.setdefault(piece, len(numbers)) for piece in before]
    b = [numbers.setdefault(piece, len(numbers)) for piece in after]
    spans: list[Span] = []
    todo: list[Span] = [(0, len(a), 0, len(b))]
    while todo:
        a0, a1, b0, b1 = todo.pop()
        while a0 < a1 and b0 < b1 and a[a0] == b[b0]:
            a0, b0 = a0 + 1, b0 + 1
        while a0 < a1 and b0 < b1 and a[a1 - 1] == b[b1 - 1]:
            a1, b1 = a1 - 1, b1 - 1
        if a0 == a1 and b0 == b1:
            continue
        if a0 == a1 or b0 == b1 or set(a[a0:a1]).isdisjoint(b[b0:b1]):  # nothing in common: no search
            found: list[Span] | None = [(a0, a1, b0, b1)]
        else:
            found = _shortest(a, b, (a0, a1, b0, b1), budget)
        if found is not None:
            spans += found
        elif budget.left > -LINE_WORK and (parts := _split_at_anchors(a, b, (a0, a1, b0, b1))):
            budget.left -= a1 - a0 + b1 - b0
            todo += reversed(parts)
        else:
            spans.append((a0, a1, b0, b1))
    return _merge(spans)


def common_ends(before: Sequence[str], after: Sequence[str]) -> tuple[int, int]:
    """How many items both sequences begin with, and how many of the others they end with."""
    shorter = min(len(before), len(after))
    head = 0
    while head < shorter and before[head] == after[head]:
        head += 1
    tail = 0
    while tail < shorter - head and before[-1 - tail] == after[-1 - tail]:
        tail += 1
    return head, tail


def _merge(spans: Sequence[Span]) -> list[Span]:
    """Merge neighbours that touch on both sides."""
    result: list[Span] = []
    for span in spans:
        if result and result[-1][1] == span[0] and result[-1][3] == span[2]:
            a0, _, b0, _ = result.pop()
            span = (a0, span[1], b0, span[3])
        result.append(span)
    return result


def _shortest(a: Sequence[int], b: Sequence[int], span: Span, budget: Budget) -> list[Span] | None:
    """The shortest edit script by Myers' greedy search; None when its share of the budget ends first."""
    a0, a1, b0, b1 = span
    n, m = a1 - a0, b1 - b0
    if budget.left <= 0:
        return None
    # Half of the budget left, so that one expensive region leaves some for those after it.
    floor = budget.left - budget.left // 2
    most = min(n + m, isqrt(budget.left - floor))
    zero = most + 1
    reach = [-1] * (2 * most + 3)  # furthest x on diagonal k, at zero + k
    reach[zero + 1] = 0
    history: list[list[int]] = []
    for d in range(most + 1):
        history.append(reach[zero - d - 1 : zero + d + 2])
        for k in range(-d + 2 * max(0, d - m), d - 2 * max(0, d - n) + 1, 2):
            at = zero + k
            x = reach[at + 1] if k == -d or (k != d and reach[at - 1] < reach[at + 1]) else reach[at - 1] + 1
            start = x
            y = x - k
            while x < n and y < m and a[a0 + x] == b[b0 + y]:
                x, y = x + 1, y + 1
            reach[at] = x
            budget.left -= x - start
            if x >= n and y >= m:
                return _trace_back(history, n, m, a0, b0)
        budget.left -= 2 * d + 1
        if budget.left < floor:
            break
    return None


def _trace_back(history: Sequence[Sequence[int]], x: int, y: int, a0: int, b0: int) -> list[Span]:
    """The steps of the search, traced back from its end."""
    spans: list[Span] = []
    for d in range(len(history) - 1, 0, -1):
        reach, k = history[d], x - y
        at = d + 1 + k
        if k == -d or (k != d and reach[at - 1] < reach[at + 1]):
            x = reach[at + 1]
            y = x - k - 1
            spans.append((a0 + x, a0 + x, b0 + y, b0 + y + 1))
        else:
            x = reach[at - 1]
            y = x - k + 1
            spans.append((a0 + x, a0 + x + 1, b0 + y, b0 + y))
    return _merge(spans[::-1])


def _split_at_anchors(a: Sequence[int], b: Sequence[int], span: Span) -> list[Span]:
    """Split a span at items that occur once on each side and keep their order; empty if there are none."""
    a0, a1, b0, b1 = span
    in_a, in_b = Counter(a[a0:a1]), Counter(b[b0:b1])
    place = {piece: j for j, piece in enumerate(b[b0:b1], b0) if in_b[piece] == 1}
    pairs = [(i, place[a[i]]) for i in range(a0, a1) if in_a[a[i]] == 1 and a[i] in place]
    parts: list[Span] = []
    for i, j in _increasing(pairs):
        parts.append((a0, i, b0, j))
        a0, b0 = i + 1, j + 1
    if parts:
        parts.append((a0, a1, b0, b1))
    return parts


def _increasing(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest run of pairs whose second members increase (their first members already do)."""
    tails: list[int] = []
    ends: list[int] = []
    previous: list[int] = []
    for index, (_, j) in enumerate(pairs):
        at = bisect_left(tails, j)
        previous.append(ends[at - 1] if at else -1)
        if at == len(tails):
            tails.append(j)
            ends.append(index)
        else:
            tails[at], ends[at] = j, index
    result: list[tuple[int, int]] = []
    index = ends[-1] if ends else -1
    while index >= 0:
        result.append(pairs[index])
        index = previous[index]
    return result[::-1]

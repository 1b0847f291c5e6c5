"""How sure is sure enough, learned from what became of earlier suggestions.

Pure. Counts of how many suggestions of each confidence were right go in, a shift of the thresholds comes
out. Without counts the shift is zero; few counts move it little, no counts move it far. It asks one question:
from which confidence on is a suggestion right as often as one is at the default threshold elsewhere?
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

# How many suggestions of a confidence are right, on late Python files with the shipped model: the measured
# shares behind the thresholds of `gate`, as a curve.
USUAL = ((0.0, 0.0), (0.6, 0.09), (0.8, 0.2), (0.92, 0.5), (1.0, 0.9))
EDGES = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)  # bins end here
BINS = len(EDGES) + 1
STRENGTH = 25.0  # so many suggestions of one bin weigh as much as what was known before
REACH = 0.15  # how far a threshold may move
HIGHEST = 0.97  # above it next to nothing would ever be shown
_STEPS = 200  # thresholds are multiples of 1/200


@dataclass(frozen=True, slots=True)
class Count:
    """Of `of` suggestions `right` were; a half for one that was taken and then half rewritten."""

    of: float = 0.0
    right: float = 0.0


Counts = Sequence[Count]  # one for each bin
NOTHING: Counts = (Count(),) * BINS


def bin_of(confidence: float) -> int:
    return bisect_right(EDGES, confidence)


def counted(outcomes: Iterable[tuple[float, float]]) -> list[Count]:
    """Counts of (confidence, how right it was)."""
    of, right = [0.0] * BINS, [0.0] * BINS
    for confidence, worth in outcomes:
        at = bin_of(confidence)
        of[at] += 1
        right[at] += min(max(worth, 0.0), 1.0)
    return [Count(n, r) for n, r in zip(of, right, strict=True)]


def tuned(default: float, *levels: Counts) -> float:
    """The threshold to use in place of `default`, from the widest counts (a language's) to the narrowest (a
    project's): each level starts from what the one before it made of the usual."""
    usual = [_on(USUAL, centre) for centre in _CENTRES]
    found = usual
    for level in levels:
        found = _believed(found, level)
    moved = [(c, f - u) for c, f, u in zip(_CENTRES, found, usual, strict=True)]
    wanted = _on(USUAL, default) - 1e-9

    def enough(step: int) -> bool:
        return _on(USUAL, step / _STEPS) + _on(moved, step / _STEPS) >= wanted

    # From the default outwards, so that noise pulls neither way.
    at = round(default * _STEPS)
    lowest, highest = at - round(REACH * _STEPS), round(min(default + REACH, HIGHEST) * _STEPS)
    while at < highest and not enough(at):
        at += 1
    if at == round(default * _STEPS):
        while at > lowest and enough(at - 1):
            at -= 1
    return at / _STEPS


def shift_between(default: float, threshold: float) -> float:
    """The shift that moves `default` to `threshold`: above 0 is stricter, 1 shows nothing."""
    if threshold >= default:
        return (threshold - default) / (1.0 - default)
    return threshold / default - 1.0


def moved(threshold: float, shift: float) -> float:
    """Another threshold made stricter, or looser, by as much."""
    return threshold + shift * (1.0 - threshold) if shift > 0 else threshold * (1.0 + shift)


def _believed(before: Sequence[float], counts: Counts) -> list[float]:
    """Shares right after the counts; surer is never less right, whatever a few counts say."""
    blocks: list[tuple[float, float, int]] = []  # share, weight, bins: pooled where they fall
    for share, count in zip(before, counts, strict=True):
        weight = STRENGTH + count.of
        block = ((STRENGTH * share + count.right) / weight, weight, 1)
        while blocks and blocks[-1][0] > block[0]:
            last = blocks.pop()
            both = last[1] + block[1]
            block = ((last[0] * last[1] + block[0] * block[1]) / both, both, last[2] + block[2])
        blocks.append(block)
    return [share for share, _, bins in blocks for _ in range(bins)]


def _on(curve: Sequence[tuple[float, float]], at: float) -> float:
    """A curve of straight pieces; flat beyond its ends."""
    if at <= curve[0][0]:
        return curve[0][1]
    for (x0, y0), (x1, y1) in pairwise(curve):
        if at <= x1:
            return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    return curve[-1][1]


_CENTRES = tuple((a + b) / 2 for a, b in zip((0.0, *EDGES), (*EDGES, 1.0), strict=True))

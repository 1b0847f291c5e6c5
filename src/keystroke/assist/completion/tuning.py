"""Learns the confidence threshold from what became of earlier suggestions.

Counts of right suggestions per confidence become a shift of the thresholds: the confidence from which a
suggestion is right as often as it usually is at the default threshold. Without counts the shift is zero; few
counts move it little.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

# The share of suggestions that are right, by confidence: measured with the shipped model on recent Python
# files.
USUAL = ((0.0, 0.0), (0.6, 0.09), (0.8, 0.2), (0.92, 0.5), (1.0, 0.9))
EDGES = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)  # bins end here
BINS = len(EDGES) + 1
STRENGTH = 25.0  # suggestions of one bin that weigh as much as the prior
REACH = 0.15  # how far a threshold may move
HIGHEST = 0.97  # above it almost nothing would be shown
_STEPS = 200  # thresholds are multiples of 1/200


@dataclass(frozen=True, slots=True)
class BinCount:
    """`right` of `of` suggestions were right; one that was accepted and half rewritten counts as a half."""

    of: float = 0.0
    right: float = 0.0


Counts = Sequence[BinCount]  # one for each bin
NO_COUNTS: Counts = (BinCount(),) * BINS


def bin_index(confidence: float) -> int:
    return bisect_right(EDGES, confidence)


def count_outcomes(outcomes: Iterable[tuple[float, float]]) -> list[BinCount]:
    """Counts of (confidence, how right it was)."""
    of, right = [0.0] * BINS, [0.0] * BINS
    for confidence, worth in outcomes:
        at = bin_index(confidence)
        of[at] += 1
        right[at] += min(max(worth, 0.0), 1.0)
    return [BinCount(n, r) for n, r in zip(of, right, strict=True)]


def tune_threshold(default: float, *levels: Counts) -> float:
    """The threshold to use instead of `default`. `levels` go from the widest counts (a language's) to the
    narrowest (a project's); each one is the prior of the next."""
    usual = [_interpolate(USUAL, centre) for centre in _CENTRES]
    found = usual
    for level in levels:
        found = _update_shares(found, level)
    moved = [(c, f - u) for c, f, u in zip(_CENTRES, found, usual, strict=True)]
    wanted = _interpolate(USUAL, default) - 1e-9

    def enough(step: int) -> bool:
        return _interpolate(USUAL, step / _STEPS) + _interpolate(moved, step / _STEPS) >= wanted

    # Search outwards from the default.
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


def shift_threshold(threshold: float, shift: float) -> float:
    """`threshold` made stricter or looser by `shift`."""
    return threshold + shift * (1.0 - threshold) if shift > 0 else threshold * (1.0 + shift)


def _update_shares(before: Sequence[float], counts: Counts) -> list[float]:
    """The share right per bin after the counts, made monotonic: more confident is never less right."""
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


def _interpolate(curve: Sequence[tuple[float, float]], at: float) -> float:
    """A piecewise linear curve, constant beyond its ends."""
    if at <= curve[0][0]:
        return curve[0][1]
    for (x0, y0), (x1, y1) in pairwise(curve):
        if at <= x1:
            return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    return curve[-1][1]


_CENTRES = tuple((a + b) / 2 for a, b in zip((0.0, *EDGES), (*EDGES, 1.0), strict=True))

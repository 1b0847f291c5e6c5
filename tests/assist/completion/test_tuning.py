"""The display threshold learned from outcomes: still without data, careful with few, bounded with many."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from keystroke.assist.completion.gate import THRESHOLDS
from keystroke.assist.completion.tuning import (
    BINS,
    HIGHEST,
    NO_COUNTS,
    REACH,
    STRENGTH,
    USUAL,
    BinCount,
    bin_index,
    count_outcomes,
    shift_between,
    shift_threshold,
    tune_threshold,
)

DEFAULTS = sorted(THRESHOLDS.values())


def usual(confidence: float) -> float:
    """How often a suggestion of this confidence is right where nothing is special."""
    for (x0, y0), (x1, y1) in pairwise(USUAL):
        if confidence <= x1:
            return y0 + (y1 - y0) * (confidence - x0) / (x1 - x0)
    return USUAL[-1][1]


def trace(right: Callable[[float], float], length: int, seed: int) -> list[tuple[float, bool, int]]:
    """Suggestions of a made-up day: how sure, whether right, how long."""
    rng = random.Random(seed)
    made = []
    for _ in range(length):
        sure = 1.0 - rng.random() ** 1.2 * 0.6
        made.append((sure, rng.random() < right(sure), rng.randint(4, 40)))
    return made


def replay(days: list[tuple[float, bool, int]], default: float, *, learning: bool) -> tuple[int, int]:
    """Show what is sure enough, one after another; what was shown and the characters taken. While learning,
    those before it (shown, or held back and then typed by hand) tune the threshold."""
    shown = taken = 0
    known: list[tuple[float, float]] = []
    for number, (sure, right, length) in enumerate(days):
        if number % 20 == 0:
            threshold = tune_threshold(default, count_outcomes(known)) if learning else default
        if sure >= threshold:
            shown += 1
            taken += length * right
        known.append((sure, float(right)))
    return shown, taken


@pytest.mark.parametrize("default", DEFAULTS)
def test_without_data_the_threshold_is_the_default(default: float) -> None:
    assert tune_threshold(default) == default
    assert tune_threshold(default, NO_COUNTS) == default
    assert tune_threshold(default, NO_COUNTS, NO_COUNTS) == default
    assert shift_between(default, default) == 0.0


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("right", [0.0, 1.0])
def test_whatever_is_counted_the_threshold_stays_within_reach(default: float, right: float) -> None:
    rng = random.Random(7)
    flood = [BinCount(1e6, 1e6 * right)] * BINS
    noise = [BinCount(n := rng.randint(0, 500), rng.randint(0, n)) for _ in range(BINS)]
    for levels in ((flood,), (flood, flood), (noise,), (noise, flood), (flood, noise)):
        assert (
            default - REACH - 1e-9 <= tune_threshold(default, *levels) <= min(default + REACH, HIGHEST) + 1e-9
        )


@pytest.mark.parametrize("default", DEFAULTS)
def test_more_of_the_same_evidence_never_moves_it_back(default: float) -> None:
    before = default
    for times in (1, 4, 16, 64, 256):
        bad = tune_threshold(default, [BinCount(times, 0.02 * times)] * BINS)
        assert bad >= before - 1e-9
        before = bad
    assert before > default


def test_a_handful_of_rejections_moves_it_a_little() -> None:
    few = count_outcomes([(0.85, 0.0)] * 5)
    assert STRENGTH >= 4 * 5
    assert (
        THRESHOLDS["balanced"] <= tune_threshold(THRESHOLDS["balanced"], few) <= THRESHOLDS["balanced"] + 0.03
    )


def test_a_project_starts_from_what_its_language_came_to() -> None:
    bad = count_outcomes([(c / 100, 0.0) for c in range(60, 100)] * 10)
    assert tune_threshold(0.8, bad, NO_COUNTS) == tune_threshold(0.8, bad)
    good = count_outcomes([(c / 100, 1.0) for c in range(60, 100)] * 10)
    assert tune_threshold(0.8, bad, good) < tune_threshold(0.8, bad)


def test_in_a_bad_language_accepted_characters_per_shown_suggestion_rise() -> None:
    """A language in which the model is as sure as ever and right a third as often."""
    before, after, gains = [], [], []
    for seed in range(24):
        days = trace(lambda sure: usual(sure) / 3, 1500, seed)
        shown, taken = replay(days, 0.8, learning=False)
        fewer, kept = replay(days, 0.8, learning=True)
        assert fewer < 0.8 * shown
        before.append(taken / shown)
        after.append(kept / fewer)
        gains.append(after[-1] / before[-1])
    assert sum(after) > 1.15 * sum(before), gains
    assert min(gains) > 0.95, gains  # a day's luck


def test_in_a_good_language_more_is_taken() -> None:
    """A language in which the model knows more than it trusts itself to."""
    for seed in range(12):
        days = trace(lambda sure: min(1.0, 3 * usual(sure)), 1500, seed)
        assert replay(days, 0.8, learning=True)[1] > 1.1 * replay(days, 0.8, learning=False)[1]


def test_in_a_usual_language_next_to_nothing_changes() -> None:
    for seed in range(12):
        days = trace(usual, 1500, seed)
        shown, taken = replay(days, 0.8, learning=False)
        now, kept = replay(days, 0.8, learning=True)
        assert abs(now - shown) < 0.3 * shown
        assert kept > 0.85 * taken


def test_shifts_and_bins_are_consistent() -> None:
    for default in DEFAULTS:
        for threshold in (default - REACH, default, default + REACH / 2):
            assert shift_threshold(default, shift_between(default, threshold)) == pytest.approx(threshold)
    assert [bin_index(0.0), bin_index(0.5), bin_index(0.8), bin_index(1.0)] == [0, 1, 5, BINS - 1]
    assert sum(c.of for c in count_outcomes([(0.3, 2.0), (0.99, -1.0)])) == 2
    assert count_outcomes([(0.3, 2.0), (0.99, -1.0)])[0].right == 1.0

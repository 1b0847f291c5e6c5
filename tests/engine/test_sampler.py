"""Choices are pure, follow the distribution they claim, and do not depend on drafts."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keystroke.engine.base import GREEDY, Sampling
from keystroke.engine.noise import noise_bits, uniform
from keystroke.engine.sampler import (
    Logits,
    choose,
    choose_allowed,
    logprob,
    probabilities,
    verify,
)
from keystroke.errors import EngineError, UsageError

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.05, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 5, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.5]),
    seed=st.integers(-(2**63), 2**64 - 1),
    logit_bias=st.dictionaries(st.integers(0, 39), st.floats(-100, 100), max_size=3),
)


def random_logits(seed: int, rows: int = 1, vocab: int = 40, spread: float = 3.0) -> Logits:
    return (np.random.default_rng(seed).normal(size=(rows, vocab)) * spread).astype(np.float32)


def plain_distribution(logits: Logits, sampling: Sampling) -> npt.NDArray[np.float64]:
    """The documented filters, written as plainly as possible."""
    scores = logits.astype(np.float64).copy()
    for token, bias in sampling.logit_bias.items():
        scores[token] = np.float32(np.float32(scores[token]) + np.float32(bias))
    scores = (scores - scores.max()) / sampling.temperature
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    kept = order[: sampling.top_k] if sampling.top_k else order
    weights = np.exp(scores)
    total, running, nucleus = weights[kept].sum(), 0.0, []
    for token in kept:
        nucleus.append(token)
        running += weights[token]
        if running >= sampling.top_p * total:
            break
    kept = [t for t in (nucleus if sampling.top_p < 1 else kept) if weights[t] >= sampling.min_p]
    result = np.zeros(len(scores))
    result[kept] = weights[kept] / weights[kept].sum()
    return result


def test_greedy_takes_the_lowest_id_among_equal_logits() -> None:
    assert choose(np.array([1, 5, 5, 2], dtype=np.float32)) == 1


@settings(max_examples=300)
@given(st.integers(0, 10**6), samplings.filter(lambda s: s.temperature > 0))
def test_filters_leave_exactly_the_documented_distribution(seed: int, sampling: Sampling) -> None:
    logits = random_logits(seed)[0]
    expected = plain_distribution(logits, sampling)
    # Single precision may decide otherwise only where a token sits right on a filter's edge.
    np.testing.assert_allclose(probabilities(logits, sampling), expected, atol=1e-5)


@settings(max_examples=300)
@given(st.integers(0, 10**6), samplings.filter(lambda s: s.temperature > 0), st.integers(0, 2**31))
def test_a_choice_is_the_argmax_of_log_p_plus_gumbel_noise(
    seed: int, sampling: Sampling, position: int
) -> None:
    logits = random_logits(seed)[0]
    with np.errstate(divide="ignore"):
        noise = uniform(noise_bits(sampling.seed, position, np.arange(len(logits))))
        scores = np.log(probabilities(logits, sampling)) - np.log(-np.log1p(-noise))
    assert choose(logits, sampling, position) == int(scores.argmax())


def test_survivors_many_or_few_see_the_same_noise() -> None:
    logits = random_logits(5, vocab=4000)[0]
    for position in range(50):
        token = choose(logits, Sampling(temperature=1.0, seed=1), position)
        forced = Sampling(temperature=1.0, seed=1, top_k=3999)
        lowest = int(logits.argmin())
        assert token == lowest or choose(logits, forced, position) == token


def chi_square_limit(freedom: int) -> float:
    """The value a chi-square statistic exceeds once in ten thousand times (Wilson and Hilferty's formula)."""
    spread = 2.0 / (9.0 * freedom)
    return float(freedom * (1.0 - spread + 3.719 * math.sqrt(spread)) ** 3)


def chi_square(observed: npt.NDArray[np.float64], expected: npt.NDArray[np.float64]) -> float:
    return float(((observed - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, seed=11),
        Sampling(temperature=0.7, seed=12, top_k=6),
        Sampling(temperature=1.3, seed=13, top_p=0.9),
        Sampling(temperature=1.0, seed=14, min_p=0.1),
    ],
)
def test_choices_over_positions_follow_the_distribution(sampling: Sampling) -> None:
    logits = random_logits(1, vocab=12, spread=1.0)[0]
    p = probabilities(logits, sampling)
    draws = 6_000
    counts = np.bincount([choose(logits, sampling, i) for i in range(draws)], minlength=12).astype(float)
    assert counts[p == 0].sum() == 0
    live = p > 0
    assert chi_square(counts[live], draws * p[live]) < chi_square_limit(int(live.sum()) - 1)


def test_choices_over_seeds_follow_the_distribution() -> None:
    logits = random_logits(2, vocab=8, spread=1.0)[0]
    p = probabilities(logits, Sampling(temperature=1.0))
    draws = 4_000
    chosen = [choose(logits, Sampling(temperature=1.0, seed=s), 5) for s in range(draws)]
    assert chi_square(np.bincount(chosen, minlength=8).astype(float), draws * p) < chi_square_limit(7)


def test_choices_at_neighbouring_positions_are_independent() -> None:
    logits = random_logits(3, vocab=5, spread=0.5)[0]
    sampling = Sampling(temperature=1.0, seed=99)
    p = probabilities(logits, sampling)
    draws = 6_000
    chosen = np.array([choose(logits, sampling, i) for i in range(draws + 1)])
    pairs = np.bincount(chosen[:-1] * 5 + chosen[1:], minlength=25).astype(float)
    assert chi_square(pairs, draws * np.outer(p, p).reshape(-1)) < chi_square_limit(24)


def test_a_fixed_draft_is_accepted_as_often_as_its_token_is_probable() -> None:
    logits = random_logits(4, vocab=6, spread=1.0)[0]
    sampling = Sampling(temperature=1.0, seed=5)
    rows = np.stack([logits, logits])
    p = probabilities(logits, sampling)[2]
    draws = 4_000
    accepted = sum(verify(rows, [2], sampling, i).accepted for i in range(draws))
    assert abs(accepted / draws - p) < 4.5 * math.sqrt(p * (1 - p) / draws)


def test_a_draft_drawn_with_the_same_noise_is_accepted_as_often_as_theory_says() -> None:
    large, small = random_logits(6, rows=2, vocab=9, spread=1.0)
    sampling = Sampling(temperature=1.0, seed=21)
    p, q = probabilities(large, sampling), probabilities(small, sampling)
    # Two argmaxes under shared Gumbel noise agree on i with probability 1 / sum_j max(p_j/p_i, q_j/q_i).
    theory = sum(1.0 / np.maximum(p / p[i], q / q[i]).sum() for i in range(9))
    draws = 4_000
    rows = np.stack([large, large])
    accepted = sum(verify(rows, [choose(small, sampling, i)], sampling, i).accepted for i in range(draws))
    assert abs(accepted / draws - theory) < 4.5 * math.sqrt(theory * (1 - theory) / draws)


@settings(max_examples=200)
@given(st.integers(0, 10**6), samplings, st.integers(0, 5000), st.data())
def test_verifying_a_draft_gives_the_tokens_that_single_choices_give(
    seed: int, sampling: Sampling, first: int, data: st.DataObject
) -> None:
    rows = random_logits(seed, rows=6)
    alone = [choose(rows[i], sampling, first + i) for i in range(6)]
    right = data.draw(st.integers(0, 5))
    draft = alone[:right] + data.draw(st.lists(st.integers(0, 39), min_size=5 - right, max_size=5 - right))
    step = verify(rows, draft, sampling, first)
    agree = next((i for i in range(5) if draft[i] != alone[i]), 5)
    assert step.tokens == tuple(alone[: agree + 1])
    assert step.accepted == agree


def test_rows_after_those_read_are_never_evaluated() -> None:
    rows = np.stack([random_logits(1)[0], np.full(40, np.nan, dtype=np.float32)])
    best = int(rows[0].argmax())
    assert verify(rows, [best + 1], GREEDY, 0).tokens == (best,)
    with pytest.raises(EngineError, match="not finite"):
        verify(rows, [best], GREEDY, 0)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_are_an_error_and_not_a_token(poison: float) -> None:
    logits = np.full(8, poison, dtype=np.float32)
    for sampling in (GREEDY, Sampling(temperature=1.0)):
        with pytest.raises(EngineError, match="not finite"):
            choose(logits, sampling)


def test_a_banned_token_is_never_chosen() -> None:
    logits = random_logits(1, vocab=4, spread=0.1)[0]
    sampling = Sampling(temperature=1.0, seed=1, logit_bias={2: -100.0})
    assert 2 not in {choose(logits, sampling, i) for i in range(2000)}
    assert choose(logits, Sampling(logit_bias={3: 100.0})) == 3


def test_a_bias_outside_the_vocabulary_says_so() -> None:
    with pytest.raises(UsageError, match="vocabulary ends at 39"):
        choose(random_logits(1)[0], Sampling(logit_bias={40: 1.0}))


def test_a_bias_that_is_no_number_says_so_and_minus_infinity_forbids() -> None:
    logits = random_logits(1)[0]
    for bias in (math.nan, math.inf):
        with pytest.raises(UsageError, match="must be a number"):
            choose(logits, Sampling(logit_bias={0: bias}))
    best = choose(logits)
    assert choose(logits, Sampling(logit_bias={best: -math.inf})) != best
    warm = Sampling(temperature=1.0, seed=3, logit_bias={best: -math.inf})
    assert best not in {choose(logits, warm, i) for i in range(200)}


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-9, 1e-4])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    for seed in range(20):
        logits = random_logits(seed)[0]
        assert choose(logits, Sampling(temperature=temperature, seed=seed), seed) == choose(logits)


def test_choosing_leaves_the_logits_alone() -> None:
    logits = random_logits(1)[0]
    before = logits.copy()
    choose(logits, Sampling(temperature=0.5, logit_bias={1: 5.0}, top_p=0.5))
    assert (logits == before).all()


def test_logprobs_are_those_of_the_model_before_any_filter() -> None:
    logits = random_logits(8)[0]
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    step = verify(logits[None], [], Sampling(temperature=0.3, top_k=2, logprobs=3, seed=4), 0)
    (entry,) = step.logprobs
    assert entry.token == step.tokens[0]
    assert entry.logprob == pytest.approx(exact[entry.token])
    assert [token for token, _ in entry.top] == np.argsort(-exact)[:3].tolist()
    assert [value for _, value in entry.top] == pytest.approx(np.sort(exact)[::-1][:3])
    assert logprob(logits, 0).top == ()


def test_a_draft_needs_one_row_more_than_it_has_tokens() -> None:
    with pytest.raises(UsageError, match="needs 3 rows"):
        verify(random_logits(1, rows=2), [1, 2], GREEDY, 0)


def _mask(allowed: frozenset[int], words: int = 2) -> npt.NDArray[np.uint32]:
    mask = np.zeros(words, dtype=np.uint32)
    for token in allowed:
        mask[token >> 5] |= np.uint32(1 << (token & 31))
    return mask


@settings(max_examples=300)
@given(
    st.integers(0, 10**6),
    samplings,
    st.integers(0, 2**31),
    st.frozensets(st.integers(0, 39), min_size=1),
)
def test_a_masked_choice_is_that_of_a_vocabulary_without_the_rest(
    seed: int, sampling: Sampling, position: int, allowed: frozenset[int]
) -> None:
    logits = random_logits(seed)[0]
    lacking = np.full_like(logits, -np.inf)
    lacking[list(allowed)] = logits[list(allowed)]
    token = choose(logits, sampling, position, _mask(allowed))
    assert token in allowed
    assert token == choose(lacking, sampling, position)


def test_tokens_past_the_end_of_a_mask_are_not_allowed() -> None:
    logits = np.zeros(70, dtype=np.float32)
    logits[69] = 9.0
    assert choose(logits, GREEDY, 0, _mask(frozenset({5, 6}), words=1)) == 5


def test_each_row_of_a_draft_is_verified_under_its_own_mask() -> None:
    logits = random_logits(1, rows=3)

    class Rows:
        asked: ClassVar[list[int]] = []

        def row(self, index: int) -> npt.NDArray[np.uint32]:
            self.asked.append(index)
            return _mask(frozenset({index, index + 7}))

        def permits(self, index: int, token: int) -> bool:
            return False  # not known: the row decides

    rows = Rows()
    best = [max((i, i + 7), key=lambda t, i=i: logits[i][t]) for i in range(3)]  # type: ignore[misc]
    assert verify(logits, best[:2], GREEDY, 0, rows).tokens == tuple(best)
    assert rows.asked == [0, 1, 2]
    wrong = [best[0], 39]
    assert verify(logits, wrong, GREEDY, 0, rows).tokens == tuple(best[:2])
    assert rows.asked[3:] == [0, 1]


@settings(max_examples=300)
@given(
    st.integers(0, 10**6),
    samplings,
    st.integers(0, 2**31),
    st.frozensets(st.integers(0, 39), min_size=1),
)
def test_a_mask_that_is_not_asked_for_would_have_changed_nothing(
    seed: int, sampling: Sampling, position: int, allowed: frozenset[int]
) -> None:
    logits = random_logits(seed)[0]

    class Known:
        asked = 0

        def row(self, index: int) -> npt.NDArray[np.uint32]:
            self.asked += 1
            return _mask(allowed)

        def permits(self, index: int, token: int) -> bool:
            return token in allowed

    known = Known()
    token = choose_allowed(logits, sampling, position, known, 0)
    assert token == choose(logits, sampling, position, _mask(allowed))
    if sampling.temperature == 0.0 and not sampling.logit_bias:
        assert known.asked == (int(logits.argmax()) not in allowed)

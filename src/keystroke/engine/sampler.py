"""Chooses tokens from logits and verifies drafts against those choices.

A choice is a pure function of (logits, sampling, position), where position is the index of the chosen token
in its sequence. With a temperature it is argmax(log p + Gumbel(seed, position, token)), an exact sample from
p; a draft token is accepted if it equals the choice, so that drafting never changes the text.

A mask (engine/grammar) is applied before all filters, as if the vocabulary lacked the other tokens.
Filters in order: logit bias, mixture, temperature, top-k, top-p (over what top-k left), min-p (against the
best). Equal logits keep the lowest id, in the greedy choice and at the edge of top-k and top-p alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from keystroke.engine.base import GREEDY, AllowedTokens, Mask, Mixture, Sampling, Step, TokenLogprob
from keystroke.engine.noise import LARGEST_GUMBEL, all_noise_bits, noise_bits, uniform
from keystroke.errors import EngineError, UsageError

Logits = npt.NDArray[np.float32]
Ids = npt.NDArray[np.intp]
SumExponentials = Callable[[Logits, np.float32], float]
RankedRow = tuple[int, float]  # the best token, and the sum of e to the power of each logit less that one's

# A token this far (in natural log) behind the best is never chosen: the range of the noise is bounded.
_HOPELESS = LARGEST_GUMBEL + 4.0
_NEAR, _ZERO = np.float32(8.0), np.float32(0.0)
_COLD = 0.5  # below this temperature most tokens are hopeless, and filtering them pays
_BOUND_SLACK = 1.001  # more than the float32 rounding error of the bound below


def sum_exponentials(logits: Logits, top: np.float32) -> float:
    """The sum of e to the power of each logit less `top`, the largest. An engine may have a faster form that
    rounds in another way: they agree to six digits."""
    return float(np.exp(logits - top).sum(dtype=np.float64))


def choose(
    logits: Logits,
    sampling: Sampling = GREEDY,
    position: int = 0,
    mask: Mask | None = None,
    row: int = 0,
    total: SumExponentials = sum_exponentials,
) -> int:
    """The token that `sampling` chooses from one row of logits at `position`, among those in `mask` if there
    is one. `row`: its row within the step. `total` is only used at temperature 0, so that what is drawn for a
    seed does not depend on the engine."""
    logits = _alter_logits(logits, sampling, row, total)
    best = int(logits.argmax())
    if mask is not None and not (sampling.temperature == 0.0 and _is_allowed(mask, best)):
        logits = _apply_mask(logits, mask)
        best = int(logits.argmax())
    return _choose_unmasked(logits, best, sampling, position)


def choose_allowed(
    logits: Logits,
    sampling: Sampling,
    position: int,
    allowed: AllowedTokens,
    row: int,
    total: SumExponentials = sum_exponentials,
) -> int:
    """The result of `choose` with the mask `allowed.row(row)`, which is only computed if it matters."""
    if sampling.logit_bias or sampling.mixtures:
        logits = _alter_logits(logits, sampling, row, total)
        sampling = replace(sampling, logit_bias={}, mixtures=())
    if sampling.scores_tokens_independently:
        best = int(logits.argmax())
        if allowed.permits(row, best):  # scores are relative to the best, so the mask keeps them
            token = _choose_unmasked(logits, best, sampling, position)
            if token == best or allowed.permits(row, token):
                return token
    return choose(logits, sampling, position, allowed.row(row))


def _choose_unmasked(logits: Logits, best: int, sampling: Sampling, position: int) -> int:
    top: float = logits.item(best)
    if not math.isfinite(top):
        raise EngineError("the model produced logits that are not finite; its weights may be damaged")
    if sampling.temperature == 0.0 or sampling.top_k == 1:
        return best
    relative = _scale_logits(logits, np.float32(top), sampling)
    filtered = sampling.top_k or sampling.top_p < 1.0 or sampling.min_p > 0.0 or sampling.temperature < _COLD
    return _draw(relative, _survivors(relative, sampling) if filtered else None, sampling.seed, position)


def verify(
    logits: Sequence[Logits] | Logits,
    draft: Sequence[int],
    sampling: Sampling,
    first_position: int,
    allowed: AllowedTokens | None = None,
    ranked: Sequence[RankedRow] = (),
) -> Step:
    """Accept `draft` up to its first token that is not the choice at its position, then add that choice.

    Row i of `logits` ([len(draft) + 1, vocab]) are the logits after draft[:i], and row i of `allowed` the
    allowed tokens there; `first_position` is the index of draft[0] in the sequence. `ranked`: of every row,
    if they are known."""
    if len(logits) != len(draft) + 1:
        raise UsageError(
            f"a draft of {len(draft)} tokens needs {len(draft) + 1} rows of logits, not {len(logits)}"
        )
    tokens: list[int] = []
    rows = list(logits)
    total = _KnownSums(rows, ranked)
    plain = allowed is None and sampling.temperature == 0.0 and not sampling.logit_bias
    for row in range(len(draft) + 1):
        if plain:
            tokens.append(_choose_greedily(rows[row], sampling.mixture(row), total))
        elif allowed is None:
            tokens.append(choose(rows[row], sampling, first_position + row, row=row, total=total))
        else:
            tokens.append(choose_allowed(rows[row], sampling, first_position + row, allowed, row, total))
        if row < len(draft) and tokens[row] != draft[row]:
            break
    logprobs: tuple[TokenLogprob, ...] = ()
    if sampling.logprobs is not None:
        logprobs = tuple(logprob(rows[i], token, sampling.logprobs, total) for i, token in enumerate(tokens))
    return Step(tuple(tokens), len(tokens) - 1, logprobs)


class _KnownSums:
    """Computes the best token and the sum of each array once: a mixture and a log probability both need
    them."""

    def __init__(self, rows: Sequence[Logits], ranked: Sequence[RankedRow]) -> None:
        self._known = [(row, total) for row, (_, total) in zip(rows, ranked, strict=False)]
        self._best = [(row, best) for row, (best, _) in zip(rows, ranked, strict=False)]

    def best(self, logits: Logits) -> int:
        for row, known in self._best:
            if row is logits:
                return known
        found = int(logits.argmax())
        self._best.append((logits, found))
        return found

    def __call__(self, logits: Logits, top: np.float32) -> float:
        for row, known in self._known:
            if row is logits:
                return known
        found = sum_exponentials(logits, top)
        self._known.append((logits, found))
        return found


def _choose_greedily(logits: Logits, mixture: Mixture | None, sums: _KnownSums) -> int:
    """The result of `choose` at temperature 0 without bias and mask, from the few logits that a mixture
    changes instead of a copy of all."""
    only = mixture.only if mixture is not None else None
    few = logits if only is None else logits[only]
    best = sums.best(logits) if only is None else int(only[few.argmax()])
    top = logits.item(best)
    if mixture is None or not math.isfinite(top) or (only is not None and not mixture.weight):
        return _choose_unmasked(logits, best, GREEDY, 0)
    if only is not None and mixture.end:  # no end token is among them
        return choose(logits, Sampling(mixtures=(mixture,)))
    mixed = _mixed_logits(
        logits, mixture, top, sums if only is None else lambda _, most: sum_exponentials(few, most)
    )
    first = min(mixed, key=lambda token: (-mixed[token], token), default=best)
    return first if best in mixed or (-mixed.get(first, -math.inf), first) < (-top, best) else best


def logprob(
    logits: Logits, token: int, top: int = 0, total: SumExponentials = sum_exponentials
) -> TokenLogprob:
    """The model's log probability of `token` and of the `top` best, without bias, mixture, temperature and
    filters."""
    largest = logits[total.best(logits)] if isinstance(total, _KnownSums) else logits.max()
    offset = float(largest) + math.log(total(logits, largest))
    if not top:
        return TokenLogprob(token, logits.item(token) - offset)
    best = ((int(i), logits.item(i) - offset) for i in _best(logits, top, largest))
    ranked = sorted(best, key=lambda pair: (-pair[1], pair[0]))
    return TokenLogprob(token, logits.item(token) - offset, tuple(ranked))


def probabilities(logits: Logits, sampling: Sampling) -> npt.NDArray[np.float64]:
    """The distribution that `choose` draws from, over the whole vocabulary."""
    logits = _alter_logits(logits, sampling, 0, sum_exponentials)
    result = np.zeros(len(logits))
    if sampling.temperature == 0.0:
        result[int(logits.argmax())] = 1.0
        return result
    relative = _scale_logits(logits, logits.max(), sampling)
    ids = _survivors(relative, sampling)
    weights = np.exp(relative[ids].astype(np.float64))
    result[ids] = weights / weights.sum()
    return result


def _alter_logits(logits: Logits, sampling: Sampling, row: int, total: SumExponentials) -> Logits:
    """The logits with bias and mixture applied."""
    if sampling.logit_bias:
        logits = _apply_bias(logits, sampling)
    mixture = sampling.mixture(row)
    if mixture is None:
        return logits
    if mixture.only is not None:
        few = logits[mixture.only]
        logits = np.full(len(logits), -np.inf, dtype=np.float32)
        logits[mixture.only] = few
        if not mixture.weight:
            return logits
        return _mix_logits(logits, mixture, lambda _, top: sum_exponentials(few, top))
    return _mix_logits(logits, mixture, total if sampling.temperature == 0.0 else sum_exponentials)


def _mix_logits(logits: Logits, mixture: Mixture, sum_of: SumExponentials) -> Logits:
    """The logits of (1 - weight) p + weight q, with p from `logits`. Only tokens of q change."""
    top = float(logits.max())
    if not math.isfinite(top):
        return logits  # `_choose_unmasked` raises the error
    mixed = logits.astype(np.float32, copy=True)
    for token, value in _mixed_logits(logits, mixture, top, sum_of).items():
        mixed[token] = value
    return mixed


def _mixed_logits(logits: Logits, mixture: Mixture, top: float, sum_of: SumExponentials) -> dict[int, float]:
    """The mixed logits of the tokens that the mixture changes, rounded to float32. `top`: the largest."""
    chances = dict(mixture.chances)
    if mixture.end and mixture.ends:
        likeliest = max(mixture.ends, key=lambda token: logits[token])
        chances[likeliest] = chances.get(likeliest, 0.0) + mixture.end
    total = sum_of(logits, np.float32(top))
    odds = mixture.weight / (1.0 - mixture.weight)
    mixed: dict[int, float] = {}
    for token, chance in chances.items():
        if not 0 <= token < len(logits):
            raise UsageError(f"a mixture names token {token}, but the vocabulary ends at {len(logits) - 1}")
        own = math.exp(logits.item(token) - top) if mixture.allows(token) else 0.0  # of `total`
        share = own + odds * chance * total  # a tiny weight rounds to 0
        value = top + math.log(share) if share > 0.0 else -math.inf
        mixed[token] = float(np.float32(value))
    return mixed


def _apply_bias(logits: Logits, sampling: Sampling) -> Logits:
    biased = logits.astype(np.float32, copy=True)
    for token, bias in sampling.logit_bias.items():
        if not 0 <= token < len(biased):
            raise UsageError(
                f"logit_bias names token {token}, but the vocabulary ends at {len(biased) - 1}",
                param="logit_bias",
            )
        if not bias < math.inf:  # -inf forbids a token; NaN compares with nothing
            raise UsageError(f"logit_bias for token {token} must be a number, not {bias}", param="logit_bias")
        biased[token] += bias
    return biased


def _is_allowed(mask: Mask, token: int) -> bool:
    return token >> 5 < len(mask) and bool(int(mask[token >> 5]) >> (token & 31) & 1)


def _apply_mask(logits: Logits, mask: Mask) -> Logits:
    """The logits with -inf wherever `mask` has no bit."""
    result = np.full(len(logits), -np.inf, dtype=np.float32)
    size = min(len(logits), 32 * len(mask))
    bits = np.unpackbits(mask.view(np.uint8), count=size, bitorder="little").view(np.bool_)
    np.copyto(result[:size], logits[:size], where=bits)
    return result


def _scale_logits(logits: Logits, top: np.float32, sampling: Sampling) -> Logits:
    """Logits divided by the temperature, with the best at 0. Tiny temperatures are limited for float32."""
    return (logits - top) * np.float32(1.0 / max(sampling.temperature, 1e-6))


def _best(logits: Logits, count: int, largest: np.float32 = _ZERO) -> Ids:
    """Ids of the `count` best tokens, in id order."""
    ids = np.flatnonzero(logits > largest - _NEAR)  # few tokens, and nearly always enough
    if len(ids) < count:
        ids = np.arange(len(logits))
    return ids[_largest(logits[ids], count)]


def _largest(values: Logits, count: int) -> Ids:
    """Ids of the `count` largest values, in id order; among equals the lowest ids."""
    if count >= len(values):
        return np.arange(len(values))
    edge = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values > edge)
    level = np.flatnonzero(values == edge)[: count - len(above)]
    return np.sort(np.concatenate((above, level)))


def _survivors(relative: Logits, sampling: Sampling) -> Ids:
    """Ids that pass the filters, in order. `relative`: scaled logits, the best at 0."""
    ids: Ids | None = None
    if 0 < sampling.top_k < len(relative):
        ids = _best(relative, sampling.top_k)
    if sampling.top_p < 1.0:
        ids = _nucleus(relative, ids, sampling.top_p)
    floor = math.log(sampling.min_p) if sampling.min_p > 0.0 else -_HOPELESS
    return np.flatnonzero(relative >= floor) if ids is None else ids[relative[ids] >= floor]


def _nucleus(relative: Logits, ids: Ids | None, top_p: float) -> Ids:
    """The smallest set of best tokens, out of `ids` or all, that holds `top_p` of the mass."""
    wanted = top_p * float(np.exp(relative if ids is None else relative[ids]).sum(dtype=np.float64))
    # Sorting the whole vocabulary is slow: only consider as many tokens as the mass requires.
    for floor in (-5.0, -10.0, -15.0, -math.inf):
        deep = np.flatnonzero(relative >= floor) if ids is None else ids[relative[ids] >= floor]
        weights = np.exp(relative[deep].astype(np.float64))
        if weights.sum() >= wanted:
            break
    order = np.argsort(-weights, kind="stable")
    count = int(np.searchsorted(np.cumsum(weights[order]), wanted)) + 1
    return np.sort(deep[order[:count]])


def _draw(relative: Logits, ids: Ids | None, seed: int, position: int) -> int:
    """The survivor with the largest log p + Gumbel.

    That is the largest weight / rate, and rate >= v, so weight / v bounds it from above. Only the few
    tokens whose bound reaches the score of the bound's own winner need the exact, double-precision score."""
    if ids is not None and len(ids) == 1:
        return int(ids[0])
    if ids is None or len(ids) * 4 > len(relative):
        # With so many survivors it is faster to compute the noise of all tokens; the others get -inf.
        bits = all_noise_bits(seed, position, len(relative))
        scaled = relative
        if ids is not None and len(ids) < len(relative):
            scaled = np.full_like(relative, -np.inf)
            scaled[ids] = relative[ids]
        ids = None
    else:
        bits = noise_bits(seed, position, ids)
        scaled = relative[ids]
    bound = np.exp(scaled)
    bound /= bits.astype(np.float32) + np.float32(0.5)
    leader = int(bound.argmax())
    score = float(_score(scaled[leader : leader + 1], bits[leader : leader + 1])[0])
    reach = math.exp(score) * 2.0**-32 / _BOUND_SLACK
    contenders = np.flatnonzero(bound >= np.float32(reach))
    winner = contenders[_score(scaled[contenders], bits[contenders]).argmax()]
    return int(winner if ids is None else ids[winner])


def _score(scaled: Logits, bits: npt.NDArray[np.uint32]) -> npt.NDArray[Any]:
    return scaled.astype(np.float64) - np.log(-np.log1p(-uniform(bits)))

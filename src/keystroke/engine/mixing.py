"""A second predictor beside the model: texts that may follow, turned into chances of tokens.

Knows texts and tokens, not where texts come from. A predictor is asked before each step, and after each
token of its draft, what it has seen follow; how far it is believed grows with how long a context it has
found again, and falls where it has seen several things follow. That weight is shared out over the first
tokens of those texts (`Mixture`); the model keeps the rest. What tokens are certain enough to be shown is
told of the mixed chances.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from keystroke.engine.base import Mixture, TokenLogprob
from keystroke.engine.tokenizer import Tokenizer

# The chance that a context of one more word is trusted in vain. With 0.94, and agreement squared, the loss of
# 8,766 tokens at 800 places of files no model has seen (Python, keystroke-80m) falls from 1.424 to 1.262
# nats; a table of 36 weights fitted to the same places comes to 1.259.
_DOUBT = 0.94
_MOST = 0.95  # the model is never overruled altogether
_DRAFT = 4  # tokens of a line seen before that one step may say: a further row costs a tenth of a step
_BELIEVED = 0.1  # how likely all of a draft must be by the predictor alone; nine of ten tokens came true
_FIRST = 40  # characters of a text that decide about its first token


@dataclass(frozen=True, slots=True)
class Prediction:
    """What followed the longest context that was found again, `length` words of it: each text with how often
    it did (a nearer place may count more). Texts end with their line; an empty one says that it ends here."""

    length: int
    counts: Mapping[str, float]


class Predictor(Protocol):
    """Somebody who has seen text like this before. May be asked from another thread than it was made in."""

    ends_line: bool  # whether an answer ends with its line; else the end of one says nothing of the answer's

    def after(self, said: str) -> Prediction | None:
        """What may follow once the answer has come to `said`; None where nothing like it was seen."""


@dataclass(frozen=True, slots=True)
class Mixing:
    """The predictor to mix into an answer, if any, and whether it also drafts where there is no drafter."""

    predictor: Predictor | None = None
    drafts: bool = True


NO_MIXING = Mixing()


class Mixer:
    """Mixtures for the steps of one answer. `ends`: tokens that end it."""

    def __init__(self, predictor: Predictor, tokenizer: Tokenizer, ends: Iterable[int]) -> None:
        self._predictor, self._tokenizer = predictor, tokenizer
        self._ends = tuple(sorted(ends))
        self._firsts: dict[str, int] = {}

    def mixtures(
        self, tokens: Sequence[int], draft: Sequence[int] = (), left: str = ""
    ) -> tuple[Mixture | None, ...]:
        """For the place after `tokens`, which are the answer so far, and after each token of `draft`. `left`:
        what the next tokens have to say in any case (token healing)."""
        return tuple(self._mixture([*tokens, *draft[:ahead]], left) for ahead in range(len(draft) + 1))

    def drafted(self, tokens: Sequence[int], most: int) -> tuple[tuple[int, ...], tuple[Mixture | None, ...]]:
        """What follows `tokens` if the predictor is right, as far as it is believed, and the mixtures of that
        draft: where it has seen the text before, one step says several tokens of it."""
        draft: list[int] = []
        mixtures = [self._mixture(tokens, "")]
        believed = 1.0
        while len(draft) < min(most, _DRAFT):
            seen = mixtures[-1]
            if seen is None or not seen.chances:
                break
            token, chance = max(seen.chances.items(), key=lambda entry: entry[1])
            believed *= seen.weight * chance
            if believed < _BELIEVED:
                break
            draft.append(token)
            mixtures.append(self._mixture([*tokens, *draft], ""))
        return tuple(draft), tuple(mixtures)

    def _mixture(self, tokens: Sequence[int], left: str) -> Mixture | None:
        said = self._tokenizer.decode(tokens) if tokens else ""
        if said.endswith("\ufffd"):
            return None  # in the middle of a character
        seen = self._predictor.after(said + left)
        if seen is None:
            return None
        chances: dict[int, float] = {}
        end = 0.0
        for text, count in seen.counts.items():
            if left or text:
                first = self._first(left + text)
                chances[first] = chances.get(first, 0.0) + count
            elif self._predictor.ends_line:
                end += count
        total = sum(chances.values()) + end
        if not total or (end and not self._ends):
            return None
        agreement = max(end, *chances.values(), 0.0) / total
        weight = min(_MOST, (1.0 - _DOUBT**seen.length) * agreement**2)
        shares = {token: count / total for token, count in chances.items()}
        return Mixture(weight, shares, end / total, self._ends)

    def _first(self, text: str) -> int:
        first = self._firsts.get(text)
        if first is None:
            first = self._firsts[text] = self._tokenizer.encode(text[:_FIRST])[0]
        return first


def mixed_logprobs(
    told: Sequence[TokenLogprob], mixtures: Sequence[Mixture | None]
) -> tuple[TokenLogprob, ...]:
    """Log probabilities that a model told of its step, as the mixture has them."""
    return tuple(
        one if index >= len(mixtures) or (mixture := mixtures[index]) is None else _mixed(one, mixture)
        for index, one in enumerate(told)
    )


def _mixed(told: TokenLogprob, mixture: Mixture) -> TokenLogprob:
    def mixed(token: int, logprob: float) -> float:
        chance = mixture.of(token, math.exp(logprob))
        return math.log(chance) if chance > 0.0 else -math.inf

    top = tuple((token, mixed(token, logprob)) for token, logprob in told.top)
    return replace(told, logprob=min(0.0, mixed(told.token, told.logprob)), top=top)

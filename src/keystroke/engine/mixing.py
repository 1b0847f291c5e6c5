"""Mixes the predictions of a second predictor, such as an n-gram cache, into the model's probabilities.

Before each step, and after each token of its draft, the predictor gives the texts that followed the same
context before. Its weight grows with the length of that context and falls with the number of different
continuations; it is divided among the first tokens of those texts (`Mixture`). Log probabilities that callers
see are those of the mixture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, overload
from weakref import WeakKeyDictionary

from keystroke.engine.base import Mixture, TokenLogprob
from keystroke.engine.tokenizer import Tokenizer

# The doubt left after one more word of matching context. With 0.94, and agreement squared, the loss of
# 8,766 tokens at 800 places of files no model has seen (Python, keystroke-80m) falls from 1.424 to 1.262
# nats; a table of 36 weights fitted to the same places comes to 1.259.
_DOUBT = 0.94
_MOST = 0.95  # the model keeps at least the rest
# The longest draft in tokens, and its least probability by the predictor alone, which doubts too much: 83 of
# 100 tokens of such drafts are right.
_DRAFT, _BELIEVED = 6, 0.07
_FIRST = 40  # characters of a text that determine its first token
_KNOWN = 20_000  # texts whose first token is kept

_first_tokens: WeakKeyDictionary[Tokenizer, dict[str, int]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Continuations:
    """What followed the longest matching context, which has `length` words: each text and how often it
    followed (nearer occurrences may count more). Texts end with their line; an empty one means that the line
    ends here."""

    length: int
    counts: Mapping[str, float]


class Predictor(Protocol):
    """A source of continuations. May be called from another thread than the one that created it."""

    ends_line: bool  # whether an answer ends with its line; otherwise the end of a line is no end token

    def predict(self, text: str) -> Continuations | None:
        """The continuations of the answer `text`; None if its context was not seen before."""


@dataclass(frozen=True, slots=True)
class Mixing:
    """The predictor to mix into an answer, if any, and whether it also drafts where there is no drafter."""

    predictor: Predictor | None = None
    drafts: bool = True


NO_MIXING = Mixing()


Remaining = Callable[[Sequence[int]], str | None]


def _no_text(_draft: Sequence[int]) -> str:
    return ""


class Mixer:
    """Computes the mixtures for the steps of one answer. `ends`: tokens that end it."""

    def __init__(self, predictor: Predictor, tokenizer: Tokenizer, ends: Iterable[int]) -> None:
        self._predictor, self._tokenizer = predictor, tokenizer
        self._ends = tuple(sorted(ends))
        self._firsts = _first_tokens.setdefault(tokenizer, {})

    def mixture(
        self, tokens: Sequence[int], draft: Sequence[int] = (), left: Remaining = _no_text
    ) -> Mixture | None:
        """The mixture after `tokens`, the answer so far, and `draft`. `left`: the text that must follow
        after a draft (token healing); None in the middle of a character."""
        due = left(draft)
        return None if due is None else self._mixture([*tokens, *draft], due)

    def draft(
        self, tokens: Sequence[int], most: int, left: Remaining = _no_text
    ) -> tuple[tuple[int, ...], list[Mixture | None]]:
        """A draft of what follows `tokens`, as far as the predictor finds it likely enough, and the mixtures
        known for it, at least the first."""
        draft: list[int] = []
        mixtures = [self.mixture(tokens, (), left)]
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
            if len(draft) < min(most, _DRAFT):
                mixtures.append(self.mixture(tokens, draft, left))
        return tuple(draft), mixtures

    def _mixture(self, tokens: Sequence[int], left: str) -> Mixture | None:
        text = self._tokenizer.decode(tokens) if tokens else ""
        if text.endswith("\ufffd"):
            return None  # in the middle of a character
        seen = self._predictor.predict(text + left)
        if seen is None:
            return None
        chances: dict[int, float] = {}
        end = 0.0
        for text, count in seen.counts.items():
            if left or text:
                first = self._first_token(left + text)
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

    def _first_token(self, text: str) -> int:
        text = text[:_FIRST]
        first = self._firsts.get(text)
        if first is None:
            if len(self._firsts) >= _KNOWN:
                self._firsts.clear()
            first = self._firsts[text] = self._tokenizer.encode(text)[0]
        return first


class StepMixtures(Sequence["Mixture | None"]):
    """The mixtures of a step with `draft`. Each is computed when it is first read, so that those behind a
    rejected token never are; `known` are the first ones."""

    def __init__(
        self,
        compute: Callable[[Sequence[int]], Mixture | None],
        draft: Sequence[int],
        known: Iterable[Mixture | None] = (),
    ) -> None:
        self._compute, self._draft, self._known = compute, draft, list(known)

    def __len__(self) -> int:
        return len(self._draft) + 1

    @overload
    def __getitem__(self, index: int) -> Mixture | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[Mixture | None]: ...
    def __getitem__(self, index: int | slice) -> Mixture | list[Mixture | None] | None:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        while len(self._known) <= index:
            self._known.append(self._compute(self._draft[: len(self._known)]))
        return self._known[index]


def mix_logprobs(
    logprobs: Sequence[TokenLogprob], mixtures: Sequence[Mixture | None]
) -> tuple[TokenLogprob, ...]:
    """The log probabilities of a step after mixing."""
    return tuple(
        _mix_logprob(one, mixture) if (mixture := mixtures[index]) is not None and mixture.weight else one
        for index, one in enumerate(logprobs)
    )


def _mix_logprob(chosen: TokenLogprob, mixture: Mixture) -> TokenLogprob:
    def mixed(token: int, logprob: float) -> float:
        chance = mixture.probability(token, math.exp(logprob))
        return math.log(chance) if chance > 0.0 else -math.inf

    top = tuple((token, mixed(token, logprob)) for token, logprob in chosen.top)
    return replace(chosen, logprob=min(0.0, mixed(chosen.token, chosen.logprob)), top=top)

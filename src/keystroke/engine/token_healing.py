"""Token healing: an answer that must begin with given text, such as the half word before the cursor.

A word cut by the cursor is not tokenized as the model saw it in training. The half word is therefore removed
from the prompt, and the answer may only choose tokens that are compatible with it until it is complete, also
within a draft. Log probabilities are renormalised over those tokens.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from keystroke.engine.base import Mixture, TokenLogprob
from keystroke.engine.tokenizer import Tokenizer

if TYPE_CHECKING:  # clients of a gateway do not need numpy
    import numpy as np
    import numpy.typing as npt

RIVALS = 20  # log probabilities that a step returns: enough to estimate the compatible tokens' share
_KNOWN = 256  # beginnings whose compatible tokens are kept


class TokenIndex:
    """The tokens of a vocabulary by their bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        plain = [t for t in range(tokenizer.vocab_size) if not tokenizer.is_special(t)]
        pairs = sorted((piece, t) for t in plain if (piece := tokenizer.token_bytes(t)))
        self._pieces = [piece for piece, _ in pairs]
        self._tokens = [token for _, token in pairs]
        self._known: dict[bytes, npt.NDArray[np.intp]] = {}

    def compatible(self, wanted: bytes) -> npt.NDArray[np.intp]:
        """Tokens that begin with `wanted`, and tokens that `wanted` begins with, in ascending order."""
        found = self._known.get(wanted)
        if found is None:
            import numpy as np

            if len(self._known) >= _KNOWN:
                self._known.clear()
            found = self._known[wanted] = np.array(sorted(self._find(wanted)), dtype=np.intp)
        return found

    def _find(self, wanted: bytes) -> list[int]:
        low, high = bisect_left(self._pieces, wanted), bisect_left(self._pieces, wanted + b"\xff" * 64)
        found = self._tokens[low:high]
        for size in range(1, len(wanted)):
            at = bisect_left(self._pieces, wanted[:size])
            while at < len(self._pieces) and self._pieces[at] == wanted[:size]:
                found.append(self._tokens[at])
                at += 1
        return found


_indexes: WeakKeyDictionary[Tokenizer, TokenIndex] = WeakKeyDictionary()


def token_index(tokenizer: Tokenizer) -> TokenIndex:
    """The index of a tokenizer, built once."""
    index = _indexes.get(tokenizer)
    if index is None:
        index = _indexes[tokenizer] = TokenIndex(tokenizer)
    return index


class TokenHealing:
    """The part of the given text that is still to be generated."""

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        self._left = text.encode()
        self._tokenizer = tokenizer

    def begin_step(self) -> bool:
        """Whether the next token is restricted. If no token is compatible, healing ends."""
        if self._left and not len(self._compatible(self._left)):
            self._left = b""
        return bool(self._left)

    def remaining(self, draft: Sequence[int] = ()) -> str | None:
        """The text that remains after `draft`; None in the middle of a character."""
        try:
            return self._remaining_after(draft).decode()
        except UnicodeDecodeError:
            return None

    def restrict(self, draft: Sequence[int], mixture: Mixture | None) -> Mixture | None:
        """The mixture after `draft`, restricted to the tokens that are compatible there."""
        left = self._remaining_after(draft)
        if left and len(only := self._compatible(left)):
            return replace(mixture or Mixture(0.0, {}), only=only)
        return mixture

    def advance(self, tokens: Iterable[int]) -> None:
        """Remove the text of the chosen tokens."""
        self._left = self._remaining_after(tokens)

    def _remaining_after(self, tokens: Iterable[int]) -> bytes:
        left = self._left
        for token in tokens if left else ():
            piece = self._tokenizer.token_bytes(token)
            left = left[len(piece) :] if left.startswith(piece) else b""
        return left

    def _compatible(self, left: bytes) -> npt.NDArray[np.intp]:
        return token_index(self._tokenizer).compatible(left)


def renormalise(chosen: TokenLogprob, mixture: Mixture | None, rivals: int) -> TokenLogprob:
    """The log probability of a token among those that the mixture allows, with at most `rivals`
    alternatives."""
    if mixture is None or mixture.only is None:
        return replace(chosen, top=chosen.top[:rivals])
    chances = {**dict(chosen.top), chosen.token: chosen.logprob}
    tokens = list(chances)
    places = mixture.only.searchsorted(tokens)
    found = mixture.only.take(places, mode="clip")
    share = sum(math.exp(chances[token]) for token, at in zip(tokens, found, strict=True) if at == token)
    logprob = min(0.0, chosen.logprob - math.log(share)) if share > 0 else chosen.logprob
    return TokenLogprob(chosen.token, logprob, chosen.top[:rivals])

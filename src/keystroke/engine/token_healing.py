"""An answer that begins with given text: a word the user has half written, told again by the model.

A model knows words by their own tokens, not by the pieces a cursor leaves of them. So the half word is
taken out of the prompt and the answer is held to begin with it: while it lasts, only tokens that agree with
it may be chosen. Their chances are told among each other, as if nothing else had been possible.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from weakref import WeakKeyDictionary

from keystroke.engine.base import TokenLogprob
from keystroke.engine.tokenizer import Tokenizer

RIVALS = 20  # tokens whose chances a step tells: enough to know what share the agreeing ones have
_FAVOUR = 1e4  # added to the logits of tokens that agree: none of the others comes near


class TokenIndex:
    """The tokens of a vocabulary by their bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        plain = [t for t in range(tokenizer.vocab_size) if not tokenizer.is_special(t)]
        pairs = sorted((piece, t) for t in plain if (piece := tokenizer.token_bytes(t)))
        self._pieces = [piece for piece, _ in pairs]
        self._tokens = [token for _, token in pairs]

    def agreeing(self, wanted: bytes) -> list[int]:
        """Tokens that begin with `wanted`, and those that `wanted` begins with."""
        low, high = bisect_left(self._pieces, wanted), bisect_left(self._pieces, wanted + b"\xff" * 64)
        found = self._tokens[low:high]
        for size in range(1, len(wanted)):
            at = bisect_left(self._pieces, wanted[:size])
            while at < len(self._pieces) and self._pieces[at] == wanted[:size]:
                found.append(self._tokens[at])
                at += 1
        return found


_indexes: WeakKeyDictionary[Tokenizer, TokenIndex] = WeakKeyDictionary()


def index_of(tokenizer: Tokenizer) -> TokenIndex:
    """Made once for each tokenizer."""
    index = _indexes.get(tokenizer)
    if index is None:
        index = _indexes[tokenizer] = TokenIndex(tokenizer)
    return index


class TokenHealing:
    """What is still to be said of the given text."""

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        self._left = text.encode()
        self._tokenizer = tokenizer
        self._allowed: frozenset[int] = frozenset()

    @property
    def open(self) -> bool:
        return bool(self._left)

    @property
    def left(self) -> str:
        """What is still to be said, as text; empty in the middle of a character."""
        try:
            return self._left.decode()
        except UnicodeDecodeError:
            return ""

    def bias(self) -> Mapping[int, float]:
        """What to add to the logits of the next step. Empty where no token agrees: then it is given up."""
        self._allowed = frozenset(index_of(self._tokenizer).agreeing(self._left))
        if not self._allowed:
            self._left = b""
        return dict.fromkeys(self._allowed, _FAVOUR)

    def take(self, tokens: Iterable[int]) -> None:
        """These were chosen."""
        for token in tokens:
            piece = self._tokenizer.token_bytes(token)
            self._left = self._left[len(piece) :] if self._left.startswith(piece) else b""

    def among(self, chosen: TokenLogprob, rivals: int) -> TokenLogprob:
        """The chance of a token among those that were possible. `rivals`: how many the caller wants told."""
        chances = {**dict(chosen.top), chosen.token: chosen.logprob}
        share = sum(math.exp(p) for token, p in chances.items() if token in self._allowed)
        logprob = min(0.0, chosen.logprob - math.log(share)) if share > 0 else chosen.logprob
        return TokenLogprob(chosen.token, logprob, chosen.top[:rivals])

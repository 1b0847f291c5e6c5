"""Token healing: an answer that must begin with given text, such as the half word before the cursor.

A word cut by the cursor is not tokenized as the model saw it in training. The half word is therefore removed
from the prompt, and the answer may only choose tokens that are compatible with it until it is complete. Log
probabilities are renormalised over those tokens.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from weakref import WeakKeyDictionary

from keystroke.engine.base import TokenLogprob
from keystroke.engine.tokenizer import Tokenizer

RIVALS = 20  # log probabilities that a step returns: enough to estimate the compatible tokens' share
_FAVOUR = 1e4  # added to the logits of compatible tokens, so that no other is chosen


class TokenIndex:
    """The tokens of a vocabulary by their bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        plain = [t for t in range(tokenizer.vocab_size) if not tokenizer.is_special(t)]
        pairs = sorted((piece, t) for t in plain if (piece := tokenizer.token_bytes(t)))
        self._pieces = [piece for piece, _ in pairs]
        self._tokens = [token for _, token in pairs]

    def compatible(self, wanted: bytes) -> list[int]:
        """Tokens that begin with `wanted`, and tokens that `wanted` begins with."""
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
        self._allowed: frozenset[int] = frozenset()

    @property
    def active(self) -> bool:
        return bool(self._left)

    @property
    def remaining(self) -> str:
        """The remaining text; empty in the middle of a character."""
        try:
            return self._left.decode()
        except UnicodeDecodeError:
            return ""

    def bias(self) -> Mapping[int, float]:
        """The logit bias of the next step. Empty if no token is compatible: healing then ends."""
        self._allowed = frozenset(token_index(self._tokenizer).compatible(self._left))
        if not self._allowed:
            self._left = b""
        return dict.fromkeys(self._allowed, _FAVOUR)

    def advance(self, tokens: Iterable[int]) -> None:
        """Remove the text of the chosen tokens."""
        for token in tokens:
            piece = self._tokenizer.token_bytes(token)
            self._left = self._left[len(piece) :] if self._left.startswith(piece) else b""

    def renormalise(self, chosen: TokenLogprob, rivals: int) -> TokenLogprob:
        """The log probability of a token among the compatible ones, with at most `rivals` alternatives."""
        chances = {**dict(chosen.top), chosen.token: chosen.logprob}
        share = sum(math.exp(p) for token, p in chances.items() if token in self._allowed)
        logprob = min(0.0, chosen.logprob - math.log(share)) if share > 0 else chosen.logprob
        return TokenLogprob(chosen.token, logprob, chosen.top[:rivals])

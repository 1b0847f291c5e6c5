"""The tokens of a text that is being edited.

Law: after any edits `tokens` equals a fresh encode of `text`, and an edit re-encodes only the pieces it
touches. The text is kept as pieces between cuts, places where the tokenizer promises that nothing on one side
can change the tokens on the other; whether a place is a cut depends on the two characters around it alone, so
a cut outside an edit stays one. A tokenizer without cuts has one piece: correct, but slow on long texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from keystroke.engine.tokenizer.base import Tokenizer, check_text
from keystroke.errors import InputError

PIECE = (
    96  # characters a piece has at least: small enough to re-encode in microseconds, large enough to be few
)


@dataclass(frozen=True, slots=True)
class TokenEdit:
    """What an edit did to the tokens: [start, end) became `tokens`."""

    start: int
    end: int
    tokens: list[int]


class IncrementalEncoder:
    """Holds `text` and its `tokens`. Both are read-only to callers; `tokens` is the same list throughout."""

    def __init__(self, tokenizer: Tokenizer, text: str = "") -> None:
        self._tokenizer = tokenizer
        self.text = ""
        self.tokens: list[int] = []
        # Where piece i begins, in characters and in tokens; a last entry marks the end of all.
        self._chars = np.zeros(2, dtype=np.int64)
        self._counts = np.zeros(2, dtype=np.int64)
        if text:
            self.edit(0, 0, text)

    def edit(self, start: int, end: int, replacement: str) -> TokenEdit:
        """Replace text[start:end]. Raises InputError (nothing changed) for a range outside the text or
        a replacement that is not well-formed Unicode."""
        size = len(self.text)
        if not 0 <= start <= end <= size:
            raise InputError(f"cannot replace [{start}, {end}) in a text of {size} characters")
        check_text(replacement)
        text = self.text[:start] + replacement + self.text[end:]
        shift = len(replacement) - (end - start)
        chars, counts = self._chars, self._counts
        # The first piece whose beginning the edit cannot move: it holds the character before the edit.
        first = int(np.searchsorted(chars[:-1], max(start - 1, 0), side="right")) - 1
        # The last piece it reaches: the one that holds the character after it.
        last = int(np.searchsorted(chars[:-1], min(end, max(size - 1, 0)), side="right")) - 1
        begin, stop = int(chars[first]), int(chars[last + 1]) + shift
        borders = self._borders(text, begin, stop)
        encode = self._tokenizer.encode
        pieces = [encode(text[a:b]) for a, b in pairwise(borders)]
        tokens = [token for piece in pieces for token in piece]
        token_start, token_end = int(counts[first]), int(counts[last + 1])

        ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64) + token_start
        drift = len(tokens) - (token_end - token_start)
        self._chars = np.concatenate((chars[: first + 1], borders[1:], chars[last + 2 :] + shift))
        self._counts = np.concatenate((counts[: first + 1], ends, counts[last + 2 :] + drift))
        self.text = text
        self.tokens[token_start:token_end] = tokens
        return TokenEdit(token_start, token_end, tokens)

    def _borders(self, text: str, begin: int, stop: int) -> list[int]:
        """`begin`, some cuts at least PIECE characters apart, and `stop`."""
        borders = [begin]
        for cut in self._tokenizer.cuts(text, begin + PIECE, stop - PIECE):
            if cut - borders[-1] >= PIECE:
                borders.append(cut)
        borders.append(stop)
        return borders

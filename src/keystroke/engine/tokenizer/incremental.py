"""The tokens of a text that is being edited.

After any edits `tokens` equals a fresh encode of `text`, and an edit re-encodes only the pieces it
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

# Characters a piece has at least: few enough to encode in microseconds, enough that pieces are not too many.
PIECE = 64


@dataclass(frozen=True, slots=True)
class TokenEdit:
    """What an edit did to the tokens: [start, end) became `tokens`."""

    start: int
    end: int
    tokens: list[int]


class IncrementalEncoder:
    """Holds a text and its `tokens`: the same list throughout, changed in place, read-only to callers."""

    def __init__(self, tokenizer: Tokenizer, text: str = "") -> None:
        self._tokenizer = tokenizer
        self.tokens: list[int] = []
        self._pieces = [""]
        # Where piece i begins, in characters and in tokens; a last entry marks the end of all.
        self._chars = np.zeros(2, dtype=np.int64)
        self._counts = np.zeros(2, dtype=np.int64)
        if text:
            self.edit(0, 0, text)

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def __len__(self) -> int:
        """Characters of the text."""
        return int(self._chars[-1])

    def edit(self, start: int, end: int, replacement: str) -> TokenEdit:
        """Replace text[start:end]. Raises InputError (nothing changed) for a range outside the text or
        a replacement that is not well-formed Unicode."""
        size = len(self)
        if not 0 <= start <= end <= size:
            raise InputError(f"cannot replace [{start}, {end}) in a text of {size} characters")
        check_text(replacement)
        chars, counts = self._chars, self._counts
        # The first piece whose beginning the edit cannot move: it holds the character before the edit.
        first = int(np.searchsorted(chars[:-1], max(start - 1, 0), side="right")) - 1
        # The end of what it reaches: the piece that holds the character after it is the last.
        stop = int(np.searchsorted(chars[:-1], min(end, max(size - 1, 0)), side="right"))
        begin = int(chars[first])
        old = "".join(self._pieces[first:stop])
        new = old[: start - begin] + replacement + old[end - begin :]
        borders = self._borders(new)
        pieces = [new[a:b] for a, b in pairwise(borders)]
        encoded = [self._tokenizer.encode(piece) for piece in pieces]

        tokens = [token for piece in encoded for token in piece]
        token_start, token_end = int(counts[first]), int(counts[stop])
        grown, drift = len(new) - len(old), len(tokens) - (token_end - token_start)
        ends = np.cumsum([len(piece) for piece in encoded], dtype=np.int64)
        self._pieces[first:stop] = pieces
        self._chars = np.concatenate(
            (chars[: first + 1], begin + np.array(borders[1:]), chars[stop + 1 :] + grown)
        )
        self._counts = np.concatenate((counts[: first + 1], token_start + ends, counts[stop + 1 :] + drift))
        self.tokens[token_start:token_end] = tokens
        return TokenEdit(token_start, token_end, tokens)

    def _borders(self, text: str) -> list[int]:
        """0, some cuts at least PIECE characters apart, and the end."""
        borders = [0]
        for cut in self._tokenizer.cuts(text, PIECE, len(text) - PIECE):
            if cut - borders[-1] >= PIECE:
                borders.append(cut)
        borders.append(len(text))
        return borders

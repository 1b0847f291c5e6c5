"""Keeps the tokens of a text up to date while it is edited.

After any edits `tokens` equals a fresh encoding of `text`, and an edit only re-encodes the pieces that it
touches. The text is split at cuts, offsets where text on one side cannot change the tokens on the other;
since a cut only depends on the two characters around it, cuts outside an edit stay valid. Without cuts there
is one piece: correct, but slow for long texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from keystroke.engine.tokenizer.base import Tokenizer, check_text
from keystroke.errors import InputError

# Least characters of a piece: short enough to encode in microseconds, long enough to have few pieces.
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
        # The start of piece i in characters and in tokens; the last entry is the end of the text.
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
        # The first affected piece contains the character before the edit.
        first = int(np.searchsorted(chars[:-1], max(start - 1, 0), side="right")) - 1
        # The last affected piece contains the character after the edit.
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

"""Drafts an edited file from its original.

A cursor moves through the source along with the output. While they agree, the source is the draft. After they
diverge, the cursor jumps to where the last few tokens of the output occur in the source, nearest to where it
was: behind deleted text, at the same position after an insertion, past replaced text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from keystroke.engine.speculative.base import Drafter

_TRUSTED = 3  # matching tokens required for a jump of any distance
_NEAR = 256  # longest jump on two matching tokens
_LOOK = 24  # nearest occurrences that are compared in full
_WINDOW = 12  # how far ahead a single token is searched right after a divergence


class FileDrafter(Drafter):
    """Drafts `source` for an output that begins where its sequence's prompt ends."""

    def __init__(self, source: Sequence[int]) -> None:
        self._source = list(source)
        self._pairs: dict[tuple[int, int], list[int]] = {}  # two tokens -> positions right after them
        for end, pair in enumerate(zip(self._source, self._source[1:], strict=False), start=2):
            self._pairs.setdefault(pair, []).append(end)
        self._rewind()

    def _rewind(self) -> None:
        self._at = 0  # index of the next source token
        self._lost = False
        self._recent: list[int] = []  # the output's last tokens
        self.strength = 4

    def begin(self, prompt: Sequence[int]) -> None:
        self._rewind()

    def observe(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._advance(token)

    def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        if self._lost:
            return ()
        return self._source[self._at : self._at + limit]

    def _advance(self, token: int) -> None:
        recent = self._recent
        recent.append(token)
        if len(recent) > 64:
            del recent[:32]
        source = self._source
        if not self._lost and self._at < len(source) and source[self._at] == token:
            self._at += 1
            self.strength += 1
            return
        place, matched = self._nearest_match()
        if matched >= _TRUSTED or (matched == 2 and abs(place - self._at) <= _NEAR):
            self._at, self._lost, self.strength = place, False, matched
        elif not self._lost:
            # The first token that differs. If it occurs a little ahead, the text between was deleted; if not,
            # assume that it replaced one token. A wrong assumption costs one short draft.
            ahead = source[self._at + 1 : self._at + 1 + _WINDOW]
            if token in ahead:
                self._at += ahead.index(token) + 2
            else:
                self._at += 1
                self._lost = self.strength == 0  # that assumption was already made
            self.strength = 0

    def _nearest_match(self) -> tuple[int, int]:
        """The position after the longest match of the output's ending near the cursor, and its length."""
        recent, source = self._recent, self._source
        places = self._pairs.get((recent[-2], recent[-1])) if len(recent) > 1 else None
        if not places:
            return self._at, 0
        middle = bisect_left(places, self._at)
        best, best_key = self._at, (0, 0)
        for place in places[max(middle - _LOOK, 0) : middle + _LOOK]:
            matched = 2
            while (
                matched < 8
                and matched < len(recent)
                and matched < place
                and recent[-matched - 1] == source[place - matched - 1]
            ):
                matched += 1
            # Of equally long matches the nearest; forward jumps are more likely.
            distance = place - self._at if place >= self._at else 2 * (self._at - place)
            key = (matched, -distance)
            if key > best_key:
                best, best_key = place, key
        return best, best_key[0]

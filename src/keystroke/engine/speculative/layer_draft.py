"""Drafts of one further layer, which reads a token and the stream of the token before: an MTP layer or a
draft head. What engines with such a layer share; they supply its arithmetic.

A draft ends where it becomes unlikely, and never changes a text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from keystroke.engine.base import Guess

LEAST_CHANCE = 0.3  # a draft less likely than this costs more than it saves
KEPT_STREAM = 16  # tokens by which a session can be taken back without a gap in the layer's input

Row = TypeVar("Row")
Follow = Callable[[int, int], tuple[int, float]]  # token, position -> the likeliest next token, its chance


class StreamTail(Generic[Row]):
    """The streams of a session's newest tokens, by position."""

    __slots__ = ("_rows",)

    def __init__(self, rows: dict[int, Row] | None = None) -> None:
        self._rows = rows or {}

    def copy(self) -> StreamTail[Row]:
        return StreamTail(dict(self._rows))

    def before(self, position: int) -> Row | None:
        """The stream of the token before `position`, if it is known."""
        return self._rows.get(position - 1)

    def replace(self, start: int, end: int, rows: Sequence[Row]) -> None:
        """After a run from `start` to `end`, whose newest tokens have the streams `rows`: older ones from
        `start` on are forgotten, and of those before it all but KEPT_STREAM."""
        kept = {at: row for at, row in self._rows.items() if start - KEPT_STREAM <= at < start}
        self._rows = kept | dict(enumerate(rows, end - len(rows)))

    def clear(self) -> None:
        self._rows.clear()


class LayerDrafter:
    """`seconds`: what a draft takes, on average."""

    seconds = 0.0

    def guess_likely(self, follow: Follow, token: int, position: int, most: int) -> Guess:
        """Up to `most` tokens that follow `token` at `position`. `follow` is called for one position after
        the other."""
        started = time.perf_counter()
        tokens: list[int] = []
        chances: list[float] = []
        likely = 1.0
        while len(tokens) < most:
            token, chance = follow(token, position + len(tokens))
            likely *= chance
            if likely < LEAST_CHANCE:
                break
            tokens.append(token)
            chances.append(likely)
        took = time.perf_counter() - started
        self.seconds += 0.1 * (took - self.seconds) if self.seconds else took
        return Guess(tuple(tokens), tuple(chances))

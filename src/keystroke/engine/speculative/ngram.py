"""Prompt lookup: what followed the last time these few tokens stood here. The baseline for drafters.

Remembers the latest place of each short run of tokens, nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

from keystroke.engine.speculative.base import Drafter


class NgramDrafter(Drafter):
    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        self._sizes = tuple(range(longest, shortest - 1, -1))
        self._text: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # run of tokens -> where its continuation starts
        self._indexed = 0

    def observe(self, tokens: Sequence[int]) -> None:
        self._text.extend(tokens)

    def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        text = self._text
        # Runs that end at the very last token have no continuation yet; they are indexed next time.
        for end in range(self._indexed + 1, len(text)):
            for size in self._sizes:
                if end >= size:
                    self._after[tuple(text[end - size : end])] = end
        self._indexed = max(self._indexed, len(text) - 1)
        for size in self._sizes:
            found = self._after.get(tuple(text[-size:])) if len(text) >= size else None
            if found is not None:
                self.strength = size
                return text[found : found + limit]
        return ()

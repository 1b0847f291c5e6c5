"""Drafts from all text seen so far: finds the longest suffix that occurred before and what followed it.

Uses an online suffix automaton over tokens, with amortised constant work per token; the suffix link of its
last state points to that suffix. Of several continuations the most frequent is used, then the latest. When
the automaton is full, the older half of the text is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from keystroke.engine.prefix import common_prefix
from keystroke.engine.speculative.base import Drafter

_BREAK = -1  # separates texts; never drafted, and no match crosses it
_PORTION = 512  # tokens indexed at a time: about a millisecond
_HOPS = 12  # suffix links along which an occurrence is counted: enough to rank, bounded for "aaaa..."


class SuffixAutomaton:
    """States are numbered; parallel lists hold their transitions, suffix link, longest length and count."""

    __slots__ = ("count", "last", "length", "link", "moves")

    def __init__(self) -> None:
        self.moves: list[dict[int, int]] = [{}]
        self.link: list[int] = [-1]
        self.length: list[int] = [0]
        self.count: list[int] = [0]
        self.last = 0

    def append(self, token: int) -> None:
        moves, link, length, count = self.moves, self.link, self.length, self.count
        state = len(length)
        at = self.last
        moves.append({})
        length.append(length[at] + 1)
        count.append(1)
        link.append(0)
        while at >= 0 and token not in moves[at]:
            moves[at][token] = state
            at = link[at]
        if at >= 0:
            known = moves[at][token]
            if length[known] != length[at] + 1:
                twin = len(length)
                moves.append(moves[known].copy())
                length.append(length[at] + 1)
                count.append(count[known])
                link.append(link[known])
                while at >= 0 and moves[at].get(token) == known:
                    moves[at][token] = twin
                    at = link[at]
                link[known] = twin
                known = twin
            link[state] = known
        self.last = state
        up = link[state]
        for _ in range(_HOPS):
            if up <= 0:
                break
            count[up] += 1
            up = link[up]

    @property
    def matched(self) -> int:
        """Length of the longest suffix of the text that occurred before."""
        return self.length[self.link[self.last]] if self.last else 0

    def continuation(self, limit: int) -> list[int]:
        """The tokens that most often followed that suffix."""
        moves, count = self.moves, self.count
        state = self.link[self.last]
        draft: list[int] = []
        while len(draft) < limit:
            onward = moves[state]
            if len(onward) == 1:
                ((token, state),) = onward.items()
            elif onward:
                # max() keeps the first of equals it meets: reversed, the one learned last.
                token = max(reversed(onward), key=lambda t: count[onward[t]])
                state = onward[token]
            else:
                break
            if token == _BREAK:
                break
            draft.append(token)
        return draft


class SuffixDrafter(Drafter):
    """`history`: texts known beforehand, such as other open files or earlier answers, oldest first."""

    def __init__(
        self, history: Iterable[Sequence[int]] = (), *, shortest: int = 2, capacity: int = 65_536
    ) -> None:
        self._shortest = shortest
        self._capacity = capacity
        self._automaton = SuffixAutomaton()
        self._text: list[int] = []  # the indexed text
        self._waiting: list[int] = []  # to be indexed when the next draft is requested
        self._sequence: list[int] = []  # of the present sequence
        for text in history:
            self.observe(text)
            self._waiting.append(_BREAK)

    def begin(self, prompt: Sequence[int]) -> None:
        """If the prompt continues the last sequence (the next keystroke, the next turn), only what is new is
        indexed, with a little context."""
        sequence = list(prompt)
        shared = common_prefix(self._sequence, sequence)
        if shared < len(self._sequence) or not self._sequence:
            self._waiting.append(_BREAK)
            self._waiting.extend(sequence[max(shared - 16, 0) :])
        else:
            self._waiting.extend(sequence[shared:])
        self._sequence = sequence

    def observe(self, tokens: Sequence[int]) -> None:
        self._waiting.extend(tokens)
        self._sequence.extend(tokens)

    def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        if not self._index():
            return ()
        matched = self._automaton.matched
        if matched < self._shortest:
            return ()
        self.strength = matched
        return self._automaton.continuation(limit)

    def _index(self) -> bool:
        """Index a portion of the waiting text, so that a long prompt does not delay the first token. Returns
        whether all of it is indexed."""
        size = max(_PORTION, len(self._waiting) // 8)
        portion = self._waiting[:size]
        del self._waiting[:size]
        if len(self._text) + len(portion) > self._capacity:
            portion = (self._text + portion)[-self._capacity // 2 :]
            self._automaton, self._text = SuffixAutomaton(), []
        append = self._automaton.append
        for token in portion:
            append(token)
        self._text.extend(portion)
        return not self._waiting

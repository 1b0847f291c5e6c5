"""Drafts from everything seen so far: the longest ending of the text that occurred before, and what followed.

An online suffix automaton over tokens, amortised constant work for each. The last state's suffix link
points to that longest ending, for free. Where several continuations are known the most frequent wins, then
the latest. Old text is forgotten in halves once the automaton is full.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from keystroke.engine.speculative.base import Drafter

_BREAK = -1  # stands between texts; never drafted, and no match crosses it
_PORTION = 512  # tokens indexed at a time: about a millisecond
_HOPS = 12  # how far up a new occurrence is counted: enough to rank continuations, bounded for "aaaa..."


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
        """Length of the longest ending of the text that occurred before."""
        return self.length[self.link[self.last]] if self.last else 0

    def continuation(self, limit: int) -> list[int]:
        """What most often followed that ending, token after token."""
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
        self._text: list[int] = []  # what the automaton holds
        self._waiting: list[int] = []  # not yet in it: indexing waits until a draft is asked for
        self._sequence: list[int] = []  # of the present sequence
        for text in history:
            self.observe(text)
            self._waiting.append(_BREAK)

    def begin(self, prompt: Sequence[int]) -> None:
        """A prompt that goes on like the sequence before it (the next keystroke, the next turn) adds only
        what is new, with a little before it to link up."""
        shared = 0
        for ours, theirs in zip(self._sequence, prompt, strict=False):
            if ours != theirs:
                break
            shared += 1
        if shared < len(self._sequence) or not self._sequence:
            self._waiting.append(_BREAK)
            self._waiting.extend(prompt[max(shared - 16, 0) :])
        else:
            self._waiting.extend(prompt[shared:])
        self._sequence = list(prompt)

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
        """Take in some of what waits; whether that was all. In portions: a long prompt must not hold up the
        first token."""
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

"""An n-gram index of text: finds earlier occurrences of the last words and the lines that followed them.

A text is a sequence of words and signs; spaces and indentation do not matter. An index is immutable, so
threads may share it. `Lexicon` caches lexed lines and word numbers, which makes the next index cheap to
build. Only the longest matching context counts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

LONGEST = 24  # words of context
SHORTEST = 2
_NEAR = 6  # words that are compared at every position; further ones only where those match
_FEW = 64  # positions at which all words are compared at once
CONTEXT = 600  # characters before a position that contain them
_PLACES = 2000  # occurrences of one pair of words, the last ones
_KEPT = 64  # of the occurrences with the longest context
_CONTINUED = 80  # characters of a continuation
_KEPT_LINES = 20_000
_NEWLINE, _BREAK, _UNKNOWN, _NEVER = 0, -1, -2, -3
_WORD = re.compile(r"\w+|[^\w\s]")

Numbers = npt.NDArray[np.int64]
_Line = tuple[Numbers, Numbers]
_EDGE, _LAST, _START = (np.array([number], dtype=np.int64) for number in (_BREAK, _NEWLINE, 0))
_BACK = np.arange(1, LONGEST + 2)


class Lexicon:
    """Numbers of words, and a cache of lexed lines. Not thread-safe."""

    def __init__(self) -> None:
        self.words: dict[str, int] = {"\n": _NEWLINE}
        self._lines: dict[str, _Line] = {}

    def lex(self, text: str, *, keep: bool = True) -> Lexed:
        """Lex a text. `keep`: cache its lines."""
        numbers, ends = [_EDGE], [_START]
        starts, sizes = [0], [1]
        at = 0
        for line in text.split("\n"):
            if line and not line.isspace():
                words, stops = self._cached_line(line) if keep else self._split_line(line)
                numbers.append(words)
                ends.append(stops)
                starts.append(at)
                sizes.append(len(words))
            at += len(line) + 1
        numbers.append(_LAST)
        ends.append(_START)
        starts.append(len(text))
        sizes.append(1)
        offsets = np.repeat(np.array(starts, dtype=np.int64), sizes)
        return Lexed(text, np.concatenate(numbers), np.concatenate(ends) + offsets)

    def _cached_line(self, line: str) -> _Line:
        known = self._lines.get(line)
        if known is None:
            if len(self._lines) >= _KEPT_LINES:
                self._lines.clear()
            known = self._lines[line] = self._split_line(line)
        return known

    def _split_line(self, line: str) -> _Line:
        """The words of a line after one for its start, and the end offset of each."""
        words = self.words
        found = [(words.setdefault(m[0], len(words)), m.end()) for m in _WORD.finditer(line)]
        found.insert(0, (_NEWLINE, len(line) - len(line.lstrip())))
        both = np.array(found, dtype=np.int64)
        return both[:, 0], both[:, 1]


@dataclass(frozen=True, slots=True)
class Lexed:
    """A text as word numbers, with the end offset of each word."""

    text: str
    numbers: Numbers
    ends: Numbers


@dataclass(frozen=True, slots=True)
class TextContext:
    """The words before a position, and the part of the next one that is written, with spaces before it."""

    words: tuple[str, ...]
    partial_word: str

    @classmethod
    def before(cls, text: str) -> TextContext:
        """The context at the end of `text`."""
        tail = text[-CONTEXT:]
        if len(text) > CONTEXT:
            tail = tail[tail.find(" ") + 1 :]  # drop a cut-off word at the start
        words: list[str] = []
        partial_word, last = "", True
        for line in reversed(tail.split("\n")):
            found = _WORD.findall(line)
            if last:
                open_word = bool(line) and (line[-1].isalnum() or line[-1] == "_")
                if found and open_word:
                    partial_word = found.pop()  # the word may continue
                spaced = line[: len(line) - len(partial_word)]
                partial_word = (spaced[len(spaced.rstrip()) :] if found else spaced.lstrip()) + partial_word
                last = False
            elif not found:
                continue
            words[:0] = ["\n", *found]
            if len(words) > LONGEST:
                break
        return cls(tuple(words[-LONGEST:]), partial_word)


@dataclass(frozen=True, slots=True)
class FollowingLines:
    """The lines that followed the longest matching context, with their counts. `length`: words of context."""

    length: int
    followed: Mapping[str, int]


@dataclass(slots=True)
class TextIndex:
    """An index of several texts. `spans` gives the position of each, so that one can be excluded."""

    lexicon: Lexicon
    text: str
    numbers: Numbers
    ends: Numbers
    spans: Mapping[str, tuple[int, int]]
    _order: Numbers = field(init=False)
    _pairs: Numbers = field(init=False)

    def __post_init__(self) -> None:
        pairs = (self.numbers[:-1] << np.int64(32)) + self.numbers[1:]
        self._order = np.argsort(pairs, kind="stable")
        self._pairs = pairs[self._order]

    @classmethod
    def build(cls, lexicon: Lexicon, texts: Sequence[tuple[str, Lexed]]) -> TextIndex:
        """An index of named texts that `lexicon` lexed; later texts are preferred where many match."""
        numbers: list[Numbers] = [np.array([_BREAK], dtype=np.int64)]
        ends: list[Numbers] = [np.array([0], dtype=np.int64)]
        spans: dict[str, tuple[int, int]] = {}
        characters, words = 0, 1
        for name, lexed in texts:
            numbers.append(lexed.numbers)
            ends.append(lexed.ends + characters)
            spans[name] = words, words + len(lexed.numbers)
            words += len(lexed.numbers)
            characters += len(lexed.text) + 1
        text = "\n".join(lexed.text for _, lexed in texts)
        return cls(lexicon, text, np.concatenate(numbers), np.concatenate(ends), spans)

    def find_continuations(
        self, context: TextContext, without: str | None = None, least: int = SHORTEST
    ) -> FollowingLines | None:
        """The continuations of `context`; None if it matches less than `least` words. `without`: the name of
        a text to exclude."""
        has_partial = any(map(str.isalnum, context.partial_word))
        least = max(SHORTEST, least - has_partial)
        if len(context.words) < least:
            return None
        known = self.lexicon.words
        first, second, early = (known.get(context.words[-back], _UNKNOWN) for back in (2, 1, least))
        places = self._find_places(first, second, early, least, without)
        if not len(places):
            return None
        words = [known.get(word, _UNKNOWN) for word in context.words]
        lengths = _count_matching(self.numbers, places, words)
        while len(places):
            length = int(lengths.max())
            if length < least:
                break
            if followed := self._count_following(places[lengths == length], context.partial_word):
                return FollowingLines(length + has_partial, followed)
            shorter = lengths < length
            places, lengths = places[shorter], lengths[shorter]
        return None

    def _find_places(self, first: int, second: int, early: int, least: int, without: str | None) -> Numbers:
        """The last positions that follow these two words, with the word `early` where `least` words back are.
        Not all of them match the words between."""
        pair = (first << 32) + second
        low, high = self._pairs.searchsorted((pair, pair + 1)).tolist()
        places = self._order[max(low, high - _PLACES) : high] + 2
        if low == high:
            return places
        if least > SHORTEST:
            places = places[self.numbers.take(places - least, mode="wrap") == early]
        if (span := self.spans.get(without or "")) is not None:
            start, end = span
            places = places[(places < start) | (places >= end)]
        if len(places) and places[-1] == len(self.numbers):  # they are in order
            places = places[:-1]
        inside: Numbers = places[self.numbers[places] != _BREAK]
        return inside

    def _count_following(self, places: Numbers, partial_word: str) -> dict[str, int]:
        found: Counter[str] = Counter()
        for end in self.ends[places[-_KEPT:] - 1].tolist():
            if partial_word and not self.text.startswith(partial_word, end):
                continue
            stop = self.text.find("\n", end)
            line = self.text[end + len(partial_word) : stop if stop >= 0 else len(self.text)]
            found[line.rstrip()[:_CONTINUED]] += 1
        return found


def _count_matching(numbers: Numbers, places: Numbers, words: Sequence[int]) -> Numbers:
    """The number of `words` that precede each of the positions, which follow the last two of them."""
    if len(places) <= _FEW:
        return _count_more(numbers, places, words[-SHORTEST - 1 :: -1], SHORTEST)
    lengths = _count_more(numbers, places, words[-SHORTEST - 1 : -_NEAR - 1 : -1], SHORTEST)
    if len(words) > _NEAR and len(far := np.flatnonzero(lengths == _NEAR)):
        lengths[far] = _count_more(numbers, places[far], words[-_NEAR - 1 :: -1], _NEAR)
    return lengths


def _count_more(numbers: Numbers, places: Numbers, words: Sequence[int], known: int) -> Numbers:
    """The same for positions where `known` words match; `words` are those before them, the last one first.
    Every text begins with a number that no word has, so that nothing matches beyond."""
    found = numbers.take(places[:, None] - _BACK[known : known + len(words) + 1], mode="wrap")
    lengths: Numbers = known + (found == np.array([*words, _NEVER])).argmin(axis=1)
    return lengths

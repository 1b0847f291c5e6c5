"""The confident beginning of a suggestion: the longest part whose joint probability is high enough.

The joint probability of the tokens only falls. The cut is the last position where it is still above the
threshold and which splits no word, string or bracket. Short fragments are not shown.
"""

from __future__ import annotations

import math

from keystroke.assist.completion.cache import CachedSuggestion
from keystroke.assist.completion.tuning import shift_threshold

# The least joint probability of a beginning, and of a whole line, by eagerness. At 1,478 random places of
# recent files in eight languages the shipped model shows 400 texts (balanced), 284 of them right, with 1,115
# wrong characters; with WHOLE at 0.2 the figures are 421, 278 and 1,845. Eager: 499, 293, 2,362; at 0.05:
# 548, 278, 4,203.
LEAST = {"calm": 0.7, "balanced": 0.5, "eager": 0.35}
WHOLE = {"calm": 0.5, "balanced": 0.4, "eager": 0.2}
_MIN_LETTERS = 3  # a shorter beginning saves nothing
_OPEN, _CLOSE = "([{", ")]}"
_DANGLING = "([{.,=+-*/%<>&|^~!?:;\\@ \t"


def confident_beginning(
    cached: CachedSuggestion, typed: int, eagerness: str, shift: float = 0.0
) -> tuple[str, float]:
    """The part of `cached.text` after `typed` that may be shown, and the geometric mean of its probabilities.

    Empty where nothing is confident enough, or where the engine gave no probabilities.
    """
    chance, least = 0.0, shift_threshold(LEAST[eagerness], shift)
    best = typed
    count = 0
    logprobs: list[float] = []
    for end, logprob in zip(cached.ends, cached.logprobs, strict=True):
        if end <= typed:
            continue
        chance += logprob
        if math.exp(chance) < least or "\n" in cached.text[typed:end]:
            break
        logprobs.append(logprob)
        if end < len(cached.text) and not _between_words(cached.text, end):
            continue
        if _is_balanced(cached.text[typed:end]) and (cut := len(cached.text[:end].rstrip(_DANGLING))) > best:
            best, count = cut, len(logprobs)
    text = cached.text[typed:best]
    if sum(char.isalnum() for char in text) < _MIN_LETTERS:
        return "", 0.0
    return text, math.exp(sum(logprobs[:count]) / count)


def confident_lines(cached: CachedSuggestion, typed: int, least: float) -> tuple[str, float]:
    """The first whole lines of a block whose mean probability is at least `least`, and that mean."""
    logprobs: list[float] = []
    best, mean = typed, 0.0
    line_ends = [at for at, char in enumerate(cached.text) if char == "\n" and cached.text[typed:at].strip()]
    pairs = [(e, p) for e, p in zip(cached.ends, cached.logprobs, strict=True) if e > typed]
    for stop in line_ends:
        while pairs and pairs[0][0] <= stop + 1:
            logprobs.append(pairs.pop(0)[1])
        now = math.exp(sum(logprobs) / len(logprobs)) if logprobs else 0.0
        if now < least:
            break
        best, mean = stop, now
    return cached.text[typed:best], mean


def is_unlikely(cached: CachedSuggestion, typed: int, eagerness: str, shift: float = 0.0) -> bool:
    """Whether a line is too unlikely as a whole, even if its tokens are confident on average."""
    logprobs = cached.logprobs_after(typed)
    return bool(logprobs) and math.exp(sum(logprobs)) < shift_threshold(WHOLE[eagerness], shift)


def _between_words(text: str, at: int) -> bool:
    return not all(char.isalnum() or char == "_" for char in text[at - 1 : at + 1])


def _is_balanced(text: str) -> bool:
    """Whether no string and no bracket is left open; a trailing bracket is cut off and does not count."""
    text = text.rstrip(_DANGLING)
    if any(text.count(quote) % 2 for quote in "\"'`"):
        return False
    depth = 0
    for char in text:
        depth += (char in _OPEN) - (char in _CLOSE)
    return depth <= 0

"""A cache of suggestions, keyed by the text they follow, so that typing through one costs a lookup.

An entry answers at the cursor it was computed for and at every later cursor that is reached by typing its
text. Deleting a character finds it again. The key is the text before the cursor and the line below it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

_MAX_ENTRIES = 256  # per buffer
_KEY_BEFORE = 320  # characters before the cursor that must match
_MAX_TYPED = 240  # characters of a suggestion that may have been typed already
_KEY_BELOW = 48


@dataclass(slots=True)
class CachedSuggestion:
    """`ends[i]` is where token i of `text` ends and `logprobs[i]` is its log probability.

    `complete`: the model had nothing to add after it. `breaks_syntax` is None until it is checked.
    `was_shown`: it was on the screen, so it must not disappear while the user types it.
    """

    text: str
    extent: str
    ends: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    complete: bool = True
    breaks_syntax: bool | None = None
    was_shown: bool = False
    visible_end: int = 0  # length of the beginning that is on the screen; 0: none

    def logprobs_after(self, start: int) -> list[float]:
        """The log probabilities of the tokens that end after `start`."""
        return [p for end, p in zip(self.ends, self.logprobs, strict=True) if end > start]


class SuggestionCache:
    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[str, str], CachedSuggestion] = OrderedDict()
        self._longest = 0

    def put(self, before: str, below: str, suggestion: CachedSuggestion) -> None:
        """Store `suggestion` for the end of `before`; `below` is the `text_below` of that cursor."""
        key = (before[-_KEY_BEFORE:], below)
        self._entries[key] = suggestion
        self._entries.move_to_end(key)
        self._longest = max(self._longest, min(len(suggestion.text), _MAX_TYPED))
        while len(self._entries) > _MAX_ENTRIES:
            self._entries.popitem(last=False)

    def find(self, text: str, cursor: int) -> tuple[CachedSuggestion, int] | None:
        """A suggestion that agrees with what was typed, and how many of its characters have been typed.

        One typed to its end is returned too if it is complete: nothing is to be added here.
        """
        below = text_below(text, cursor)
        near = text[max(0, cursor - _KEY_BEFORE - self._longest) : cursor]
        for typed in range(min(self._longest, len(near)) + 1):
            at = len(near) - typed
            entry = self._entries.get((near[max(0, at - _KEY_BEFORE) : at], below))
            if entry is None or not entry.text.startswith(near[at:]):
                continue
            if len(entry.text) > typed or entry.complete:
                return entry, typed
        return None


def text_below(text: str, cursor: int) -> str:
    """Identifies the text below the cursor's line. The rest of the line is left out: editors add closing
    brackets there."""
    end = text.find("\n", cursor)
    return text[end : end + _KEY_BELOW] if end >= 0 else ""

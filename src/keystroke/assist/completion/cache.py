"""Suggestions kept by the text they follow: typing through one costs a lookup.

An entry belongs to the text before its place and to the line below it. It answers there, and at every
place further on that one reaches by typing what it says. Going back (a deleted character) finds it again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

_KEPT = 256  # entries a buffer keeps
_TAIL = 320  # characters before the place that must agree
_REACH = 240  # characters of a suggestion that may have been typed already
_BELOW = 48


@dataclass(slots=True)
class Kept:
    """`ends[i]` is where token i of `text` ends, `logprobs[i]` how sure it was. `whole`: the model had
    nothing to add after it. `broken`: whether it would break the syntax, once somebody looked. `shown`: it
    was on the screen, and typing what it says must not make it go away."""

    text: str
    extent: str
    ends: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    whole: bool = True
    broken: bool | None = None
    shown: bool = False
    begun: int = 0  # where the beginning of it ends that is on the screen; 0: none is

    def sureness(self, start: int) -> list[float]:
        """The logprobs of the tokens that end after `start`."""
        return [p for end, p in zip(self.ends, self.logprobs, strict=True) if end > start]


class TypeThrough:
    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[str, str], Kept] = OrderedDict()
        self._longest = 0

    def put(self, before: str, after: str, kept: Kept) -> None:
        key = (before[-_TAIL:], below(after))
        self._entries[key] = kept
        self._entries.move_to_end(key)
        self._longest = max(self._longest, min(len(kept.text), _REACH))
        while len(self._entries) > _KEPT:
            self._entries.popitem(last=False)

    def find(self, before: str, after: str) -> tuple[Kept, int] | None:
        """An entry that what was typed agrees with, and how many of its characters have been typed. One typed
        to its end answers too, if it is whole: nothing is to be added here."""
        under = below(after)
        near = before[-(_TAIL + self._longest) :]
        for typed in range(min(self._longest, len(near)) + 1):
            at = len(near) - typed
            kept = self._entries.get((near[max(0, at - _TAIL) : at], under))
            if kept is None or not kept.text.startswith(near[at:]):
                continue
            if len(kept.text) > typed or kept.whole:
                return kept, typed
        return None

    def clear(self) -> None:
        self._entries.clear()
        self._longest = 0


def below(after: str) -> str:
    """What identifies the text below: not the rest of the line, which editors fill with brackets."""
    end = after.find("\n")
    return after[end : end + _BELOW] if end >= 0 else ""

"""One question to a model about an edit, and how to tell that its streamed answer has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keystroke.assist.edit.blocks import Message
from keystroke.assist.edit.rewrite import FenceDetector
from keystroke.text.repetition import LoopDetector

_ROOM = 6_000  # characters an answer may have beyond three times the text it rewrites


@dataclass(frozen=True, slots=True)
class RewriteQuestion:
    """`prediction`: text that the answer mostly repeats; `inside`: the text it rewrites, None where it is no
    rewrite; `most`: the longest useful answer in characters."""

    messages: Sequence[Message]
    prediction: str = ""
    inside: str | None = None
    most: int | None = None

    def end_detector(self) -> Callable[[str], bool]:
        """A function that takes each streamed piece and returns True once nothing useful can follow."""
        if self.inside is None:
            return _Length(self.most).ended
        fence, length = FenceDetector(self.inside), _Length(3 * len(self.inside) + _ROOM)
        if _repeats(self.inside):  # a correct answer repeats, too
            return lambda piece: fence.feed(piece) | length.ended(piece)
        loop = LoopDetector()
        return lambda piece: fence.feed(piece) | length.ended(piece) | loop.feed(piece)


def _repeats(text: str) -> bool:
    """Whether the text itself repeats, as the loop detector sees it."""
    watch = LoopDetector()
    return any(watch.feed(text[at : at + 80]) for at in range(0, len(text), 80))


class _Length:
    def __init__(self, most: int | None) -> None:
        self._left = most

    def ended(self, piece: str) -> bool:
        if self._left is None:
            return False
        self._left -= len(piece)
        return self._left < 0

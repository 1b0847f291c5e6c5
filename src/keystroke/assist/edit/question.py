"""One thing to ask a model for an edit, and how to know that its answer has come to its end.

Values and watchers of a stream; no model, no format beyond the fence that ends a block of code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keystroke.assist.edit.blocks import Message
from keystroke.assist.edit.rewrite import FenceWatch
from keystroke.text.repetition import LoopWatch

_ROOM = 6_000  # characters an answer may have beyond three times the text it rewrites


@dataclass(frozen=True, slots=True)
class Question:
    """`prediction` is text that the answer will mostly repeat; `inside` the text that it rewrites, None where
    the answer is no rewrite; `most` the characters of an answer that is short by nature."""

    messages: Sequence[Message]
    prediction: str = ""
    inside: str | None = None
    most: int | None = None

    def watch(self) -> Callable[[str], bool]:
        """Called with each piece of a streamed answer: True once nothing of use can follow."""
        if self.inside is None:
            return _Length(self.most).ended
        fence, length = FenceWatch(self.inside), _Length(3 * len(self.inside) + _ROOM)
        if _repeats(self.inside):  # then so does an answer that is right
            return lambda piece: fence.ended(piece) | length.ended(piece)
        loop = LoopWatch()
        return lambda piece: fence.ended(piece) | length.ended(piece) | loop.looping(piece)


def _repeats(text: str) -> bool:
    """Whether a text goes round in circles anywhere, as a stream of it would be seen to."""
    watch = LoopWatch()
    return any(watch.looping(text[at : at + 80]) for at in range(0, len(text), 80))


class _Length:
    def __init__(self, most: int | None) -> None:
        self._left = most

    def ended(self, piece: str) -> bool:
        if self._left is None:
            return False
        self._left -= len(piece)
        return self._left < 0

"""Tokens to text while they arrive.

What was given out is never taken back. A character whose bytes are spread over tokens is held until
whole; bytes that can no longer become a character come out as U+FFFD, exactly as in a decode of everything.
Control tokens are no text, but for the marks that say what the text after them is: a call, a thought.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from keystroke.engine.tokenizer.base import Tokenizer

MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "<|python_tag|>")


class StreamDecoder:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._marks = {token: mark for mark in MARKS if (token := tokenizer.special(mark)) is not None}
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, tokens: Iterable[int]) -> str:
        """The text that `tokens` complete."""
        if not self._marks:
            return self._utf8.decode(self._tokenizer.text_bytes(tokens))
        return "".join(
            [self._utf8.decode(self._tokenizer.text_bytes((t,))) + self._marks.get(t, "") for t in tokens]
        )

    def flush(self) -> str:
        """What an unfinished character at the end comes to; the decoder is fresh afterwards."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest

"""Decodes tokens to text while they arrive.

A character whose bytes span several tokens is held back until it is complete; invalid bytes become U+FFFD, as
when everything is decoded at once. Control tokens give no text, except the markers of tool calls and
reasoning.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from keystroke.engine.tokenizer.base import Tokenizer

MARKS = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
# The structure of answers in channels. Tokenizers without the first end an answer with some of the others.
CHANNEL_MARKS = (
    *("<|channel|>", "<|start|>", "<|message|>", "<|constrain|>"),
    *("<|end|>", "<|call|>", "<|return|>"),
)


class StreamDecoder:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        marks = MARKS if tokenizer.special(CHANNEL_MARKS[0]) is None else (*MARKS, *CHANNEL_MARKS)
        self._marks = {token: mark for mark in marks if (token := tokenizer.special(mark)) is not None}
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, tokens: Iterable[int]) -> str:
        """The text that `tokens` complete."""
        if not self._marks:
            return self._utf8.decode(self._tokenizer.text_bytes(tokens))
        return "".join(
            [self._utf8.decode(self._tokenizer.text_bytes((t,))) + self._marks.get(t, "") for t in tokens]
        )

    def flush(self) -> str:
        """The text of an unfinished character; resets the decoder."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest

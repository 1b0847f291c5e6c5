"""A tokenizer with one token per byte, followed by special tokens; used with the echo engine."""

from __future__ import annotations

import re
from collections.abc import Mapping

from keystroke.engine.tokenizer.base import Tokenizer, check_text
from keystroke.errors import UsageError


class ByteTokenizer(Tokenizer):
    def __init__(
        self,
        special: Mapping[str, int],
        *,
        bos: int | None = None,
        eos: int | None = None,
        vocab_size: int = 0,
    ) -> None:
        self._special = dict(special)
        self._names = {token: name.encode() for name, token in special.items()}
        self.special_pattern = special_pattern(self._special)
        self.vocab_size = (
            max(vocab_size, 256, *(token + 1 for token in self._names)) if special else max(vocab_size, 256)
        )
        self.bos, self.eos = bos, eos

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        check_text(text)
        if not special or self.special_pattern is None:
            return list(text.encode())
        tokens: list[int] = []
        for part in self.special_pattern.split(text):
            tokens.extend((self._special[part],) if part in self._special else part.encode())
        return tokens

    def token_bytes(self, token: int) -> bytes:
        if 0 <= token < 256:
            return bytes((token,))
        if token in self._names:
            return self._names[token]
        if 0 <= token < self.vocab_size:
            return b""
        raise UsageError(f"token {token} is outside the vocabulary of {self.vocab_size}")

    def special(self, text: str) -> int | None:
        return self._special.get(text)

    def is_special(self, token: int) -> bool:
        return token in self._names

    def cuts(self, text: str, start: int, end: int) -> range:
        return range(max(start, 1), end)


def special_pattern(special: Mapping[str, int]) -> re.Pattern[str] | None:
    """A pattern that splits text around special tokens, preferring the longest."""
    if not special:
        return None
    return re.compile("(" + "|".join(re.escape(s) for s in sorted(special, key=lambda s: (-len(s), s))) + ")")

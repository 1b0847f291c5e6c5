"""The tokenizer interface: text to tokens and back, byte for byte.

Every token stands for exact bytes; text is the UTF-8 decoding of their concatenation. The text of a special
token is encoded as plain text unless the caller asks otherwise, so that input cannot inject control tokens.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from keystroke.errors import InputError


class Tokenizer(ABC):
    vocab_size: int
    bos: int | None = None  # first token of every sequence, if the model was trained with one
    eos: int | None = None
    starts_with_space: bool = False  # text at the start of a sequence needs a leading space
    special_pattern: re.Pattern[str] | None = None  # one group: splits text around special tokens

    @abstractmethod
    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """The tokens of `text`. With `special`, text of special tokens becomes their ids.
        Raises InputError for text that has no UTF-8 form (a lone surrogate)."""

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; a special token's are those of its name."""

    @abstractmethod
    def special(self, text: str) -> int | None:
        """The id of the special token written `text`, if there is one."""

    @abstractmethod
    def is_special(self, token: int) -> bool: ...

    def text_bytes(self, tokens: Iterable[int]) -> bytes:
        """The bytes of `tokens` without special tokens and ids beyond the vocabulary, which a model with a
        padded embedding can choose."""
        plain = [t for t in tokens if t < self.vocab_size and not self.is_special(t)]
        return b"".join([self.token_bytes(t) for t in plain])

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`: special tokens left out, invalid UTF-8 as U+FFFD."""
        return self.text_bytes(tokens).decode("utf-8", "replace")

    def cuts(self, text: str, start: int, end: int) -> Sequence[int]:
        """Offsets in [start, end) at which `text` can be split and its parts encoded separately with the same
        result; this only depends on the two characters around the offset. Empty if none are known."""
        return ()


def check_text(text: str) -> None:
    """Raise InputError for text that cannot be encoded as UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text holds half of a surrogate pair at character {error.start}; send well-formed Unicode"
        ) from None

"""Adapts a tokenizer for the grammar compiler: the bytes of every token, and an encoder.

Built once per tokenizer and set of end tokens, and kept as long as the tokenizer. Building takes about a
second for 150,000 tokens, so do not call it on the event loop.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary, ref

from llguidance import LLTokenizer

from keystroke.engine.base import Mask
from keystroke.engine.tokenizer import Tokenizer
from keystroke.errors import UnsupportedModel

_MARK = b"\xff"  # before a control token's name; no text contains this byte


class MaskCache:
    """A least-recently-used cache of masks."""

    def __init__(self, most: int = 256) -> None:  # 5 MB with 150,000 tokens
        self._most = most
        self._masks: OrderedDict[Hashable, Mask] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: Hashable) -> Mask | None:
        with self._lock:
            found = self._masks.get(key)
            if found is not None:
                self._masks.move_to_end(key)
            return found

    def store(self, key: Hashable, mask: Mask) -> None:
        with self._lock:
            self._masks[key] = mask.copy()
            while len(self._masks) > self._most:
                self._masks.popitem(last=False)


class Vocabulary:
    def __init__(self, tokenizer: Tokenizer, ends: frozenset[int]) -> None:
        self.ends = tuple(sorted(end for end in ends if end < tokenizer.vocab_size))
        if not self.ends:
            raise UnsupportedModel(
                "this model names no token that ends an answer, so it cannot be constrained by a grammar; "
                "use one with an end-of-text token"
            )
        self.size = tokenizer.vocab_size
        self.words = (self.size + 31) // 32  # of a mask
        wrapped: Any = _Wrapped(tokenizer, self.ends[0])  # the library uses its attributes
        self.library = LLTokenizer(wrapped, eos_token=list(self.ends))
        self.bytes: list[bytes] = wrapped.tokens
        self.masks = MaskCache()


class _Wrapped:
    """The tokenizer interface of llguidance."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, end: int) -> None:
        self.eos_token_id = end
        self.bos_token_id = tokenizer.bos
        self.special_token_ids = [t for t in range(tokenizer.vocab_size) if tokenizer.is_special(t)]
        special = frozenset(self.special_token_ids)
        self.tokens = [
            (_MARK if t in special else b"") + tokenizer.token_bytes(t) for t in range(tokenizer.vocab_size)
        ]
        self._tokenizer = ref(tokenizer)  # a strong reference would keep it alive for ever

    def __call__(self, text: str) -> list[int]:
        tokenizer = self._tokenizer()
        assert tokenizer is not None  # the caller holds it
        return tokenizer.encode(text)


_known: WeakKeyDictionary[Tokenizer, dict[frozenset[int], Vocabulary]] = WeakKeyDictionary()
_lock = threading.Lock()


def vocabulary_for(tokenizer: Tokenizer, ends: frozenset[int]) -> Vocabulary:
    """The vocabulary of `tokenizer` for answers that end with one of `ends`. Raises UnsupportedModel if there
    is no end token."""
    with _lock:
        kept = _known.setdefault(tokenizer, {})
        found = kept.get(ends)
        if found is None:
            found = kept[ends] = Vocabulary(tokenizer, ends)
        return found

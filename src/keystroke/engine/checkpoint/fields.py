"""Typed, bounds-checked access to foreign data: a config.json or a GGUF file's metadata.

A value of another type or outside its bounds raises ModelDamaged with the key, before anything is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from keystroke.errors import ModelDamaged


class Fields:
    def __init__(self, values: Mapping[str, object], origin: str) -> None:
        self._values = values
        self.origin = origin  # the file, for error messages

    def __contains__(self, key: str) -> bool:
        """Whether the key has a value other than null."""
        return self._values.get(key) is not None

    def has(self, key: str) -> bool:
        """Whether the key exists, possibly with null."""
        return key in self._values

    def get(self, key: str) -> object:
        return self._values.get(key)

    def integer(self, key: str, limit: int, default: int | None = None) -> int:
        """A whole number from 1 to `limit`."""
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
            raise self.error(key, f"a whole number from 1 to {limit}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(key, "a number above 0")
        if not 0 < value < 1e30 or not math.isfinite(value):
            raise self.error(key, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or not value.isprintable():  # it may be printed to a terminal
            raise self.error(key, "a text")
        return value

    def tokens(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Token ids: none, one, or a list. Ids outside the vocabulary are omitted."""
        value = self._values.get(key)
        values: Iterable[object] = value if isinstance(value, list) else [value]
        found: list[int] = []
        for each in values:
            if each is None:
                continue
            if isinstance(each, bool) or not isinstance(each, int):
                raise self.error(key, "a token id or a list of them")
            if 0 <= each < vocab_size:
                found.append(each)
        return tuple(found)

    def table(self, key: str) -> Fields:
        """A nested mapping; empty when absent."""
        value = self._values.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.error(key, "a table")
        return Fields(value, self.origin)

    def merge(self, values: Mapping[str, object]) -> Fields:
        """These fields and `values`, which take precedence."""
        return Fields({**self._values, **values}, self.origin)

    def error(self, key: str, expected: str) -> ModelDamaged:
        value = self._values.get(key)
        if value is None:
            return ModelDamaged(f"{self.origin} has no {key}; download the model again")
        shown = repr(value)
        shown = shown if len(shown) <= 40 else shown[:37] + "..."
        return ModelDamaged(
            f"{self.origin} says {key} is {shown}, which is not {expected}; download the model again"
        )

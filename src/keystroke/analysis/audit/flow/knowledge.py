"""What each language's libraries do to data: sources, sanitisers, validators, formatters, copies.

This is data read from `knowledge/LANGUAGE.toml`, validated here, asked by path globs ("*" spans dots).
It knows names of libraries, never a rule.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

from keystroke.errors import ConfigError


class Globs:
    """A set of dotted globs asked as one, remembering its answers."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns = tuple(patterns)
        self._regex = re.compile("|".join(map(_regex, self.patterns)) or "(?!)", re.DOTALL)
        self.match = lru_cache(maxsize=8192)(self._match)

    def _match(self, path: str) -> bool:
        return self._regex.fullmatch(path) is not None


def _regex(pattern: str) -> str:
    # "get*()" means one call of that name, not a chain of calls.
    return re.escape(pattern).replace(r"\*\(\)", r"[^()]*\(\)").replace(r"\*", ".*")


@dataclass(frozen=True)
class Knowledge:
    sources: Globs
    numeric: Globs
    transparent: Globs
    constants: Globs
    sanitizers: tuple[tuple[frozenset[str], Globs], ...]
    validators: tuple[tuple[frozenset[str], Globs], ...]
    formatters: dict[str, int]
    joiners: Globs
    handler_decorators: Globs
    handler_types: Globs
    handler_marks: frozenset[str]
    fills: dict[str, tuple[int, ...]]
    copies: dict[str, tuple[int, int]]
    exits: Globs
    numeric_types: frozenset[str]
    origins: Globs  # not foreign, but worth remembering where a value came from: errors, guessable numbers
    _clean: dict[str, frozenset[str]] = field(default_factory=dict, compare=False)

    def cleans(self, path: str) -> frozenset[str]:
        """The uses for which the result of calling `path` is safe."""
        found = self._clean.get(path)
        if found is None:
            found = frozenset(use for uses, globs in self.sanitizers if globs.match(path) for use in uses)
            self._clean[path] = found
        return found

    def validates(self, path: str) -> frozenset[str]:
        return frozenset(use for uses, globs in self.validators if globs.match(path) for use in uses)


_KEYS = {
    "sources": list,
    "numeric": list,
    "transparent": list,
    "constants": list,
    "joiners": list,
    "exits": list,
    "numeric_types": list,
    "handler_decorators": list,
    "handler_types": list,
    "handler_marks": list,
    "sanitizers": dict,
    "validators": dict,
    "formatters": dict,
    "fills": dict,
    "copies": dict,
    "origins": list,
}


@cache
def load_knowledge(language: str) -> Knowledge:
    name = "javascript" if language in ("typescript", "tsx") else "c" if language == "cpp" else language
    source = files(__package__).joinpath("knowledge", f"{name}.toml")
    try:
        data: dict[str, Any] = tomllib.loads(source.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"the audit knowledge for {language} cannot be read: {error}; reinstall the package"
        ) from error
    for key, value in data.items():
        if key not in _KEYS or not isinstance(value, _KEYS[key]):
            raise ConfigError(f"the audit knowledge for {language} has an unknown or malformed key {key!r}")

    def globs(key: str) -> Globs:
        return Globs(data.get(key, []))

    def by_use(key: str) -> tuple[tuple[frozenset[str], Globs], ...]:
        return tuple((frozenset(uses.split(",")), Globs(names)) for uses, names in data.get(key, {}).items())

    return Knowledge(
        globs("sources"),
        globs("numeric"),
        globs("transparent"),
        globs("constants"),
        by_use("sanitizers"),
        by_use("validators"),
        data.get("formatters", {}),
        globs("joiners"),
        globs("handler_decorators"),
        globs("handler_types"),
        frozenset(data.get("handler_marks", [])),
        {name: tuple(places) for name, places in data.get("fills", {}).items()},
        {name: (places[0], places[1]) for name, places in data.get("copies", {}).items()},
        globs("exits"),
        frozenset(data.get("numeric_types", [])),
        globs("origins"),
    )

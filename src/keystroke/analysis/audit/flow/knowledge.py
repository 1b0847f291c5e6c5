"""What the libraries of each language do to data: sources, sanitisers, validators, formatters, copies.

Read from `knowledge/LANGUAGE.toml` and `knowledge/common.toml`. Names are dotted paths in which "*" spans
dots; "()" marks the result of a call.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any, Literal, TypeVar

import msgspec

from keystroke.errors import ConfigError

FAMILIES = {"cpp": "c", "typescript": "javascript", "tsx": "javascript"}
T = TypeVar("T")


def family_of(language: str) -> str:
    """The language whose grammar and libraries a language shares."""
    return FAMILIES.get(language, language)


class Globs:
    """A set of dotted globs compiled into one pattern; results are cached."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns = tuple(patterns)
        self._regex = re.compile("|".join(map(_regex, self.patterns)) or "(?!)", re.DOTALL)
        self.match = lru_cache(maxsize=8192)(self._match)

    def _match(self, path: str) -> bool:
        return self._regex.fullmatch(path) is not None


class UseGlobs:
    """Globs grouped by the uses ("html", "sql", ...) for which a value is safe after such a call."""

    def __init__(self, table: dict[str, list[str]]) -> None:
        self._groups = [(frozenset(uses.split(",")), Globs(names)) for uses, names in table.items()]
        self.uses = lru_cache(maxsize=8192)(self._uses)

    def _uses(self, path: str) -> frozenset[str]:
        return frozenset(use for uses, globs in self._groups if globs.match(path) for use in uses)


def _regex(pattern: str) -> str:
    # "get*()" means one call of that name, not a chain of calls.
    return re.escape(pattern).replace(r"\*\(\)", r"[^()]*\(\)").replace(r"\*", ".*")


_NONE = Globs(())


class Knowledge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One language's libraries. `knowledge/common.toml` describes the keys that all languages share."""

    sources: Globs = _NONE
    numeric: Globs = _NONE
    transparent: Globs = _NONE
    constants: Globs = _NONE
    origins: Globs = _NONE  # not foreign, but the origin is reported: errors, guessable numbers
    sanitizers: UseGlobs = UseGlobs({})
    validators: UseGlobs = UseGlobs({})
    contents: Globs = _NONE  # what a file holds, whoever names it
    parsers: Globs = _NONE  # parse a text; what they make of foreign text is foreign
    formatters: dict[str, int] = {}
    joiners: Globs = _NONE
    exits: Globs = _NONE
    numeric_types: frozenset[str] = frozenset()
    handler_decorators: Globs = _NONE
    handler_types: Globs = _NONE
    handler_marks: frozenset[str] = frozenset()
    fills: dict[str, tuple[int, ...]] = {}
    copies: dict[str, tuple[int, int]] = {}
    text_setters: Globs = _NONE  # set the text of an element and return it
    text_properties: frozenset[str] = frozenset()  # hold text that is escaped when read as HTML
    plain_operators: frozenset[str] = frozenset()  # query operators that compare their operand as a value
    call_wrappers: frozenset[str] = frozenset()  # return a function that does the same as their argument
    mutators: frozenset[str] = frozenset()
    keyed_setters: frozenset[str] = frozenset()
    list_adders: frozenset[str] = frozenset()
    removers: frozenset[str] = frozenset()
    text_appenders: frozenset[str] = frozenset()
    item_getters: frozenset[str] = frozenset()
    section_types: Globs = _NONE
    mapping_types: Globs = _NONE
    list_types: Globs = _NONE
    text_builders: frozenset[str] = frozenset()
    item_callbacks: Globs = _NONE
    path_normalizers: Globs = _NONE
    normalizing_joiners: Globs = _NONE
    relative_paths: Globs = _NONE
    membership_tests: Globs = _NONE
    negative_tests: Globs = _NONE
    own_property_tests: Globs = _NONE


def load_table(name: str, kind: type[T], *more: str) -> T:
    """One of the files in `knowledge/`, with the keys of the files in `more`. Raises ConfigError."""
    data: dict[str, Any] = {}
    try:
        for stem in (*more, name):
            source = files(__package__).joinpath("knowledge", f"{stem}.toml")
            data |= tomllib.loads(source.read_text(encoding="utf-8"))
        return msgspec.convert(data, kind, dec_hook=_decode)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"knowledge/{name}.toml cannot be read: {error}; reinstall the package") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"knowledge/{name}.toml: {error}") from error


def _decode(kind: type, value: Any) -> Any:
    try:
        if kind is UseGlobs:
            return UseGlobs(msgspec.convert(value, dict[str, list[str]]))
        return Globs(msgspec.convert(value, list[str]))
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error  # so that msgspec adds the key


@cache
def load_knowledge(language: str) -> Knowledge:
    return load_table(family_of(language), Knowledge, "common")


class XmlFactory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A Java class that parses XML; `knowledge/java_xml.toml` describes the keys."""

    methods: frozenset[str]
    foreign: Literal["local", "remote", ""] = ""
    settings: tuple[str, ...] = ()


XML_FACTORIES = load_table("java_xml", dict[str, XmlFactory])

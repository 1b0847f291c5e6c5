"""Constraints on an answer: JSON Schema, Lark, GBNF, regular expressions or a choice of words.

A constraint is an immutable, comparable value; only its size is checked here, and `compiler` compiles it.
JSON is generated with one space after a comma or colon and no other white space, as in training data, so that
keys and punctuation are forced and need no sampling.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from keystroke.errors import GrammarError

LARGEST_SCHEMA = 256 << 10  # characters; far more than the tools of public APIs need
LARGEST_GRAMMAR = 64 << 10  # a Lark text or a regular expression takes longer to compile
_MOST_PROPERTIES = 1000  # per object; compile time grows with the square
_DEEPEST = 100  # nesting levels; the compiler's parser stops at 128
_DATA = frozenset(("const", "enum", "default", "examples"))  # keywords whose values are not schemas
_NO_LEAP = r":[0-5][0-9](\.[0-9]+)?([zZ]|[+-][0-9:]+)$"
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class FreeText:
    """Describes a language whose texts are free until something begins, such as a tool call: the allowed next
    tokens then depend on the end of the text alone, and masks can be cached by it.

    `opening` matches a whole text that may still be the start of something else, `pending` the end of a text
    that may start something; both are patterns over bytes that may match more than necessary. Languages of
    the same `kind` share masks, except where the text contains `begun`."""

    kind: tuple[str, ...]
    opening: str
    pending: str
    begun: bytes

    def state_key(self, text: bytes) -> bytes | None:
        """A key for the end of the free text `text` (all of it, or its last hundreds of tokens); None if it
        is not known. Two texts with the same key allow the same next tokens."""
        if _compile_pattern(self.opening).fullmatch(text):
            found = b"^" + text
        elif _compile_pattern(_BLANKS).search(text):
            return None  # the pending text may have begun earlier
        else:
            match = _compile_pattern(self.pending).search(text)
            found = b"" if match is None else match[0]
        return found if len(found) <= _LONGEST_PLACE else None


_BLANKS = r"[ \t\r\n]{32}"
_LONGEST_PLACE = 200  # bytes


@cache
def _compile_pattern(pattern: str) -> re.Pattern[bytes]:
    return re.compile(pattern.encode(), re.DOTALL)


@dataclass(frozen=True, slots=True)
class Constraint:
    """The language of an answer. `parts` are the compiler's grammars as JSON, the first being the whole.
    `origin` is the caller's name for it ("text.format.schema"), for errors. `free` describes its free text,
    if it has any."""

    parts: tuple[str, ...]
    origin: str = field(default="grammar", compare=False)
    free: FreeText | None = field(default=None, compare=False)

    @property
    def grammar(self) -> str:
        """All parts, in the compiler's format."""
        return f'{{"grammars":[{",".join(self.parts)}]}}'

    @property
    def size(self) -> int:
        return sum(map(len, self.parts))


def json_schema(
    schema: Mapping[str, Any] | bool, *, strict: bool = True, origin: str = "json_schema"
) -> Constraint:
    """JSON that matches a schema. Unless `strict`, keywords that cannot be enforced are ignored instead of
    refused. Raises GrammarError for a schema that is invalid, too large or too deep."""
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        what = "false, which nothing can meet" if schema is False else f"a {type(schema).__name__}"
        raise GrammarError.of(origin, f"is {what}; send a JSON Schema object.")
    _check_shape(schema, origin)
    styled = {**_forbid_leap_seconds(schema), "x-guidance": {**_STYLE, "lenient": not strict}}
    return _make_constraint("json_schema", styled, origin, LARGEST_SCHEMA)


def any_json(*, origin: str = "json_object") -> Constraint:
    """Any JSON object."""
    return json_schema({"type": "object"}, origin=origin)


def lark(text: str, *, origin: str = "grammar") -> Constraint:
    """The language of a Lark grammar with the start rule `start`."""
    return _make_constraint("lark_grammar", text, origin, LARGEST_GRAMMAR)


def regex(pattern: str, *, origin: str = "regex") -> Constraint:
    """The full matches of a regular expression without look-around and back-references."""
    return lark(regex_as_lark(pattern, origin=origin), origin=origin)


def regex_as_lark(pattern: str, *, origin: str = "regex") -> str:
    """The Lark grammar of a regular expression."""
    from llguidance import regex_to_lark  # imported here, as below: slow to import and rarely needed

    _check_size(pattern, origin, LARGEST_GRAMMAR)
    return f"start: /{regex_to_lark(pattern, 'd')}/" if pattern else 'start: ""'


def gbnf(text: str, *, origin: str = "grammar") -> Constraint:
    """The language of a llama.cpp GBNF grammar; a Lark grammar is accepted as well."""
    from llguidance.gbnf_to_lark import any_to_lark

    _check_size(text, origin, LARGEST_GRAMMAR)
    try:
        return lark(any_to_lark(text), origin=origin)
    except GrammarError:
        raise
    except Exception as error:  # the converter raises any error of its parser
        raise GrammarError.of(origin, f"is not a GBNF grammar: {_first_line(error)}.") from error


def choice(words: Sequence[str], *, origin: str = "choice") -> Constraint:
    """Exactly one of `words`."""
    if not words or not all(isinstance(word, str) and word for word in words):
        raise GrammarError.of(origin, "must list one or more texts that are not empty.")
    return lark("start: " + " | ".join(map(json.dumps, words)), origin=origin)


def with_prefix(text: str, constraint: Constraint) -> Constraint:
    """`text` followed by `constraint`, for an answer whose beginning is given."""
    if not text:
        return constraint
    whole = json.dumps({"name": "beginning", "lark_grammar": f"start: {json.dumps(text)} @answer"})
    return Constraint((whole, *constraint.parts), constraint.origin)


def _forbid_leap_seconds(schema: Any) -> Any:
    """The schema without leap seconds, which the compiler allows at any time and most validators reject."""
    if isinstance(schema, list):
        return [_forbid_leap_seconds(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    tight = {key: value if key in _DATA else _forbid_leap_seconds(value) for key, value in schema.items()}
    if tight.get("format") in ("date-time", "time") and "pattern" not in tight and "properties" not in tight:
        tight["pattern"] = _NO_LEAP
    return tight


def _make_constraint(kind: str, value: Any, origin: str, largest: int) -> Constraint:
    if kind == "lark_grammar":
        _check_size(value, origin, largest)
    try:
        part = json.dumps({"name": "answer", kind: value}, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise GrammarError.of(origin, f"is not JSON: {_first_line(error)}.") from error
    _check_size(part, origin, 2 * largest)  # escapes make a text longer
    return Constraint((part,), origin)


def _check_size(text: str, origin: str, largest: int) -> None:
    if not isinstance(text, str):
        raise GrammarError.of(origin, "must be a text.")
    if len(text) > largest:
        raise GrammarError.of(
            origin, f"has {len(text):,} characters and at most {largest:,} are taken; make it smaller."
        )


def _check_shape(schema: Mapping[str, Any], origin: str) -> None:
    """Checks nesting and sizes iteratively, so that deep nesting cannot overflow the stack."""
    level: list[tuple[Any, str]] = [(schema, "")]
    for _ in range(_DEEPEST):
        below: list[tuple[Any, str]] = []
        for value, path in level:
            pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
            below += [(inner, f"{path}/{key}") for key, inner in pairs if isinstance(inner, (Mapping, list))]
        for inner, path in below:
            if path.endswith("/properties") and len(inner) > _MOST_PROPERTIES:
                raise GrammarError.of(
                    origin,
                    f"has {len(inner):,} properties at {path[:200]} and one object may have "
                    f"{_MOST_PROPERTIES:,}; make it smaller.",
                )
        if not below:
            return
        level = below
    raise GrammarError.of(
        origin, f"is nested more than {_DEEPEST} levels deep, at {level[0][1][:200]}; use $defs and $ref."
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__

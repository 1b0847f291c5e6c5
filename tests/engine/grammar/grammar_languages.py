"""Random grammars whose languages are known by other means than the compiler's."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import jsonschema_rs
from hypothesis import strategies as st

from keystroke.engine.grammar.constraint import Constraint, json_schema, lark, regex

_ALPHABET = 'ab (=\n"é'


@dataclass(frozen=True)
class Language:
    """A constraint, and an independent judge of whole texts."""

    constraint: Constraint
    source: str
    judge: Any

    def has(self, text: str) -> bool:
        return bool(self.judge(text))

    def __repr__(self) -> str:
        return self.source


# Regular expressions, judged by Python's own

_literals = st.text(_ALPHABET, min_size=1, max_size=4).map(re.escape)
_classes = st.sampled_from(["[a-c]", "[0-9]", "[^a\\n]", ".", "[ab=]", "[é-ü]"])
_patterns: st.SearchStrategy[str] = st.recursive(
    _literals | _classes,
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(["?", "*", "+", "{2}", "{1,3}"])).map(lambda p: f"(?:{p[0]}){p[1]}"),
    ),
    max_leaves=8,
)


def _regular(pattern: str) -> Language:
    return Language(regex(pattern), f"/{pattern}/", lambda text: re.fullmatch(pattern, text))


regular_languages = _patterns.map(_regular)


# Context-free grammars, judged by walking them

Node = tuple[Any, ...]


def _nodes() -> st.SearchStrategy[Node]:
    leaves = st.one_of(
        st.text("abc({", min_size=1, max_size=5).map(lambda t: ("literal", t)),
        st.sampled_from(["nest", "name"]).map(lambda n: ("rule", n)),
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, min_size=2, max_size=3).map(lambda p: ("all", tuple(p))),
            st.lists(inner, min_size=2, max_size=3).map(lambda p: ("any", tuple(p))),
            inner.map(lambda p: ("maybe", p)),
            inner.map(lambda p: ("many", p)),
        ),
        max_leaves=7,
    )


_RULES: dict[str, Node] = {
    "nest": ("any", (("literal", "()"), ("all", (("literal", "("), ("rule", "nest"), ("literal", ")"))))),
    "name": ("any", (("literal", "value"), ("literal", "values"), ("literal", "v"))),
}


def _written(node: Node) -> str:
    kind, body = node
    if kind == "literal":
        return json.dumps(body)
    if kind == "rule":
        return str(body)
    if kind == "all":
        return "(" + " ".join(map(_written, body)) + ")"
    if kind == "any":
        return "(" + " | ".join(map(_written, body)) + ")"
    return f"({_written(body)}){'?' if kind == 'maybe' else '*'}"


def _ends(node: Node, text: str, at: int) -> set[int]:
    """Where a match that begins at `at` may end."""
    kind, body = node
    if kind == "literal":
        return {at + len(body)} if text.startswith(body, at) else set()
    if kind == "rule":
        return _ends(_RULES[body], text, at) if at < len(text) else set()
    if kind == "any":
        return set().union(*(_ends(n, text, at) for n in body))
    if kind == "maybe":
        return {at} | _ends(body, text, at)
    places, fresh = {at}, {at}
    if kind == "all":
        for n in body:
            places = set().union(*(_ends(n, text, p) for p in places))
        return places
    while fresh:
        fresh = set().union(*(_ends(body, text, p) for p in fresh)) - places
        places |= fresh
    return places


def _context_free(node: Node) -> Language:
    rules = "\n".join(f"{name}: {_written(rule)}" for name, rule in _RULES.items())
    text = f"start: {_written(node)}\n{rules}\n"
    return Language(lark(text), text, lambda said: len(said) in _ends(node, said, 0))


context_free_languages = _nodes().map(_context_free)


# JSON Schemas, judged by another implementation of them

_names = st.sampled_from(["name", "value", "count", "a b", 'q"', "items"])
_scalars: st.SearchStrategy[Any] = st.one_of(
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 6)),
    st.just({"type": "string", "pattern": "^[ab]{2,4}$"}),
    st.builds(
        lambda a, b: {"type": "integer", "minimum": min(a, b), "maximum": max(a, b)},
        st.integers(-9, 99),
        st.integers(-9, 99),
    ),
    st.sampled_from(
        [{"type": "boolean"}, {"type": "null"}, {"const": {"a": [1, "b"]}}, {"type": ["null", "boolean"]}]
    ),
    st.lists(st.sampled_from(["ab", "abc", "b", 1, None, True]), min_size=1, max_size=4, unique_by=repr).map(
        lambda e: {"enum": e}
    ),
)


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def made(properties: dict[str, Any], optional: set[str]) -> Any:
        required = [name for name in properties if name not in optional]
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }

    return st.builds(made, st.dictionaries(_names, inner, max_size=3), st.sets(_names, max_size=3))


schemas: st.SearchStrategy[Any] = st.recursive(
    _scalars,
    lambda inner: st.one_of(
        _objects(inner),
        st.builds(lambda item, n: {"type": "array", "items": item, "maxItems": n}, inner, st.integers(0, 3)),
        st.lists(inner, min_size=2, max_size=2).map(lambda two: {"anyOf": two}),
    ),
    max_leaves=5,
)


def described(schema: Any) -> Language:
    judge = jsonschema_rs.validator_for(schema)

    def meets(text: str) -> bool:
        return judge.is_valid(json.loads(text))

    return Language(json_schema(schema), json.dumps(schema), meets)


described_languages = schemas.map(described)

languages = st.one_of(regular_languages, context_free_languages, described_languages)

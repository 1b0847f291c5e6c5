"""Finds the subschema that causes an error, as a JSON pointer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from keystroke.engine.grammar.validate import as_list, resolve_reference

_SECONDS = 2.0  # time limit for compiling subschemas separately
_LOOKS = 200_000  # most subschemas to visit when searching for infinite recursion
_ONE = ("additionalProperties", "items", "not", "if", "then", "else", "contains", "propertyNames")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")


def failing_pointer(parts: Sequence[str], failure: Callable[[str], str | None]) -> str | None:
    """The innermost subschema that does not compile by itself; None if that is the whole schema."""
    for part in parts:
        schema = json.loads(part).get("json_schema")
        if isinstance(schema, Mapping):
            return _innermost_failure(schema, failure)
    return None


def _innermost_failure(root: Mapping[str, Any], failure: Callable[[str], str | None]) -> str | None:
    shared = {key: root[key] for key in ("$defs", "definitions", "x-guidance") if key in root}
    until = time.monotonic() + _SECONDS

    def fails(schema: Any) -> bool:
        alone = {**shared, **schema} if isinstance(schema, Mapping) else schema
        return time.monotonic() < until and failure(json.dumps({"json_schema": alone})) is not None

    place, schema = "", root
    while True:
        for path, inner in _subschemas(schema):
            if fails(inner):
                place, schema = place + path, inner
                break
        else:
            return place or None


def _subschemas(schema: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(schema, Mapping):
        return
    for key in _NAMED:
        if isinstance(schema.get(key), Mapping):
            yield from ((f"/{key}/{_escape_pointer(name)}", inner) for name, inner in schema[key].items())
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            yield from ((f"/{key}/{i}", inner) for i, inner in enumerate(schema[key]))
    for key in _ONE:
        if isinstance(schema.get(key), Mapping):
            yield f"/{key}", schema[key]


def endless_pointer(parts: Sequence[str]) -> str | None:
    """A reference that requires itself without end, so that no finite text matches; None if there is none."""
    for part in parts:
        schema = json.loads(part).get("json_schema") if '"$ref"' in part else None
        if isinstance(schema, Mapping):
            return _Finite(schema).unmet_reference()
    return None


class _Finite:
    """Determines which schemas a finite document can match, as a least fixed point: first those that need no
    others, then those that only need these, and so on. Unknown keywords count as matched."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._met: set[str] = set()  # references known to be satisfiable
        self._left = _LOOKS

    def unmet_reference(self) -> str | None:
        """A required reference that cannot be satisfied; None if there is none."""
        targets = {name: resolve_reference(self._root, name) for name in _references(self._root)}
        growing = True
        while growing and self._left > 0:
            fresh = [n for n in targets if n not in self._met and self._meets(targets[n])]
            self._met.update(fresh)
            growing = bool(fresh)
        if self._left <= 0 or self._meets(self._root):
            return None
        return next((f"/{n.strip('#/')}" for n in targets if n not in self._met), None)

    def _meets(self, schema: Any) -> bool:
        self._left -= 1
        if not isinstance(schema, Mapping) or "const" in schema or "enum" in schema:
            return True
        return (
            ("$ref" not in schema or schema["$ref"] in self._met)
            and all(self._meets(s) for s in as_list(schema.get("allOf")))
            and self._meets_any(schema.get("anyOf"))
            and self._meets_any(schema.get("oneOf"))
            and self._meets_kind(schema)
        )

    def _meets_any(self, schemas: Any) -> bool:
        return not as_list(schemas) or any(self._meets(s) for s in as_list(schemas))

    def _meets_kind(self, schema: Mapping[str, Any]) -> bool:
        kinds = schema.get("type")
        kinds = [kinds] if isinstance(kinds, str) else as_list(kinds)
        if not kinds or any(kind not in ("object", "array") for kind in kinds):
            return True
        return any(
            self._meets_object(schema) if kind == "object" else self._meets_array(schema) for kind in kinds
        )

    def _meets_object(self, schema: Mapping[str, Any]) -> bool:
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            return True
        needed = [n for n in as_list(schema.get("required")) if isinstance(n, str) and n in properties]
        return all(self._meets(properties[name]) for name in needed)

    def _meets_array(self, schema: Mapping[str, Any]) -> bool:
        least = schema.get("minItems", 0)
        return not (isinstance(least, int) and least > 0) or self._meets(schema.get("items"))


def _references(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(_references, value))
    if not isinstance(value, Mapping):
        return set()
    found = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
    return found.union(*map(_references, value.values()))


def _escape_pointer(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")

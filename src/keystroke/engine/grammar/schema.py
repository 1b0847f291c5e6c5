"""Where in a JSON Schema something is wrong.

Reads schemas as data; what fails to compile is asked of whoever compiles. Places are JSON pointers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

_SECONDS = 2.0  # spent on compiling subschemas on their own, to find the one at fault
_LOOKS = 200_000  # at subschemas, when looking for one without end
_ONE = ("additionalProperties", "items", "not", "if", "then", "else", "contains", "propertyNames")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")


def failing_pointer(parts: Sequence[str], failure: Callable[[str], str | None]) -> str | None:
    """The innermost subschema that does not compile by itself, or None where that is the whole."""
    for part in parts:
        schema = json.loads(part).get("json_schema")
        if isinstance(schema, Mapping):
            return _innermost(schema, failure)
    return None


def _innermost(root: Mapping[str, Any], failure: Callable[[str], str | None]) -> str | None:
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
            yield from ((f"/{key}/{_escaped(name)}", inner) for name, inner in schema[key].items())
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            yield from ((f"/{key}/{i}", inner) for i, inner in enumerate(schema[key]))
    for key in _ONE:
        if isinstance(schema.get(key), Mapping):
            yield f"/{key}", schema[key]


def endless_pointer(parts: Sequence[str]) -> str | None:
    """Where a schema asks for itself without end, so that no finite text meets it; None where it does not."""
    for part in parts:
        schema = json.loads(part).get("json_schema") if '"$ref"' in part else None
        if isinstance(schema, Mapping):
            return _Finite(schema).unmet()
    return None


class _Finite:
    """Which schemas a finite document can meet: those that need none, then those that need only these, and so
    on. What is not understood counts as met: only a proof refuses."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._met: set[str] = set()  # references known to be met
        self._left = _LOOKS

    def unmet(self) -> str | None:
        """A reference without which the whole cannot be met, and which cannot be; None where all is well."""
        targets = {name: self._target(name) for name in _references(self._root)}
        growing = True
        while growing and self._left > 0:
            fresh = [n for n in targets if n not in self._met and self._meets(targets[n])]
            self._met.update(fresh)
            growing = bool(fresh)
        if self._left <= 0 or self._meets(self._root):
            return None
        return next((f"/{n.strip('#/')}" for n in targets if n not in self._met), None)

    def _target(self, name: str) -> Any:
        target: Any = self._root
        for step in name.removeprefix("#").strip("/").split("/") if name != "#" else ():
            if not isinstance(target, Mapping) or step not in target:
                return True
            target = target[step]
        return target

    def _meets(self, schema: Any) -> bool:
        self._left -= 1
        if not isinstance(schema, Mapping) or "const" in schema or "enum" in schema:
            return True
        return (
            ("$ref" not in schema or schema["$ref"] in self._met)
            and all(self._meets(s) for s in _list(schema.get("allOf")))
            and self._any(schema.get("anyOf"))
            and self._any(schema.get("oneOf"))
            and self._kind(schema)
        )

    def _any(self, schemas: Any) -> bool:
        return not _list(schemas) or any(self._meets(s) for s in _list(schemas))

    def _kind(self, schema: Mapping[str, Any]) -> bool:
        kinds = schema.get("type")
        kinds = [kinds] if isinstance(kinds, str) else _list(kinds)
        if not kinds or any(kind not in ("object", "array") for kind in kinds):
            return True
        return any(self._object(schema) if kind == "object" else self._array(schema) for kind in kinds)

    def _object(self, schema: Mapping[str, Any]) -> bool:
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            return True
        needed = [n for n in _list(schema.get("required")) if isinstance(n, str) and n in properties]
        return all(self._meets(properties[name]) for name in needed)

    def _array(self, schema: Mapping[str, Any]) -> bool:
        least = schema.get("minItems", 0)
        return not (isinstance(least, int) and least > 0) or self._meets(schema.get("items"))


def _references(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(_references, value))
    if not isinstance(value, Mapping):
        return set()
    found = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
    return found.union(*map(_references, value.values()))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")

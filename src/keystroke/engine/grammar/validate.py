"""Whether a JSON value meets a schema: for answers that were made where no grammar held them.

Law: knows the keywords that schemas of answers use (types, members, items, alternatives, bounds) and lets the
others pass: it refuses only what it can name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_DEEPEST = 100


def unmet_text(schema: Mapping[str, Any], text: str) -> str | None:
    """Why `text` is not JSON that meets `schema`; None where it is."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return "it is not JSON"
    return unmet(schema, value)


def unmet(schema: Any, value: Any, *, root: Any = None, place: str = "", depth: int = 0) -> str | None:
    """Why `value` does not meet `schema`, and where; None where it does."""
    root = schema if root is None else root
    if schema is True or depth > _DEEPEST:
        return None
    if not isinstance(schema, Mapping):
        return f"nothing may be at {place or '/'}" if schema is False else None

    def inner(below: Any, item: Any, name: str = "") -> str | None:
        return unmet(below, item, root=root, place=f"{place}{name}", depth=depth + 1)

    at = place or "/"
    if isinstance(schema.get("$ref"), str) and (why := inner(_target(root, schema["$ref"]), value)):
        return why
    kinds = schema.get("type")
    if kinds is not None and not any(
        _is(kind, value) for kind in ([kinds] if isinstance(kinds, str) else kinds)
    ):
        return f"{at} must be {kinds if isinstance(kinds, str) else ' or '.join(kinds)}"
    if "const" in schema and value != schema["const"]:
        return f"{at} must be {json.dumps(schema['const'])[:80]}"
    if isinstance(schema.get("enum"), list) and value not in schema["enum"]:
        return f"{at} must be one of {json.dumps(schema['enum'])[:80]}"
    for below in schema.get("allOf") or ():
        if why := inner(below, value):
            return why
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        if isinstance(options, list) and options and all(inner(below, value) for below in options):
            return f"{at} meets none of {key}"
    if isinstance(value, dict):
        for name in schema.get("required") or ():
            if name not in value:
                return f"{at} lacks {name}"
        known = schema.get("properties") or {}
        for name, item in value.items():
            below = known.get(name)
            if below is None and not schema.get("patternProperties"):
                below = schema.get("additionalProperties", True)
            if why := inner(True if below is None else below, item, f"/{name}"):
                return why
    if isinstance(value, list):
        if len(value) < schema.get("minItems", 0) or len(value) > schema.get("maxItems", len(value)):
            return f"{at} has {len(value)} items"
        for index, item in enumerate(value):
            if why := inner(schema.get("items", True), item, f"/{index}"):
                return why
    if isinstance(value, str):
        if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
            return f"{at} has {len(value)} characters"
        if isinstance(schema.get("pattern"), str) and not _matches(schema["pattern"], value):
            return f"{at} does not match {schema['pattern'][:80]}"
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and not schema.get("minimum", value) <= value <= schema.get("maximum", value)
    ):
        return f"{at} is out of range"
    return None


def _is(kind: str, value: Any) -> bool:
    if kind == "integer":
        return (isinstance(value, int) and not isinstance(value, bool)) or (
            isinstance(value, float) and value.is_integer()
        )
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    types = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    return kind not in types or isinstance(value, types[kind])


def _target(root: Any, reference: str) -> Any:
    target = root
    for step in reference.removeprefix("#").strip("/").split("/") if reference != "#" else ():
        if not isinstance(target, Mapping) or step not in target:
            return True
        target = target[step]
    return target


def _matches(pattern: str, value: str) -> bool:
    try:
        return re.search(pattern, value) is not None
    except re.error:
        return True

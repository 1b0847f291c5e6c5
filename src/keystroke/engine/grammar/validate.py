"""Validates a JSON value against a schema, for answers that were generated without a grammar.

Supports the validation keywords of draft 2020-12 except `format`; unknown keywords are ignored.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

_DEEPEST = 100
Inner = Callable[..., str | None]  # the violation of a subschema; None if it matches


def text_violation(schema: Mapping[str, Any], text: str) -> str | None:
    """Why `text` is not JSON that matches `schema`; None if it is."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return "it is not JSON"
    return schema_violation(schema, value)


def schema_violation(
    schema: Any, value: Any, *, root: Any = None, place: str = "", depth: int = 0
) -> str | None:
    """Why and where `value` does not match `schema`; None if it does."""
    root = schema if root is None else root
    if schema is True or depth > _DEEPEST:
        return None
    if not isinstance(schema, Mapping):
        return f"nothing may be at {place or '/'}" if schema is False else None

    def inner(below: Any, item: Any, name: str = "") -> str | None:
        return schema_violation(below, item, root=root, place=f"{place}{name}", depth=depth + 1)

    at = place or "/"
    if isinstance(schema.get("$ref"), str) and (why := inner(resolve_reference(root, schema["$ref"]), value)):
        return why
    checks: tuple[Callable[[Mapping[str, Any], Any, Inner, str], Iterator[str | None]], ...]
    checks = (_check_kind, _check_alternatives)
    if isinstance(value, dict):
        checks += (_check_object,)
    elif isinstance(value, list):
        checks += (_check_array,)
    elif isinstance(value, str):
        checks += (_check_string,)
    elif _is_type("number", value):
        checks += (_check_number,)
    return next((why for check in checks for why in check(schema, value, inner, at) if why), None)


def _check_kind(schema: Mapping[str, Any], value: Any, _inner: Inner, at: str) -> Iterator[str | None]:
    kinds = schema.get("type")
    if kinds is not None and not any(
        _is_type(kind, value) for kind in ([kinds] if isinstance(kinds, str) else kinds)
    ):
        yield f"{at} must be {kinds if isinstance(kinds, str) else ' or '.join(kinds)}"
    if "const" in schema and not _is_equal(value, schema["const"]):
        yield f"{at} must be {json.dumps(schema['const'])[:80]}"
    if isinstance(schema.get("enum"), list) and not any(_is_equal(value, one) for one in schema["enum"]):
        yield f"{at} must be one of {json.dumps(schema['enum'])[:80]}"


def _check_alternatives(schema: Mapping[str, Any], value: Any, inner: Inner, at: str) -> Iterator[str | None]:
    for below in as_list(schema.get("allOf")):
        yield inner(below, value)
    for key in ("anyOf", "oneOf"):
        options = as_list(schema.get(key))
        met = sum(inner(below, value) is None for below in options)
        if options and (met == 0 or (key == "oneOf" and met > 1)):
            yield f"{at} meets {'none' if met == 0 else 'more than one'} of {key}"
    if "not" in schema and inner(schema["not"], value) is None:
        yield f"{at} meets what it must not"
    if "if" in schema:
        yield inner(schema.get("then" if inner(schema["if"], value) is None else "else", True), value)


def _check_object(
    schema: Mapping[str, Any], value: dict[str, Any], inner: Inner, at: str
) -> Iterator[str | None]:
    for name in as_list(schema.get("required")):
        if name not in value:
            yield f"{at} lacks {name}"
    if not schema.get("minProperties", 0) <= len(value) <= schema.get("maxProperties", len(value)):
        yield f"{at} has {len(value)} members"
    for name, needed in _as_mapping(schema.get("dependentRequired")).items():
        if name in value and (lacking := [one for one in as_list(needed) if one not in value]):
            yield f"{at} lacks {lacking[0]}"
    for name, below in _as_mapping(schema.get("dependentSchemas")).items():
        if name in value:
            yield inner(below, value)
    known, patterns = _as_mapping(schema.get("properties")), _as_mapping(schema.get("patternProperties"))
    for name, item in value.items():
        if "propertyNames" in schema and inner(schema["propertyNames"], name) is not None:
            yield f"{at} has a member {name[:80]}"
        belows = [below for pattern, below in patterns.items() if _matches(pattern, name, unknown=False)]
        if name in known:
            belows.append(known[name])
        for below in belows or [schema.get("additionalProperties", True)]:
            yield inner(below, item, f"/{name}")


def _check_array(schema: Mapping[str, Any], value: list[Any], inner: Inner, at: str) -> Iterator[str | None]:
    if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
        yield f"{at} has {len(value)} items"
    if schema.get("uniqueItems") is True and any(
        _is_equal(one, other) for index, one in enumerate(value) for other in value[:index]
    ):
        yield f"{at} has an item twice"
    first = as_list(schema.get("prefixItems"))
    for index, item in enumerate(value):
        below = first[index] if index < len(first) else schema.get("items", True)
        yield inner(below, item, f"/{index}")
    if "contains" in schema:
        met = sum(inner(schema["contains"], item) is None for item in value)
        if not schema.get("minContains", 1) <= met <= schema.get("maxContains", met):
            yield f"{at} contains what it must {met} times"


def _check_string(schema: Mapping[str, Any], value: str, _inner: Inner, at: str) -> Iterator[str | None]:
    if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
        yield f"{at} has {len(value)} characters"
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and not _matches(pattern, value, unknown=True):
        yield f"{at} does not match {pattern[:80]}"


def _check_number(schema: Mapping[str, Any], value: float, _inner: Inner, at: str) -> Iterator[str | None]:
    low, high, step = (_bound(schema, key) for key in ("exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
    if (
        not schema.get("minimum", value) <= value <= schema.get("maximum", value)
        or (low is not None and value <= low)
        or (high is not None and value >= high)
    ):
        yield f"{at} is out of range"
    if step is not None and step > 0:
        times = value / step
        if not math.isfinite(times) or abs(times - round(times)) > 1e-9 * max(1.0, abs(times)):
            yield f"{at} is no multiple of {step}"


def _bound(schema: Mapping[str, Any], key: str) -> float | None:
    value = schema.get(key)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _is_type(kind: str, value: Any) -> bool:
    if kind == "integer":
        return (isinstance(value, int) and not isinstance(value, bool)) or (
            isinstance(value, float) and value.is_integer()
        )
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    types = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    return kind not in types or isinstance(value, types[kind])


def _is_equal(one: Any, other: Any) -> bool:
    """JSON equality: 1 equals 1.0 but not true."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_equal(one[key], other[key]) for key in one)
    return bool(one == other)


def resolve_reference(root: Any, reference: str) -> Any:
    """The schema of a `$ref`; True, which allows everything, if it does not exist."""
    target = root
    for step in reference.removeprefix("#").strip("/").split("/") if reference != "#" else ():
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and name.isdecimal() and int(name) < len(target):
            target = target[int(name)]
        elif isinstance(target, Mapping) and name in target:
            target = target[name]
        else:
            return True
    return target


def _matches(pattern: str, value: str, *, unknown: bool) -> bool:
    """`unknown`: the result for an invalid pattern."""
    try:
        return re.search(pattern, value) is not None
    except re.error:
        return unknown


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}

"""Finds properties that all results of a definition had before a change and no longer have: a bound, an
order, a form.

A property counts only if it held in every observed call, and in enough different ones.
"""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_ENOUGH = 6  # different results with the property
_NAMED = re.compile(r"\b(?:list|tuple)\[")
UNKNOWN = object()


@dataclass(frozen=True, slots=True)
class ObservedCall:
    """One call with its plain arguments, and its results before and after the change."""

    call: str
    arguments: tuple[Any, ...]
    before: Any
    after: Any


def literal(text: str) -> Any:
    """The value of a literal; UNKNOWN for any other text."""
    try:
        return ast.literal_eval(_NAMED.sub("[", text))
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return UNKNOWN


def matches_result(expected: str, result: str) -> bool:
    """Whether `expected` matches a result: the same error, or the same value up to rounding."""
    if error := _error_name(result):
        return expected.startswith(error)
    return _is_same_value(literal(expected), literal(result))


def _error_name(result: str) -> str:
    found = re.match(r"([A-Z]\w*(?:Error|Exception|Exit|Interrupt|Iteration)): ", result)
    return found[1] if found is not None else ""


def _is_same_value(a: Any, b: Any) -> bool:
    if a is UNKNOWN or b is UNKNOWN:
        return False
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=5e-3, abs_tol=1e-9)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_is_same_value, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_is_same_value(a[key], b[key]) for key in a)
    return bool(a == b)


def find_lost_invariant(seen: Sequence[ObservedCall]) -> tuple[ObservedCall, str] | None:
    """A call whose result lost a property that all results had, and that property."""
    known = [item for item in seen if item.before is not UNKNOWN]
    for what, about, holds in _INVARIANTS:
        concerned = [item for item in known if about(item, item.before)]
        if len({repr(item.before) for item in concerned}) < _ENOUGH:
            continue
        if not all(holds(item, item.before) for item in concerned):
            continue
        broken = [
            item
            for item in known
            if item.after is not UNKNOWN
            and repr(item.after) != repr(item.before)
            and about(item, item.after)
            and not holds(item, item.after)
        ]
        if broken:
            return min(broken, key=lambda item: len(item.call)), what
    return None


# ── properties of results ──

_About = Callable[[ObservedCall, Any], bool]


def _is_number(item: ObservedCall, value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_sequence(item: ObservedCall, value: Any) -> bool:
    return isinstance(value, list) and len(value) > 1


def _is_numbers(item: ObservedCall, value: Any) -> bool:
    return _is_sequence(item, value) and all(_is_number(item, part) for part in value)


def _is_text(item: ObservedCall, value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_ordered(value: Any) -> bool:
    try:
        return all(a <= b for a, b in itertools.pairwise(value))
    except TypeError:
        return False


def _is_under_limit(item: ObservedCall, value: Any) -> bool:
    """Whether no number of the result exceeds the largest numeric argument."""
    numbers = value if isinstance(value, list) else [value]
    limits = [part for part in item.arguments if _is_number(item, part)]
    return not limits or max(numbers, default=0) <= max(limits)


_INVARIANTS: tuple[tuple[str, _About, _About], ...] = (
    ("it was never negative", _is_number, lambda item, value: value >= 0),
    ("no value was negative", _is_numbers, lambda item, value: min(value) >= 0),
    ("it was in order", _is_sequence, lambda item, value: _is_ordered(value)),
    ("nothing was in it twice", _is_sequence, lambda item, value: len(set(map(repr, value))) == len(value)),
    (
        "it began and ended with a letter or a digit",
        _is_text,
        lambda item, value: value[0].isalnum() and value[-1].isalnum(),
    ),
    ("it had no white space at its ends", _is_text, lambda item, value: value == value.strip()),
    ("it was never above the largest number that was given", _is_number, _is_under_limit),
    ("no value was above the largest number that was given", _is_numbers, _is_under_limit),
)

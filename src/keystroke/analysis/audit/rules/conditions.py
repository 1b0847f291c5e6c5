"""Evaluates the conditions of rules on values; docs/audit/README.md describes them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from keystroke.analysis.audit.flow.values import CONSTANT, LOCAL, PARAMETER, REMOTE, Value
from keystroke.analysis.audit.rules.backtracking import backtracks_exponentially

_SIMPLE: dict[str, Callable[[Value], bool]] = {
    "literal": lambda value: value.known,
    "true": lambda value: value.const is True,
    "false": lambda value: value.const is False,
    "none": lambda value: value.known and value.const is None,
    "falsy": lambda value: value.known and not value.const,
    "truthy": lambda value: value.known and bool(value.const),
    "numeric": lambda value: value.numeric,
    "single": lambda value: value.items is None,  # no list or mapping
    "words": lambda value: _is_choice_of_words(value),
}
# Where remote text comes from that holds no line break (parts of the head of a request), or that no client
# sends (what the user of this machine types, what another server answers).
_ONE_LINE = re.compile(
    r"os\.|sys\.|argparse|.*parse_args|input|click|getpass|(?:json\.loads\()*(?:requests\.|urllib|httpx)"
    r"|self\.(?:path|headers|request\.(?:uri|headers))|.*request\.(?:headers|url|method|host|user_agent"
    r"|referrer|base_url|url_root|authorization|rel_url|META)"
)
MAX_WORDS = 16
MIN_ALPHABET = 8  # letters or digits; with fewer nobody makes a secret
_LEVELS = {"dynamic": LOCAL, "tainted": PARAMETER, "remote": REMOTE}


def satisfies(value: Value | None, test: str, use: str) -> bool:
    """Whether a value, or None for a missing argument, satisfies a condition."""
    if "||" in test:
        return any(satisfies(value, part.strip(), use) for part in test.split("||"))
    if "&&" in test:
        return all(satisfies(value, part.strip(), use) for part in test.split("&&"))
    if test.startswith("not:"):
        return not satisfies(value, test[4:], use)
    if test == "any":
        return True
    if test == "missing":
        return value is None
    if value is None:
        return False
    if test == "present":
        return True
    if test == "foreign":  # numbers too: how many, how long
        return value.level >= REMOTE and not value.bounded and not value.is_safe_for(use)
    if test == "lines":
        return satisfies(value, "remote", use) and _ONE_LINE.match(value.origin) is None
    level = _LEVELS.get(test)
    if level is not None:
        return value.level >= level and not value.numeric and not value.is_safe_for(use)
    if test.startswith("built"):
        wanted = _LEVELS.get(test[6:], LOCAL)
        return value.built and value.level >= wanted and not value.is_safe_for(use)
    return _constant(value, test)


def _is_choice_of_words(value: Value) -> bool:
    """Whether a value is a short list that the program writes, of words or few: no alphabet of a secret."""
    items = value.items or ()
    few = len(items) < MIN_ALPHABET
    return 0 < len(items) <= MAX_WORDS and all(
        item.known and (few or len(str(item.const)) > 1) for _, item in items
    )


def _constant(value: Value, test: str) -> bool:
    const = value.const
    if test == "const":
        return (value.level == CONSTANT and not value.known) or value.known
    simple = _SIMPLE.get(test)
    if simple is not None:
        return simple(value)
    if test in ("runaway", "runaway-script"):  # a regular expression of exponential time
        text = const.decode("latin-1") if isinstance(const, bytes) else const
        return isinstance(text, str) and backtracks_exponentially(text, script=test == "runaway-script")
    if test[0] == "+":  # a number with one of these bits
        return isinstance(const, int) and bool(const & int(test[1:], 0))
    if test == "text":
        return isinstance(const, str | bytes) and len(const) > 0
    if test[0] == "~":
        text = value.text
        return text is not None and _search(test[1:], text)
    if test[0] == "^":  # the origin of the data
        return _search(test, value.origin)
    if test[0] == "@":  # the path of the value
        return _search(test[1:], value.path)
    if test[0] == "=":
        return value.known and str(const) == test[1:]
    if test[0] in "<>" and isinstance(const, int | float) and not isinstance(const, bool):
        bound = int(test[1:], 0)
        return const < bound if test[0] == "<" else const > bound
    return False


@lru_cache(maxsize=512)
def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)


def _search(pattern: str, text: str) -> bool:
    return _compile(pattern).search(text) is not None

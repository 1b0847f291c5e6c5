"""Whether a regular expression can take exponential time on a text that does not match.

Law: a repetition is dangerous when one text can be cut into its rounds in more than one way: a round can be
continued by what begins the next one, or two alternatives begin alike. Sets of characters are compared
exactly for the first 256 code points. An expression that cannot be read is not judged.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from functools import lru_cache
from importlib import import_module
from typing import Any

# The standard library's own reader of expressions: no stub tells its types everywhere.
_constants: Any = import_module("re._constants")
_parser: Any = import_module("re._parser")
_ALL = (1 << 257) - 1  # bit 256 stands for every code point above
_MANY = 12  # rounds from which a bounded repetition counts as endless
_NAMED_GROUP = re.compile(r"\(\?<(?![=!])")
_UNICODE = re.compile(r"\\[pP]\{[^}]*\}|\\u\{[0-9a-fA-F]+\}")
Node = tuple[Any, Any]


@lru_cache(maxsize=2048)
def runaway(pattern: str) -> bool:
    """Whether `pattern` holds a repetition that backtracks exponentially."""
    if len(pattern) > 3000 or not re.search(r"\)[+*{]", pattern):
        return False
    text = _UNICODE.sub(r"\\w", _NAMED_GROUP.sub("(?P<", pattern)).replace("[^]", "[\\s\\S]")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = _parser.parse(text, 0)
        except (re.error, OverflowError, RecursionError, ValueError, IndexError):
            return False
    return _search(list(tree), [])


def _search(nodes: list[Node], after: list[Node]) -> bool:
    """Looks for a dangerous repetition among `nodes`, which `after` follows."""
    for at, (op, value) in enumerate(nodes):
        rest = [*nodes[at + 1 :], *after]
        if op in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
            _, high, body = value
            inner = list(body)
            endless = high is _constants.MAXREPEAT or high >= _MANY
            if endless and _can_fail(rest) and _ambiguous(inner):
                return True
            if _search(inner, [*(inner if endless else []), *rest]):
                return True
        elif op is _constants.SUBPATTERN:
            if _search(list(value[3]), rest):
                return True
        elif op is _constants.BRANCH:
            if any(_search(list(branch), rest) for branch in value[1]):
                return True
        elif op in (_constants.ASSERT, _constants.ASSERT_NOT) and _search(list(value[1]), []):
            return True
    return False


def _can_fail(rest: list[Node]) -> bool:
    """Something must come after the repetition for it to be tried again; an end of text is enough."""
    return any(op is _constants.AT or not _empty([(op, value)]) for op, value in rest)


def _ambiguous(body: list[Node]) -> bool:
    """Whether a text of several rounds of `body` can be cut into rounds in more than one way."""
    body = _flat(body)
    if len(body) == 1 and body[0][0] is _constants.BRANCH:
        branches = [_flat(list(branch)) for branch in body[0][1][1]]
        if any(_ambiguous(branch) for branch in branches):
            return True
        firsts = [_first(branch) for branch in branches]
        for one, first in enumerate(firsts):
            for other in range(one):
                if first & firsts[other] and _overlap(branches[one], branches[other]):
                    return True
        return False
    start = _first(body)
    if not start:
        return False
    # A repeated part that may end the round and take what begins the next: where everything else between it
    # and the next round can be left out, one text has many cuts.
    for at, (op, value) in enumerate(body):
        if op is _constants.BRANCH and _empty([(op, value)]):  # a|aa is read as a(?:|a)
            others = [*body[:at], *body[at + 1 :]]
            if any(branch and _overlap(_flat(list(branch)), others) for branch in value[1]):
                return True
        if op not in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
            continue
        _, high, inner = value
        endless = high is _constants.MAXREPEAT or high >= _MANY
        taken = _chars(list(inner))
        before, behind = body[:at], body[at + 1 :]
        if endless and _empty(behind) and _round_fits(before, list(inner), taken):
            return True
        if endless and _empty(before) and _empty(behind) is False and _round_fits(behind, list(inner), taken):
            return True
        if endless and _round_fits([*before, *behind], list(inner), taken):
            return True
        if _search_inner(list(inner), taken, before, behind):
            return True
    return False


def _search_inner(inner: list[Node], taken: int, before: list[Node], behind: list[Node]) -> bool:
    """A group repeated inside the round: (a*)* and its like."""
    flat = _flat(inner)
    return bool(
        _empty(before)
        and _empty(behind)
        and any(
            op in (_constants.MAX_REPEAT, _constants.MIN_REPEAT)
            and (value[1] is _constants.MAXREPEAT or value[1] >= _MANY)
            and _round_fits([*flat[:at], *flat[at + 1 :]], list(value[2]), _chars(list(value[2])))
            for at, (op, value) in enumerate(flat)
        )
    )


def _round_fits(others: list[Node], inner: list[Node], taken: int) -> bool:
    """Whether a whole round made of `others` could as well be part of the repetition of `inner`."""
    if not others or _empty(others):
        return bool(taken)
    return all(bool(_chars([node]) & taken) if not _empty([node]) else True for node in others) and bool(
        _first(_flat(others)) & _first(_flat(inner)) or not _first(_flat(others))
    )


def _overlap(one: list[Node], other: list[Node]) -> bool:
    """Whether two alternatives can match the same text, as far as their sets of characters tell."""
    sets, others = _sequence(one), _sequence(other)
    if sets is None or others is None:
        return bool(_chars(one) & _chars(other)) and not (_fixed(one) and _fixed(other))
    if len(sets) != len(others):
        # Words of different length: "a|aa" is two ways to write the same rounds.
        short, long = sorted((sets, others), key=len)
        return (
            bool(short)
            and len(long) % len(short) == 0
            and all(long[at] & short[at % len(short)] for at in range(len(long)))
        )
    return all(a & b for a, b in zip(sets, others, strict=True))


def _fixed(nodes: list[Node]) -> bool:
    return _sequence(nodes) is not None


def _sequence(nodes: list[Node]) -> list[int] | None:
    """The sets of a word of fixed length; None for anything that repeats or branches."""
    out: list[int] = []
    for op, value in _flat(nodes):
        if op in (_constants.LITERAL, _constants.NOT_LITERAL, _constants.IN, _constants.ANY):
            out.append(_set(op, value))
        elif op is _constants.AT:
            continue
        else:
            return None
    return out


def _flat(nodes: Iterable[Node]) -> list[Node]:
    """The nodes with groups opened."""
    out: list[Node] = []
    for op, value in nodes:
        if op is _constants.SUBPATTERN:
            out.extend(_flat(list(value[3])))
        else:
            out.append((op, value))
    return out


def _empty(nodes: Iterable[Node]) -> bool:
    """Whether all of these can match nothing."""
    for op, value in nodes:
        if op in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
            if value[0] > 0 and not _empty(list(value[2])):
                return False
        elif op is _constants.SUBPATTERN:
            if not _empty(list(value[3])):
                return False
        elif op is _constants.BRANCH:
            if not any(_empty(list(branch)) for branch in value[1]):
                return False
        elif op not in (_constants.AT, _constants.ASSERT, _constants.ASSERT_NOT, _constants.GROUPREF):
            return False
    return True


def _first(nodes: Iterable[Node]) -> int:
    """The characters a match of these can begin with."""
    return _chars(nodes, beginning=True)


def _chars(nodes: Iterable[Node], *, beginning: bool = False) -> int:
    """Every character that can occur in a match of these, or only those at its beginning."""
    found = 0
    for op, value in nodes:
        if op in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
            found |= _chars(list(value[2]), beginning=beginning)
        elif op is _constants.SUBPATTERN:
            found |= _chars(list(value[3]), beginning=beginning)
        elif op is _constants.BRANCH:
            for branch in value[1]:
                found |= _chars(list(branch), beginning=beginning)
        elif op in (_constants.LITERAL, _constants.NOT_LITERAL, _constants.IN, _constants.ANY):
            found |= _set(op, value)
        if beginning and not _empty([(op, value)]):
            break
    return found


def _category(name: Any) -> int:
    text = str(name)
    kind = text.rsplit("_", 1)[-1]
    found = 0
    for code in range(256):
        char = chr(code)
        if (
            (kind == "DIGIT" and char.isdigit() and code < 128)
            or (kind == "SPACE" and char.isspace())
            or (kind == "WORD" and (char == "_" or (char.isalnum() and code < 128)))
        ):
            found |= 1 << code
    return _ALL ^ found if "NOT" in text else found


def _set(op: Any, value: Any) -> int:
    if op is _constants.ANY:
        return _ALL ^ (1 << 10)
    if op is _constants.LITERAL:
        return 1 << min(int(value), 256)
    if op is _constants.NOT_LITERAL:
        return _ALL ^ (1 << min(int(value), 256))
    found, negated = 0, False
    for kind, item in value:
        if kind is _constants.NEGATE:
            negated = True
        elif kind is _constants.LITERAL:
            found |= 1 << min(item, 256)
        elif kind is _constants.RANGE:
            low, high = min(item[0], 256), min(item[1], 256)
            found |= ((1 << (high + 1)) - 1) ^ ((1 << low) - 1)
        elif kind is _constants.CATEGORY:
            found |= _category(item)
    return _ALL ^ found if negated else found

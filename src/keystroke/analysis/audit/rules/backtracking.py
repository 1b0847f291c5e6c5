"""Whether a regular expression can take exponential time on a text that does not match.

A repetition is dangerous when one text can be cut into its rounds in more than one way: a round can be
continued by what begins the next one, or two alternatives begin alike. Sets of characters are compared
exactly for the first 256 code points. An expression that cannot be read is not judged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from keystroke.analysis.audit.rules.regex_tree import (
    RegexAlternation,
    RegexAnchor,
    RegexBackreference,
    RegexChars,
    RegexGroup,
    RegexLookaround,
    RegexNode,
    RegexRepeat,
    RegexSequence,
    parse,
)

_MANY = 12  # rounds from which a bounded repetition counts as endless
_LONGEST = 3000  # characters of an expression that is judged


@lru_cache(maxsize=2048)
def runaway(pattern: str) -> bool:
    """Whether `pattern` holds a repetition that backtracks exponentially."""
    if len(pattern) > _LONGEST or not re.search(r"\)[+*{]", pattern):
        return False
    try:
        return _search(parse(pattern), ())
    except (ValueError, RecursionError):
        return False


def _search(nodes: RegexSequence, after: RegexSequence) -> bool:
    """Looks for a dangerous repetition among `nodes`, which `after` follows."""
    for at, node in enumerate(nodes):
        rest = (*nodes[at + 1 :], *after)
        match node:
            case RegexRepeat(body=inner):
                if _endless(node) and _can_fail(rest) and _ambiguous(inner):
                    return True
                if _search(inner, (*(inner if _endless(node) else ()), *rest)):
                    return True
            case RegexGroup(body):
                if _search(body, rest):
                    return True
            case RegexAlternation(branches):
                if any(_search(branch, rest) for branch in branches):
                    return True
            case RegexLookaround(body):
                if _search(body, ()):
                    return True
    return False


def _endless(node: RegexRepeat) -> bool:
    return node.high is None or node.high >= _MANY


def _can_fail(rest: RegexSequence) -> bool:
    """Something must come after the repetition for it to be tried again; an end of text is enough."""
    return any(isinstance(node, RegexAnchor) or not _empty((node,)) for node in rest)


def _ambiguous(body: RegexSequence) -> bool:
    """Whether a text of several rounds of `body` can be cut into rounds in more than one way."""
    body = _flat(body)
    if len(body) == 1 and isinstance(body[0], RegexAlternation):
        branches = [_flat(branch) for branch in body[0].branches]
        if any(_ambiguous(branch) for branch in branches):
            return True
        firsts = [_first(branch) for branch in branches]
        for one, first in enumerate(firsts):
            for other in range(one):
                if first & firsts[other] and _overlap(branches[one], branches[other]):
                    return True
        return False
    if not _first(body):
        return False
    # A repeated part that may end the round and take what begins the next: where everything else between it
    # and the next round can be left out, one text has many cuts.
    for at, node in enumerate(body):
        before, behind = body[:at], body[at + 1 :]
        others = (*before, *behind)
        if isinstance(node, RegexAlternation) and _empty((node,)):  # a(?:|a) is a|aa
            if any(branch and _overlap(_flat(branch), others) for branch in node.branches):
                return True
            continue
        if not isinstance(node, RegexRepeat):
            continue
        inner = node.body
        taken = _chars(inner)
        if _endless(node):
            if _empty(behind) and _round_fits(before, inner, taken):
                return True
            if _empty(before) and not _empty(behind) and _round_fits(behind, inner, taken):
                return True
            if _round_fits(others, inner, taken):
                return True
        if _empty(others) and _repeats_inside(inner):
            return True
    return False


def _repeats_inside(inner: RegexSequence) -> bool:
    """A group repeated inside the round: (a*)* and its like."""
    flat = _flat(inner)
    return any(
        isinstance(node, RegexRepeat)
        and _endless(node)
        and _round_fits((*flat[:at], *flat[at + 1 :]), node.body, _chars(node.body))
        for at, node in enumerate(flat)
    )


def _round_fits(others: RegexSequence, inner: RegexSequence, taken: int) -> bool:
    """Whether a whole round made of `others` could as well be part of the repetition of `inner`."""
    if not others or _empty(others):
        return bool(taken)
    return all(bool(_chars((node,)) & taken) if not _empty((node,)) else True for node in others) and bool(
        _first(_flat(others)) & _first(_flat(inner)) or not _first(_flat(others))
    )


def _overlap(one: RegexSequence, other: RegexSequence) -> bool:
    """Whether two alternatives can match the same text, as far as their sets of characters tell."""
    sets, others = _word(one), _word(other)
    if sets is None or others is None:
        return bool(_chars(one) & _chars(other))
    if len(sets) != len(others):
        # Words of different length: "a|aa" is two ways to write the same rounds.
        short, long = sorted((sets, others), key=len)
        return (
            bool(short)
            and len(long) % len(short) == 0
            and all(long[at] & short[at % len(short)] for at in range(len(long)))
        )
    return all(a & b for a, b in zip(sets, others, strict=True))


def _word(nodes: RegexSequence) -> list[int] | None:
    """The sets of a word of fixed length; None for anything that repeats or branches."""
    out: list[int] = []
    for node in _flat(nodes):
        match node:
            case RegexChars(options):
                out.append(options)
            case RegexAnchor():
                continue
            case _:
                return None
    return out


def _flat(nodes: Iterable[RegexNode]) -> RegexSequence:
    """The nodes with groups opened."""
    out: list[RegexNode] = []
    for node in nodes:
        if isinstance(node, RegexGroup):
            out.extend(_flat(node.body))
        else:
            out.append(node)
    return tuple(out)


def _empty(nodes: Iterable[RegexNode]) -> bool:
    """Whether all of these can match nothing."""
    for node in nodes:
        match node:
            case RegexRepeat(low, _, body):
                if low > 0 and not _empty(body):
                    return False
            case RegexGroup(body):
                if not _empty(body):
                    return False
            case RegexAlternation(branches):
                if not any(_empty(branch) for branch in branches):
                    return False
            case RegexAnchor() | RegexLookaround() | RegexBackreference():
                continue
            case _:
                return False
    return True


def _first(nodes: Iterable[RegexNode]) -> int:
    """The characters a match of these can begin with."""
    return _chars(nodes, beginning=True)


def _chars(nodes: Iterable[RegexNode], *, beginning: bool = False) -> int:
    """Every character that can occur in a match of these, or only those at its beginning."""
    found = 0
    for node in nodes:
        match node:
            case RegexChars(options):
                found |= options
            case RegexRepeat(body=body) | RegexGroup(body):
                found |= _chars(body, beginning=beginning)
            case RegexAlternation(branches):
                for branch in branches:
                    found |= _chars(branch, beginning=beginning)
        if beginning and not _empty((node,)):
            break
    return found

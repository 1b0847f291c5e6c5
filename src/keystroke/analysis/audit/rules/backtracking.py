"""Tells whether a regular expression can backtrack exponentially.

A repetition is dangerous if one text can be split into its iterations in more than one way: an iteration can
match the start of the next one, or two alternatives overlap. Character sets are compared exactly for the
first 256 code points. An expression that cannot be parsed counts as harmless.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache, reduce
from operator import or_

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

_UNBOUNDED = 12  # a bounded repetition of so many iterations counts as unbounded
_MAX_LENGTH = 3000  # longer expressions are not analysed


@lru_cache(maxsize=2048)
def backtracks_exponentially(pattern: str, *, script: bool = False) -> bool:
    """Whether `pattern`, of JavaScript if `script`, contains a repetition that backtracks exponentially."""
    if len(pattern) > _MAX_LENGTH or not re.search(r"\)[+*{]", pattern):
        return False
    try:
        return _search(parse(pattern, script=script), ())
    except (ValueError, RecursionError):
        return False


def _search(nodes: RegexSequence, after: RegexSequence) -> bool:
    """Whether `nodes`, followed by `after`, contain a dangerous repetition."""
    for at, node in enumerate(nodes):
        rest = (*nodes[at + 1 :], *after)
        match node:
            case RegexRepeat(body=inner):
                if _is_unbounded(node) and _can_fail(rest) and _ambiguous(inner):
                    return True
                if _search(inner, (*(inner if _is_unbounded(node) else ()), *rest)):
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


def _is_unbounded(node: RegexRepeat) -> bool:
    return node.high is None or node.high >= _UNBOUNDED


def _can_fail(rest: RegexSequence) -> bool:
    """Whether something behind the repetition can fail, so that it is tried again."""
    return any(isinstance(node, RegexAnchor) or not _can_be_empty((node,)) for node in rest)


def _ambiguous(body: RegexSequence) -> bool:
    """Whether a text of several iterations of `body` can be split in more than one way."""
    body = _flat(body)
    if len(body) == 1 and isinstance(body[0], RegexAlternation):
        branches = [_flat(branch) for branch in body[0].branches]
        if any(_ambiguous(branch) for branch in branches):
            return True
        firsts = [_first(branch) for branch in branches]
        words = [_word(branch) for branch in branches]
        single = reduce(or_, (word[0] for word in words if word and len(word) == 1), 0)
        for one, first in enumerate(firsts):
            for other in range(one):
                if not (first & firsts[other] and _overlap(branches[one], branches[other])):
                    continue
                longer = [at for at in (one, other) if words[at] is None]
                if len(longer) != 1 or len(words[one] or words[other] or ()) != 1:
                    return True
                # Single characters must make up all of the longer alternative, or what it repeats first.
                head, *rest = branches[longer[0]]
                needed = [node for node in (head, *rest) if not _can_be_empty((node,))]
                if isinstance(head, RegexRepeat) and _chars((head,)) & single:
                    return True
                if all(_chars((node,)) & single for node in needed):
                    return True
        return False
    if not _first(body):
        return False
    # A repeated part that can match the start of the next iteration, where everything between may be empty.
    for at, node in enumerate(body):
        before, behind = body[:at], body[at + 1 :]
        others = (*before, *behind)
        if isinstance(node, RegexAlternation) and _can_be_empty((node,)):  # a(?:|a) is a|aa
            if any(branch and _overlap(_flat(branch), others) for branch in node.branches):
                return True
            continue
        if not isinstance(node, RegexRepeat):
            continue
        inner = node.body
        taken = _chars(inner)
        if _is_unbounded(node):
            if _can_be_empty(behind) and _iteration_fits(before, inner, taken):
                return True
            if _can_be_empty(before) and not _can_be_empty(behind) and _iteration_fits(behind, inner, taken):
                return True
            if _iteration_fits(others, inner, taken):
                return True
        if _can_be_empty(others) and _repeats_inside(inner):
            return True
    return False


def _repeats_inside(inner: RegexSequence) -> bool:
    """A repetition inside the iteration, such as (a*)*."""
    flat = _flat(inner)
    return any(
        isinstance(node, RegexRepeat)
        and _is_unbounded(node)
        and _iteration_fits((*flat[:at], *flat[at + 1 :]), node.body, _chars(node.body))
        for at, node in enumerate(flat)
    )


def _iteration_fits(others: RegexSequence, inner: RegexSequence, taken: int) -> bool:
    """Whether an iteration made of `others` can also be matched by the repetition of `inner`."""
    if not others or _can_be_empty(others):
        return bool(taken)
    return all(
        bool(_chars((node,)) & taken) if not _can_be_empty((node,)) else True for node in others
    ) and bool(_first(_flat(others)) & _first(_flat(inner)) or not _first(_flat(others)))


def _overlap(one: RegexSequence, other: RegexSequence) -> bool:
    """Whether two alternatives can match the same text, judged by their character sets."""
    sets, others = _word(one), _word(other)
    if sets is None or others is None:
        return bool(_chars(one) & _chars(other))
    if len(sets) != len(others):
        # Different lengths: "a|aa" matches the same text in two ways.
        short, long = sorted((sets, others), key=len)
        return (
            bool(short)
            and len(long) % len(short) == 0
            and all(long[at] & short[at % len(short)] for at in range(len(long)))
        )
    return all(a & b for a, b in zip(sets, others, strict=True))


def _word(nodes: RegexSequence) -> list[int] | None:
    """The character sets of a fixed-length sequence; None for anything that repeats or branches."""
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
    """The nodes without grouping."""
    out: list[RegexNode] = []
    for node in nodes:
        if isinstance(node, RegexGroup):
            out.extend(_flat(node.body))
        else:
            out.append(node)
    return tuple(out)


def _can_be_empty(nodes: Iterable[RegexNode]) -> bool:
    """Whether all of these can match the empty text."""
    for node in nodes:
        match node:
            case RegexRepeat(low, _, body):
                if low > 0 and not _can_be_empty(body):
                    return False
            case RegexGroup(body):
                if not _can_be_empty(body):
                    return False
            case RegexAlternation(branches):
                if not any(_can_be_empty(branch) for branch in branches):
                    return False
            case RegexAnchor() | RegexLookaround() | RegexBackreference():
                continue
            case _:
                return False
    return True


def _first(nodes: Iterable[RegexNode]) -> int:
    """The characters that a match can start with."""
    return _chars(nodes, beginning=True)


def _chars(nodes: Iterable[RegexNode], *, beginning: bool = False) -> int:
    """The characters that can occur in a match, or only those at its start."""
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
        if beginning and not _can_be_empty((node,)):
            break
    return found

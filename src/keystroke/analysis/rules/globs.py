"""The globs of `.editorconfig`: `*`, `**`, `?`, `[a-z]`, `[!a]`, `{one,two}`, `{1..9}`, `\\` before a sign.

A nondeterministic automaton whose states are the bits of one number, so the time is linear in the length of
the glob. Regular expressions, which the format's own package uses, backtrack: eight stars take minutes.
"""

from __future__ import annotations

import re
from collections import defaultdict

_RANGE = re.compile(r"([+-]?\d{1,18})\.\.([+-]?\d{1,18})")
_NUMBER = re.compile(r"[+-]?\d{1,18}")
_BRACKET = re.compile(r"\[((?:[^]/\\]++|\\.)++)\]")  # possessive: no backtracking
LONGEST = 1024  # characters of a glob that the format requires; longer ones match nothing


def matches(glob: str, path: str) -> bool:
    """Whether `glob` matches `path`, which is relative to the glob's file and has forward slashes. Invalid
    syntax is matched literally."""
    if len(glob) > LONGEST:
        return False
    anchored = f"/{glob.lstrip('/')}" if "/" in glob else f"/**/{glob}"
    return _Places(f"/{path}").match(anchored)


class _Places:
    """Sets of positions in a name: bit `i` of a number is the position before its character `i`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._where: defaultdict[str, int] = defaultdict(int)
        for index, sign in enumerate(name):
            self._where[sign] |= 1 << index
        self._all = (1 << (len(name) + 1)) - 1
        self._plain = (self._all >> 1) & ~self._where["/"]  # places before anything but a slash

    def match(self, glob: str) -> bool:
        grouping = _grouping_offsets(glob)
        outer: list[tuple[int, int]] = []  # (start, ends of the alternatives) of each enclosing group
        begin, ended, positions = 1, 0, 1
        at = 0
        while at < len(glob):
            sign, width = glob[at], 1
            if at in grouping:
                if sign == "{":
                    outer.append((begin, ended))
                    begin, ended = positions, 0
                else:
                    ended, positions = ended | positions, begin
                    if sign == "}":
                        positions = ended
                        begin, ended = outer.pop()
            elif glob.startswith("/**/", at):
                after = self._step(positions, self._where["/"])
                positions, width = after | self._step(self._any_characters(after), self._where["/"]), 4
            elif glob.startswith("**", at):
                positions, width = self._any_characters(positions), 2
            elif sign == "*":
                positions = self._star(positions)
            elif sign == "?":
                positions = self._step(positions, self._plain)
            elif sign == "[" and (bracket := _BRACKET.match(glob, at)):
                positions, width = self._step(positions, self._one_of(bracket[1])), len(bracket[0])
            elif (
                sign == "{" and (bounds := _RANGE.match(glob, at + 1)) and glob.startswith("}", bounds.end())
            ):
                low, high = sorted((int(bounds[1]), int(bounds[2])))
                positions, width = self._number(positions, low, high), bounds.end() + 1 - at
            else:
                if sign == "\\" and at + 1 < len(glob):
                    sign, width = glob[at + 1], 2
                positions = self._step(positions, self._where.get(sign, 0))
            at += width
        return bool(positions >> len(self._name) & 1)

    def _step(self, positions: int, characters: int) -> int:
        """One character further, from the positions before one of `characters`."""
        return (positions & characters) << 1

    def _star(self, positions: int) -> int:
        """Up to the next slash: added to a run of ones, a bit carries to the end of the run."""
        return positions | (((positions & self._plain) + self._plain) ^ self._plain)

    def _any_characters(self, positions: int) -> int:
        """Up to the end of the name, from the first position reached."""
        return self._all & -(positions & -positions)

    def _one_of(self, inside: str) -> int:
        negated = inside[:1] in ("!", "^")
        signs = re.sub(r"\\(.)", r"\1", inside[negated:])
        found, spans = 0, _character_spans(signs)
        for sign, places in self._where.items():
            if any(low <= sign <= high for low, high in spans) != negated:
                found |= places
        return found

    def _number(self, positions: int, low: int, high: int) -> int:
        found = 0
        for index in range(len(self._name)):
            if positions >> index & 1 and (number := _NUMBER.match(self._name, index)):
                for end in range(index + 1, number.end() + 1):
                    text = self._name[index:end].lstrip("+-")
                    if text and (text == "0" or text[0] != "0") and low <= int(self._name[index:end]) <= high:
                        found |= 1 << end
        return found


def _character_spans(signs: str) -> list[tuple[str, str]]:
    """`a-z_` as pairs of first and last."""
    spans, at = [], 0
    while at < len(signs):
        wide = signs[at + 1 : at + 2] == "-" and at + 2 < len(signs)
        spans.append((signs[at], signs[at + 2] if wide else signs[at]))
        at += 3 if wide else 1
    return spans


def _grouping_offsets(glob: str) -> frozenset[int]:
    """Offsets of the braces and commas that form alternatives: none if the braces are unbalanced, and no
    braces without a comma."""
    found: set[int] = set()
    opened: list[list[int]] = []
    at = 0
    while at < len(glob):
        if glob[at] == "\\":
            at += 1
        elif glob[at] == "[" and (bracket := _BRACKET.match(glob, at)):
            at = bracket.end() - 1
        elif glob[at] == "{":
            opened.append([at])
        elif glob[at] == "," and opened:
            opened[-1].append(at)
        elif glob[at] == "}":
            if not opened:
                return frozenset()
            group = opened.pop()
            if len(group) > 1:
                found.update(group, (at,))
        at += 1
    return frozenset() if opened else frozenset(found)
